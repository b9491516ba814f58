"""Two processes and one folder: one of them is refused. Many folders and one cache: no harm."""

import os
import signal
import socket
from pathlib import Path

import pytest

from mlp_research.storage.run_folder import RunFolder, RunFolderError
from tests.faults.conftest import Tally
from tests.faults.jobs import BATCH, RUN, Job, Whole, check_same, holder, small_words
from tests.faults.starter import Started, Starter

IN_USE = "`RUN_DIR is in use by process 4321 on HOST since TIME`, exit code 1"
TAKEN_OVER = "`taken over from process 4321 on HOST since TIME, which is gone`"


def begin(starter: Starter, folder: Path, data_dir: Path, job: Job = RUN, cache=None) -> Started:
    """A new run, whatever is there."""
    place = ("--run-dir", folder, "--data.dir", data_dir, "--evaluation.batch-size", BATCH)
    return starter.start("train", *place, *job.words, "--train.steps-per-call", 7, cache=cache)


@pytest.mark.long
@pytest.mark.parametrize("rounds", [1, 10])
def test_of_several_at_once_in_one_folder_one_goes_on_until_its_lock_is_taken_over(
    rounds: int, whole_run: Whole, starter: Starter, tmp_path: Path, data_dir: Path, tally: Tally
):
    for number in range(rounds):
        folder = tmp_path / str(number)
        check_one_folder(whole_run, starter, folder, data_dir)
    tally("three processes begin at once in one folder", rounds, rounds, f"the others: {IN_USE}")
    tally("a second process resumes a run in use", rounds, rounds, IN_USE)
    tally("the lock of a killed process", rounds, rounds, TAKEN_OVER)


def check_one_folder(whole: Whole, starter: Starter, folder: Path, data_dir: Path) -> None:
    racers = {racer.pid: racer for racer in (begin(starter, folder, data_dir) for _ in range(3))}
    anyone = next(iter(racers.values()))
    anyone.until(lambda: (folder / "config.json").exists() and holder(folder) is not None)
    first = racers.pop(holder(folder) or 0)
    os.kill(first.pid, signal.SIGSTOP)  # it holds the folder for as long as the others need
    owner = f"process {first.pid} on {socket.gethostname()} since "
    try:
        for refused in racers.values():
            assert refused.wait() == 1, refused.printed()
            said = refused.printed()
            assert f"{folder} is in use by" in said or f"{folder} already holds a run" in said, said
        second = RUN.start(starter, folder, data_dir, slowly=False)
        assert second.wait() == 1, second.printed()
        assert f"{folder} is in use by {owner}" in second.printed()
        assert holder(folder) == first.pid, "a refused process has taken the folder"
    finally:
        os.kill(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    heir = RUN.start(starter, folder, data_dir, slowly=False)
    assert heir.wait() == 0, heir.printed()
    assert f"taken over from {owner}" in heir.printed()
    check_same(whole, folder)


def test_a_run_begun_between_the_look_and_the_lock_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run, acquire = tmp_path / "run", RunFolder._acquire

    def acquire_late(folder: RunFolder) -> None:
        (run / "config.json").write_text('{"seed": 1}')  # another process came, and is gone
        acquire(folder)

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "_acquire", acquire_late)
        with pytest.raises(RunFolderError, match="already holds a run"):
            RunFolder.open(run, {"seed": 2}, resume=False)
    with RunFolder.open(run, {"seed": 1}, resume=True) as folder:  # whole, and not locked
        assert folder.left_behind is None


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 8])
def test_runs_at_once_share_one_cold_compile_cache_without_harm(
    count: int, starter: Starter, tmp_path: Path, data_dir: Path, tally: Tally
):
    cache, entries = tmp_path / "cache", share_a_cache(starter, tmp_path, data_dir, count)
    assert entries, f"nothing was kept in {cache}"
    what = f"{count} runs at once with one cold compile cache"
    tally(what, count, count, "nothing: each ends with the same bits")


@pytest.mark.long
def test_a_torn_entry_of_the_compile_cache_is_compiled_anew(
    starter: Starter, tmp_path: Path, data_dir: Path, tally: Tally
):
    # What a kill within a write leaves.
    entries = share_a_cache(starter, tmp_path, data_dir, 1)
    for entry in entries:
        os.truncate(entry, entry.stat().st_size // 2)
    begun = begin(starter, tmp_path / "torn", data_dir, PLAIN, tmp_path / "cache")
    assert begun.wait() == 0, begun.printed()
    check_same(Whole(PLAIN, tmp_path / "run-0", 0), tmp_path / "torn")
    seen = "a warning of JAX for each; compiled anew, the same bits"
    tally("an entry of the compile cache torn", len(entries), len(entries), seen)


PLAIN = Job("train", (*small_words(2), "--optimizer", "sgd"), programs=1, epochs=2)
"""Quick to compile."""


def share_a_cache(starter: Starter, tmp_path: Path, data_dir: Path, count: int) -> list[Path]:
    """The entries of a compile cache, after so many equal runs began with it at once."""
    cache, folders = tmp_path / "cache", [tmp_path / f"run-{number}" for number in range(count)]
    begun = [begin(starter, folder, data_dir, PLAIN, cache) for folder in folders]
    for folder, each in zip(folders, begun, strict=True):
        assert each.wait() == 0, each.printed()
        assert "Traceback" not in each.printed(), each.printed()
        check_same(Whole(PLAIN, folders[0], 0), folder)
    return list(cache.rglob("*-cache"))
