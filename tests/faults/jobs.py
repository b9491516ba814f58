"""A small run and a small sweep, and what of two equal ones must be equal, to the bit."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from mlp_research.checkpoints.checkpoint import KEPT, Checkpoints
from tests.faults.starter import Started, Starter
from tests.made import TRAIN_ROWS, VALIDATION_ROWS

BATCH = 16
EPOCH = TRAIN_ROWS // BATCH
"""Steps of an epoch of the made data."""
LASTING = ("member", "seed", "parameters", "steps", "test", "validation")
"""What of a result.json does not differ between equal runs."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A script with its flags, and how many run folders and epochs it has when it is whole."""

    script: str
    words: tuple[object, ...]
    programs: int
    epochs: int

    def start(self, starter: Starter, folder: Path, data_dir: Path, slowly: bool) -> Started:
        """Begin it, or go on with what is there."""
        place = ("--run-dir", folder, "--data.dir", data_dir, "--evaluation.batch-size", BATCH)
        begun = (folder / "config.json").exists()
        words = (*place, "--resume") if begun else (*place, *self.words)
        how = starter.start_from_nothing if slowly else starter.start
        return how(self.script, *words, "--train.steps-per-call", 7)

    def runs(self, folder: Path) -> list[Path]:
        """The run folders that are there, in the order in which they are made."""
        if self.script == "train":
            return [folder] if folder.exists() else []
        return sorted(folder.glob("programs/*"))

    def is_finished(self, folder: Path) -> bool:
        """Whether the last of its results is there."""
        runs = self.runs(folder)
        return len(runs) == self.programs and (runs[-1] / "result.json").exists()


def small_words(epochs: int) -> tuple[object, ...]:
    """Flags for the made data."""
    words = ("--data.validation", VALIDATION_ROWS, "--train.batch-size", BATCH, "--seed", 3)
    return (*words, "--model.widths", 8, 6, "--model.dropout", 0.3, "--train.epochs", epochs)


RUN = Job("train", small_words(8), programs=1, epochs=8)
SWEPT = ("--vary", "optimizer.learning-rate=1e-3,1e-2", "--seeds", 2, "--members-per-program", 2)
SWEEP = Job("sweep", (*small_words(4), *SWEPT), programs=2, epochs=4)


@dataclasses.dataclass(frozen=True)
class Whole:
    """A job that nothing interrupted, and the seconds that it took."""

    job: Job
    folder: Path
    seconds: float


def holder(run: Path) -> int | None:
    """The process that says it holds a run folder."""
    try:
        return json.loads((run / ".owner.json").read_text())["pid"]
    except (OSError, ValueError):
        return None


def last_line(path: Path) -> dict[str, Any]:
    """The last whole line of a file of JSON lines, {} where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 1000))
            tail = file.read()
        return json.loads(tail[: tail.rindex(b"\n")].rpartition(b"\n")[2])
    except (OSError, ValueError):
        return {}


def check_same(whole: Whole, folder: Path) -> None:
    """A finished job left what the whole one left, to the bit, and nothing half-made."""
    job = whole.job
    for run, other in zip(job.runs(folder), job.runs(whole.folder), strict=True):
        assert lasting_lines_of(run) == lasting_lines_of(other)
        assert lasting_result(run) == lasting_result(other)
        (steps, best, state), (_, other_best, other_state) = saved(run), saved(other)
        assert state == other_state, "the final states differ"
        assert best == other_best, "another checkpoint is the best"
        assert len(steps) <= KEPT + 1, f"{len(steps)} checkpoints are left"
        assert not list(run.glob("checkpoints/*-tmp"))
        assert (run / "curves.png").stat().st_size > 0
    assert not list(folder.rglob(".owner.json")), "a folder is still held"
    for name in ("config.json", "plan.json", "summary.json", "summary.csv"):
        pair = [path / name for path in (folder, whole.folder)]
        if pair[1].exists():
            assert pair[0].read_bytes() == pair[1].read_bytes(), f"{name} differs"


def lasting_lines(content: bytes) -> list[dict[str, Any]]:
    """The whole lines of metrics.jsonl without what may differ between equal runs."""
    lines = [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
    return [
        {name: line[name] for name in line if not name.endswith(("_seconds", "_per_second"))}
        for line in lines
    ]


def lasting_lines_of(run: Path) -> list[dict[str, Any]]:
    return lasting_lines((run / "metrics.jsonl").read_bytes())


def lasting_result(run: Path) -> list[dict[str, Any]]:
    """What result.json says of each member that does not differ between equal runs."""
    result = read(run / "result.json")
    members = result if isinstance(result, list) else [result]
    return [{name: member[name] for name in LASTING if name in member} for member in members]


def saved(run: Path) -> tuple[list[int], int | None, dict[str, list]]:
    """(steps, best step, fingerprint of every array of the newest) of a run's checkpoints."""
    with Checkpoints(run / "checkpoints", reading=True) as checkpoints:
        steps = checkpoints.steps
        return steps, checkpoints.best_step, checkpoints._metadata(steps[-1])["fingerprint"]


def read(path: Path) -> Any:
    return json.loads(path.read_text())
