"""A run of many epochs needs no more of anything at its end than near its beginning."""

import contextlib
import dataclasses
import os
import re
import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlp_research.checkpoints.checkpoint import KEPT
from tests.faults.conftest import Tally
from tests.faults.jobs import Job, last_line, saved, small_words
from tests.faults.starter import Starter

POOLS = 6
"""Files or threads that pools may still add: far less than one each epoch."""
MEMORY_GROWTH = 24.0
"""Megabytes that a process's memory may grow: it rises and falls with Python's garbage."""


@dataclasses.dataclass(frozen=True)
class Sample:
    """What a process holds at an epoch."""

    epoch: int
    memory: float
    """Its own, in megabytes: not the pages of files, which the system takes and gives."""
    files: int
    threads: int
    checkpoints: int
    """Folders in checkpoints/, those that are being written or removed among them."""
    metrics: int
    """Bytes of metrics.jsonl."""


def sample(pid: int, run: Path) -> Sample:
    status = dict(re.findall(r"(\w+):\s+(\d+)", Path(f"/proc/{pid}/status").read_text()))
    metrics = run / "metrics.jsonl"
    return Sample(
        epoch=last_line(metrics).get("epoch", 0),
        memory=(int(status["RssAnon"]) + int(status["VmSwap"])) * 1024 / 1e6,
        files=len(os.listdir(f"/proc/{pid}/fd")),
        threads=len(os.listdir(f"/proc/{pid}/task")),
        checkpoints=sum(path.name[0].isdigit() for path in (run / "checkpoints").glob("*")),
        metrics=metrics.stat().st_size if metrics.exists() else 0,
    )


def samples_of(job: Job, starter: Starter, run: Path, data_dir: Path) -> list[Sample]:
    """Samples of a run, from its first epoch's lines to its last."""
    started, samples = job.start(starter, run, data_dir, slowly=False), []

    def ended() -> bool:
        if started.code is None:
            # It may end, or a folder be removed, in between.
            with contextlib.suppress(OSError, KeyError):
                samples.append(sample(started.pid, run))
        return started.code is not None

    started.until(ended, limit=100 + 2 * job.epochs)
    assert started.wait() == 0, started.printed()
    return [each for each in samples if each.epoch > 0]


def between(samples: Sequence[Sample], first: float, last: float) -> list[Sample]:
    """The samples from one epoch to another."""
    found = [each for each in samples if first <= each.epoch <= last]
    assert found, "no sample was taken there"
    return found


@pytest.mark.long
@pytest.mark.parametrize("epochs", [40, 500])
def test_a_long_run_grows_in_nothing_but_its_metrics(
    epochs: int, starter: Starter, tmp_path: Path, data_dir: Path, tally: Tally
):
    run = tmp_path / "run"
    job = Job("train", small_words(epochs), programs=1, epochs=epochs)
    samples = samples_of(job, starter, run, data_dir)
    settled = max(10, epochs // 10)  # before, pools of threads are filled
    early = between(samples, settled, 2 * settled)
    late = between(samples, 0.85 * epochs, 0.95 * epochs)  # after, curves.png is drawn
    grown = statistics.median(s.memory for s in late) - statistics.median(s.memory for s in early)
    assert grown < MEMORY_GROWTH, f"memory grew by {grown:.1f} MB"
    for name in ("files", "threads"):  # the least: a save has more for its time
        begun, ended = (min(getattr(each, name) for each in part) for part in (early, late))
        assert ended <= begun + POOLS, f"{name} grew from {begun} to {ended}"
    # One more is being written, and one removed.
    assert max(each.checkpoints for each in samples) <= KEPT + 1 + 2
    steps, best, _ = saved(run)
    assert len(steps) <= KEPT + 1 and best in steps
    line = statistics.median(s.metrics / s.epoch for s in early)
    assert samples[-1].metrics / epochs < 1.1 * line, "metrics.jsonl grew faster than the epochs"
    least = {name: min(getattr(each, name) for each in late) for name in ("files", "threads")}
    seen = (
        f"memory {grown:+.1f} MB from epoch {early[0].epoch} to the end, {least['files']} open "
        f"files, {least['threads']} threads, {len(steps)} checkpoints"
    )
    tally(f"a run of {epochs} epochs", 1, 1, seen)
