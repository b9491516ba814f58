"""Whatever the disk does: the newest sound checkpoint is used, the damage named, nothing lost."""

import concurrent.futures.thread
import contextlib
import os
import random
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlp_research.checkpoints.checkpoint import CheckpointError, Checkpoints
from mlp_research.fit import fit
from mlp_research.models import MLPConfig
from mlp_research.programs import base
from mlp_research.programs.single import Experiment
from mlp_research.terminal import command_line
from mlp_research.terminal.report import Report
from tests.laws import lasting_lines
from tests.made import VALIDATION_ROWS, arrays_of, small_config, small_execution
from tests.processes import load_script

TRAIN = load_script("train")
EPOCH, STEPS = 12, 24
WIDTH = 96
"""Wide enough for a checkpoint to be larger than the run's other files."""
CONFIG = small_config(model=MLPConfig(widths=(WIDTH,), dropout=0.3), epochs=2)
Tally = Callable[[str, int, int, str], None]
Damage = Callable[[Path, random.Random], None]


@pytest.fixture(scope="module")
def whole(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    fit(CONFIG, small_execution(data_dir), run_dir=run_dir, report=Report(quiet=True))
    return run_dir


@pytest.fixture(scope="module")
def template(data_dir: Path) -> base.Saved:
    return Experiment.of(CONFIG, small_execution(data_dir)).saved_template()


Saved = dict[int, tuple[list[bytes], dict[str, Any]]]


def content(state: base.Saved) -> list[bytes]:
    return [leaf.tobytes() for leaf in arrays_of(state)]


@pytest.fixture(scope="module")
def saved(whole: Path, template: base.Saved) -> Saved:
    """Step -> (bits of the state, notes) of the run's checkpoints."""
    found = {}
    with Checkpoints(whole / "checkpoints", reading=True) as checkpoints:
        for step in checkpoints.steps:
            state, notes = checkpoints.restore(step, template)
            found[step] = (content(state), notes)
    assert list(found) == [EPOCH, STEPS]
    return found


def truncated(path: Path, chance: random.Random) -> None:
    os.truncate(path, path.stat().st_size // 2)


def emptied(path: Path, chance: random.Random) -> None:
    os.truncate(path, 0)


def removed(path: Path, chance: random.Random) -> None:
    path.unlink()


def flipped(path: Path, chance: random.Random) -> None:
    changed = bytearray(path.read_bytes())
    if changed:
        changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)
    path.write_bytes(changed)


def swapped(path: Path, chance: random.Random) -> None:
    """Another file's content: bytes that are whole, but not this file's."""
    others = [p for p in sorted(path.parent.iterdir()) if p.is_file() and p != path]
    path.write_bytes(chance.choice(others).read_bytes() if others else b"{}")


def checkpoint_files(run_dir: Path, step: int) -> list[str]:
    folder = run_dir / "checkpoints"
    return sorted(
        str(p.relative_to(folder)) for p in (folder / str(step)).rglob("*") if p.is_file()
    )


def outcome(folder: Path, template: base.Saved, saved: Saved) -> str:
    """What became of a damaged folder of checkpoints; AssertionError where it is not right."""
    with Checkpoints(folder) as checkpoints:
        restored = checkpoints.restore_newest(template)
    assert restored is not None, "a checkpoint was overlooked, and the run would begin anew"
    state, notes, damage = restored
    step = int(state.state.step)
    assert (content(state), notes) == saved[step], "a change was accepted"
    if step == STEPS:
        assert damage == []
        return "harmless"
    (line,) = damage
    assert line.startswith(f"checkpoint {STEPS} is damaged: ")
    return "named"


DAMAGES: list[tuple[str, Damage, int]] = [
    ("truncated", truncated, 1),
    ("emptied", emptied, 1),
    ("removed", removed, 1),
    ("with a bit flipped", flipped, 40),
    ("with another's content", swapped, 3),
]


# Reads beside the one that failed may end late, and say that none waits for them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "thorough", [pytest.param(False, id="short"), pytest.param(True, marks=pytest.mark.long)]
)
@pytest.mark.parametrize(("how", "damage", "times"), DAMAGES, ids=[d[0] for d in DAMAGES])
def test_a_checkpoint_with_any_file_damaged_is_passed_over_and_named(
    how: str,
    damage: Damage,
    times: int,
    thorough: bool,
    whole: Path,
    template: base.Saved,
    saved: Saved,
    tmp_path: Path,
    tally: Tally,
):
    chance, seen = random.Random(how), {"harmless": 0, "named": 0}
    for name in checkpoint_files(whole, STEPS):
        for _ in range(times if thorough else 1):
            folder = shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
            damage(folder / name, chance)
            seen[outcome(folder, template, saved)] += 1
            shutil.rmtree(folder)
    tried = sum(seen.values())
    assert seen["named"] > 0
    tally(
        f"one file of a checkpoint {how}",
        tried,
        tried,
        "checkpoint 24 is damaged: ...; the run goes on from step 12 (or, where the bytes carried "
        "no content, the exact state)",
    )


@pytest.mark.parametrize("damaged", [[STEPS], [EPOCH], [EPOCH, STEPS]], ids=str)
def test_a_checkpoint_that_orbax_cannot_list_hides_no_other(
    damaged: list[int], whole: Path, template: base.Saved, saved: Saved, tmp_path: Path
):
    folder = shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    for step in damaged:
        path = folder / str(step) / "_CHECKPOINT_METADATA"
        path.write_text(
            path.read_text().replace("commit_timestamp_nsecs", "commit_timestamp_nseas")
        )
    with pytest.raises(CheckpointError, match=f"checkpoint {damaged[0]} is damaged: its metadata"):
        Checkpoints(folder, reading=True)
    with Checkpoints(folder) as checkpoints:
        if damaged == [EPOCH, STEPS]:
            with pytest.raises(CheckpointError, match="no sound checkpoint is left"):
                checkpoints.restore_newest(template)
            return
        restored = checkpoints.restore_newest(template)
    assert restored is not None
    state, notes, damage = restored
    (sound,) = {EPOCH, STEPS} - {*damaged}
    assert (content(state), notes) == saved[sound]
    assert [line.partition(":")[0] for line in damage] == [f"checkpoint {damaged[0]} is damaged"]


def test_checkpoints_that_a_killed_run_had_not_removed_yet_go_when_it_ends(
    whole: Path, tmp_path: Path
):
    folder = shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    for step in (3, 6):
        shutil.copytree(folder / str(EPOCH), folder / str(step))
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.steps == [3, 6, EPOCH, STEPS]
        checkpoints.wait()
    assert sorted(int(path.name) for path in folder.iterdir()) == [EPOCH, STEPS]


@pytest.mark.parametrize("damage", [emptied, flipped, removed], ids=lambda damage: damage.__name__)
def test_where_no_checkpoint_is_sound_the_refusal_names_each(
    damage: Damage, whole: Path, template: base.Saved, tmp_path: Path
):
    folder = shutil.copytree(whole / "checkpoints", tmp_path / "checkpoints")
    for step in (EPOCH, STEPS):
        for name in checkpoint_files(whole, step):
            for _ in range(3 if damage is flipped else 1):
                damage(folder / name, random.Random(step))
    with (
        Checkpoints(folder) as checkpoints,
        pytest.raises(CheckpointError, match="no sound checkpoint is left") as caught,
    ):
        checkpoints.restore_newest(template)
    for step in (EPOCH, STEPS):
        assert f"checkpoint {step} is damaged" in str(caught.value)


Call = Callable[..., tuple[int, str]]
POOLED = concurrent.futures.thread._threads_queues  # pyright: ignore[reportAttributeAccessIssue]
"""Threads of pools: they wait for work, and end when the process does."""


@pytest.fixture
def call(
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Call:
    """(exit code, what was printed, folded) of train.py on the made data with these words."""
    monkeypatch.setenv("COLUMNS", "200")

    def call_train(*words: object, data: Path = data_dir) -> tuple[int, str]:
        flags = [*words, "--data.dir", data, "--evaluation.batch-size", 16]
        flags += ["--mesh.data", 1, "--train.steps-per-call", 5, "--no-compile-cache"]
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, flags)])
        threads = set(threading.enumerate())
        with pytest.raises(SystemExit) as ended:
            command_line.run(TRAIN.main)
        for thread in set(threading.enumerate()) - threads:
            if not thread.daemon and thread not in POOLED:
                thread.join(20)
                assert not thread.is_alive(), f"{thread} would hold the process"
        printed = capsys.readouterr()
        text = " ".join((printed.out + printed.err).split())
        assert "Traceback" not in text
        return int(ended.value.code or 0), text

    return call_train


def new_run(run_dir: Path) -> list[object]:
    return [
        *("--run-dir", run_dir, "--data.validation", VALIDATION_ROWS, "--train.batch-size", 16),
        *("--train.epochs", 2, "--model.widths", WIDTH, "--model.dropout", 0.3),
    ]


@contextlib.contextmanager
def file_size_below(limit: int) -> Iterator[None]:
    """No file of this process can grow beyond: the kernel refuses, as it does on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextlib.contextmanager
def full_for_metrics(run_dir: Path) -> Iterator[None]:
    with file_size_below((run_dir / "metrics.jsonl").stat().st_size + 50):
        yield


@contextlib.contextmanager
def full_for_checkpoints(run_dir: Path) -> Iterator[None]:
    with file_size_below(10_000):
        yield


@contextlib.contextmanager
def full_for_the_result(run_dir: Path) -> Iterator[None]:
    part = run_dir / "result.json.part"
    part.symlink_to("/dev/full")
    try:
        yield
    finally:
        part.unlink()


@contextlib.contextmanager
def without_permission(run_dir: Path, mode: int = 0o555) -> Iterator[None]:
    """The folder belongs to another user and cannot be written."""
    folders = [run_dir, *(path for path in run_dir.rglob("*") if path.is_dir())]
    modes = [path.stat().st_mode for path in folders]
    for path in folders:
        path.chmod(mode)
    me = os.geteuid()
    if me == 0:  # nothing is denied to root
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(me)
        for path, before in zip(folders, modes, strict=True):
            path.chmod(before)


@contextlib.contextmanager
def a_file_for_the_checkpoints(run_dir: Path) -> Iterator[None]:
    """A file where the folder of checkpoints was."""
    folder, aside = run_dir / "checkpoints", run_dir.parent / "aside"
    folder.rename(aside)
    folder.write_text("")
    try:
        yield
    finally:
        folder.unlink()
        aside.rename(folder)


# What happens after the first epoch, and what the message must say.
Fault = Callable[[Path], contextlib.AbstractContextManager[None]]
FAULTS: list[tuple[str, Fault, list[str]]] = [
    ("disk full for metrics", full_for_metrics, ["cannot be written", "File too large"]),
    ("disk full for a checkpoint", full_for_checkpoints, ["a checkpoint cannot be saved in"]),
    ("disk full for result.json", full_for_the_result, ["No space left on device"]),
    ("permission lost midway", without_permission, ["Permission denied"]),
    ("a file where checkpoints were", a_file_for_the_checkpoints, ["cannot be"]),
]


@pytest.mark.parametrize(("name", "fault", "words"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_run_that_cannot_write_says_so_and_goes_on_to_the_same_bits_when_it_can(
    name: str,
    fault: Fault,
    words: list[str],
    call: Call,
    whole: Path,
    template: base.Saved,
    saved: Saved,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    tally: Tally,
):
    run_dir, epoch = tmp_path / "run", Report.epoch
    with contextlib.ExitStack() as faults, monkeypatch.context() as patched:

        def begin(report: Report, row: Any) -> None:
            epoch(report, row)
            if row["epoch"] == 1:
                wait_for_checkpoint(run_dir, EPOCH)
                faults.enter_context(fault(run_dir))

        patched.setattr(Report, "epoch", begin)
        code, text = call(*new_run(run_dir))
    assert code == 1, text
    for word in words:
        assert word in text, text
    assert not (run_dir / "result.json").exists()
    copy = shutil.copytree(run_dir / "checkpoints", tmp_path / "copy")
    with Checkpoints(copy, reading=True) as checkpoints:
        state, _ = checkpoints.restore(EPOCH, template)
        assert content(state) == saved[EPOCH][0], "the earlier checkpoint is not whole"
    code, text = call("--resume", "--run-dir", run_dir)
    assert code == 0, text
    assert lasting_lines(run_dir) == lasting_lines(whole)
    with Checkpoints(run_dir / "checkpoints", reading=True) as checkpoints:
        state, _ = checkpoints.restore(STEPS, template)
    assert content(state) == saved[STEPS][0]
    tally(name, 1, 1, f"... {words[-1]} ...; exit code 1; --resume ends at the same bits")


def wait_for_checkpoint(run_dir: Path, step: int) -> None:
    deadline = time.monotonic() + 30
    while not (run_dir / "checkpoints" / str(step)).is_dir():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_whose_folder_is_deleted_ends_with_a_message(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tally: Tally
):
    run_dir, epoch = tmp_path / "run", Report.epoch

    def delete(report: Report, row: Any) -> None:
        epoch(report, row)
        if row["epoch"] == 1:
            wait_for_checkpoint(run_dir, EPOCH)
            shutil.rmtree(run_dir)

    monkeypatch.setattr(Report, "epoch", delete)
    code, text = call(*new_run(run_dir))
    assert (code, "metrics.jsonl cannot be written: No such file" in text) == (1, True), text
    assert not (run_dir / "result.json").exists() and not (run_dir / "metrics.jsonl").exists()
    code, text = call("--resume", "--run-dir", run_dir)
    assert (code, "holds no run" in text) == (1, True), text
    tally("run folder deleted under the run", 1, 1, "metrics.jsonl cannot be written; exit code 1")


def test_a_folder_that_is_read_only_is_refused_before_anything_is_computed(
    call: Call, whole: Path, data_dir: Path, tally: Tally
):
    with tempfile.TemporaryDirectory() as temporary:  # others may enter it, unlike `tmp_path`
        room = Path(temporary)
        room.chmod(0o755)
        data = shutil.copytree(data_dir, room / "data")
        data.chmod(0o755)
        parent, run_dir = room / "read-only", shutil.copytree(whole, room / "run")
        parent.mkdir()
        with without_permission(parent):
            code, text = call(*new_run(parent / "run"), data=data)
            assert (code, "cannot be written: Permission denied" in text) == (1, True), text
        with without_permission(parent, 0):  # not even to be looked into
            code, text = call(*new_run(parent / "run"), data=data)
            assert (code, "cannot be written: Permission denied" in text) == (1, True), text
        with without_permission(run_dir):
            code, text = call("--resume", "--run-dir", run_dir, data=data)
            assert (code, "Permission denied" in text) == (1, True), text
        assert lasting_lines(run_dir) == lasting_lines(whole)
    tally("read-only folder", 3, 3, "RUN_DIR cannot be written: Permission denied; exit code 1")
