"""Jobs that are killed at chosen or random instants, and what must hold after each kill."""

import collections
import dataclasses
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.faults.jobs import (
    EPOCH,
    Job,
    Whole,
    check_same,
    holder,
    last_line,
    lasting_lines,
    lasting_lines_of,
    lasting_result,
    read,
)
from tests.faults.starter import Started, Starter

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


@dataclasses.dataclass(frozen=True)
class Attempt:
    """A process at work in a folder, to be killed when a moment has come."""

    job: Job
    folder: Path
    started: Started
    chance: random.Random
    seconds: float
    """What the whole job takes."""
    before: frozenset[tuple[Any, ...]]
    """What `traces` said before the process was started."""

    def news(self, kind: str) -> bool:
        """Whether there is a trace of a kind that was not there when the process was started."""
        new = traces(self.job, self.folder) - self.before
        return any(trace[0] == kind for trace in new)

    def holds(self) -> bool:
        """Whether the process holds a run folder: then its signals are noted, not obeyed."""
        return any(holder(run) == self.started.pid for run in self.job.runs(self.folder))

    def sleep(self, most: float) -> None:
        """For a random time up to `most` seconds, unless the process ends before."""
        end = time.monotonic() + self.chance.uniform(0, most)
        self.started.until(lambda: time.monotonic() >= end)


def traces(job: Job, folder: Path) -> frozenset[tuple[Any, ...]]:
    """What tells the moments of a job apart: (kind, ...) of what lies in its folder."""
    found: set[tuple[Any, ...]] = set()
    for run in job.runs(folder):
        for path in run.glob("checkpoints/*"):
            if path.name.endswith("-tmp"):
                found.add(("saving", path, *identity(path)))
            elif path.name.isdigit():
                found.add(("saved", path))
        last = last_line(run / "metrics.jsonl")
        changed = (run, *identity(run / "metrics.jsonl"))
        if last.get("split") == "train" and last["step"] % EPOCH == 0:
            found.add(("evaluating", *changed))
        if last.get("split") == "epoch" and last["epoch"] == job.epochs:
            found.add(("ending", *changed))
    return frozenset(found)


def identity(path: Path) -> tuple[int, int]:
    """Changes when the file is another one or is written again."""
    try:
        status = path.stat()
    except OSError:
        return (0, 0)
    return status.st_ino, status.st_ctime_ns


def at_random(attempt: Attempt) -> None:
    attempt.sleep(attempt.seconds)


def while_starting(attempt: Attempt) -> None:
    """Around the making of the folder, or up to a third of a second after."""
    if attempt.chance.random() < 0.5:
        attempt.started.until(lambda: holder(attempt.folder) == attempt.started.pid)
    attempt.sleep(0.3)


def inside_a_save(attempt: Attempt) -> None:
    attempt.started.until(lambda: attempt.news("saving"))
    attempt.sleep(0.02)


def after_a_save(attempt: Attempt) -> None:
    """Between a save and the end of the next epoch."""
    attempt.started.until(lambda: attempt.news("saved"))
    attempt.sleep(0.01)


def inside_evaluation(attempt: Attempt) -> None:
    attempt.started.until(lambda: attempt.news("evaluating"))
    attempt.sleep(0.002)


def inside_the_final_write(attempt: Attempt) -> None:
    """After the last epoch's lines: the last save, the test, result.json, the pictures."""
    attempt.started.until(lambda: attempt.news("ending"))
    attempt.sleep(0.2 * attempt.seconds)


Aim = Callable[[Attempt], None]
AIMS: dict[str, Aim] = {
    "while it starts": while_starting,
    "inside evaluation": inside_evaluation,
    "inside a save": inside_a_save,
    "between a save and the next": after_a_save,
    "at a random instant": at_random,
    "inside the final write": inside_the_final_write,
}


def kill_again_and_again(
    whole: Whole,
    starter: Starter,
    folder: Path,
    data_dir: Path,
    aims: Sequence[str],
    chance: random.Random,
    slowly: bool = False,
) -> "collections.Counter[str]":
    """Kill a job once at each aim, go on in between, and hold its end against the whole one.

    Returns how often each aim was met, and what the kills left behind.
    """
    job, counted = whole.job, collections.Counter()
    for aim in aims:
        while True:
            begun = traces(job, folder)
            started = job.start(starter, folder, data_dir, slowly)
            attempt = Attempt(job, folder, started, chance, whole.seconds, begun)
            AIMS[aim](attempt)
            if started.code is None:
                break
            # It came to its end before the moment: that must be a good one. Another folder, then.
            check_ended(whole, attempt)
            shutil.rmtree(folder)
        number = chance.choice(SIGNALS)
        held = attempt.holds()
        os.kill(started.pid, number)
        check_code(attempt, number, held)
        counted.update([aim, *check_left(whole, folder, number)])
    started = job.start(starter, folder, data_dir, slowly)
    started.wait()
    check_ended(whole, Attempt(job, folder, started, chance, whole.seconds, frozenset()))
    return counted


def check_code(attempt: Attempt, number: signal.Signals, held: bool) -> None:
    """The process ends by the signal, or having saved, or at its true end."""
    code, said = attempt.started.wait(), attempt.started.printed()
    if number == signal.SIGKILL:
        assert code in (-number, 0), said
    elif held and not attempt.job.is_finished(attempt.folder):
        assert code == 128 + number, f"{number.name} gave {code}: {said}"
        assert f"--resume --run-dir {attempt.folder}" in said, said
    elif number == signal.SIGINT and code == 1:
        # Python turns a Ctrl-C within the import of a compiled module into this.
        assert "ImportError" in said, said
    else:
        assert code in (-number, 128 + number, 0), f"{number.name} gave {code}: {said}"
    if held:
        assert "Traceback" not in said, said


def check_left(whole: Whole, folder: Path, number: signal.Signals) -> list[str]:
    """What lies in a folder after a kill is true; returns what is unfinished of it."""
    job, unfinished = whole.job, []
    for run, other in zip(job.runs(folder), job.runs(whole.folder), strict=False):
        metrics = run / "metrics.jsonl"
        content = metrics.read_bytes() if metrics.exists() else b""
        lines, expected = lasting_lines(content), lasting_lines_of(other)
        assert lines == expected[: len(lines)], f"{metrics} is not the beginning of the whole one"
        if (run / "result.json").exists():
            assert lines == expected, f"{run} has a result before its end"
            assert lasting_result(run) == lasting_result(other)
        if not content.endswith(b"\n") and content:
            assert number == signal.SIGKILL, f"{metrics} is torn by {number.name}"
            unfinished.append("a torn line of metrics.jsonl")
        if any(run.glob("checkpoints/*-tmp")):
            unfinished.append("a half-made checkpoint")
    if any(folder.rglob("*.part")):
        unfinished.append("a half-written file beside the whole one")
    if (folder / "config.json").exists():
        assert read(folder / "config.json") == read(whole.folder / "config.json")
    return [f"left behind: {what}" for what in unfinished]


def check_ended(whole: Whole, attempt: Attempt) -> None:
    """The job has ended well, and as if it had never been interrupted."""
    job, folder, said = whole.job, attempt.folder, attempt.started.printed()
    assert attempt.started.code == 0, said
    assert "Traceback" not in said, said
    check_same(whole, folder)
    assert len(job.runs(folder)) == job.programs
