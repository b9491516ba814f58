"""Killed or stopped at any place, a run goes on and ends as the uninterrupted one."""

import functools
import json
import signal
from pathlib import Path

import pytest

from mlp_research.checkpoints.checkpoint import Checkpoints
from tests import processes
from tests.laws import lasting_lines
from tests.made import VALIDATION_ROWS

EPOCH = 12
"""Steps of an epoch of the made data."""
LINES = EPOCH + 2
"""Lines of an epoch: its steps, its validation, its speed."""


LATER = functools.partial(pytest.param, marks=pytest.mark.long)


def flags(data_dir: Path) -> list[object]:
    """20 epochs, one step a call: slow enough to be met in the middle."""
    return [
        *("--data.dir", data_dir, "--data.validation", VALIDATION_ROWS, "--seed", 3),
        *("--model.widths", 8, 6, "--model.dropout", 0.3, "--evaluation.batch-size", 16),
        *("--train.epochs", 20, "--train.batch-size", 16, "--train.steps-per-call", 1),
    ]


@pytest.fixture(scope="module")
def whole(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of the uninterrupted run."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    ended = processes.run("train.py", *flags(data_dir), "--run-dir", run_dir)
    assert ended.returncode == 0, ended.stderr
    return run_dir


def last_fingerprint(run_dir: Path) -> dict[str, list]:
    """Dtype, shape and CRC-32 of every array of the final state."""
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        return checkpoints._metadata(checkpoints.steps[-1])["fingerprint"]


def assert_ends_like(run_dir: Path, whole: Path) -> None:
    assert lasting_lines(run_dir) == lasting_lines(whole)
    assert last_fingerprint(run_dir) == last_fingerprint(whole)
    mine, other = (json.loads((path / "result.json").read_text()) for path in (run_dir, whole))
    for name in ("seed", "parameters", "steps", "test", "validation"):
        assert mine[name] == other[name]


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), LATER(signal.SIGINT, 130)]
)
@pytest.mark.parametrize(
    "lines",
    [LATER(5), 4 * LINES + 7, LATER(6 * LINES)],
    ids=["before a checkpoint", "mid-epoch", "epoch's end"],
)
def test_a_stopped_run_goes_on_to_the_same_bits(
    number: signal.Signals, code: int, lines: int, whole: Path, data_dir: Path, tmp_path: Path
):
    run_dir = tmp_path / "run"
    process = processes.start("train.py", *flags(data_dir), "--run-dir", run_dir)
    stopped = processes.signal_after_lines(process, run_dir / "metrics.jsonl", lines, number)
    assert stopped.returncode == code, stopped.stderr
    if number != signal.SIGKILL:
        assert f"--resume --run-dir {run_dir}" in stopped.stderr
        assert "Traceback" not in stopped.stderr
    assert not (run_dir / "result.json").exists()
    resumed = processes.run(
        *("train.py", "--resume", "--run-dir", run_dir, "--data.dir", data_dir),
        *("--evaluation.batch-size", 16, "--train.steps-per-call", 7),
    )
    assert resumed.returncode == 0, resumed.stderr
    assert_ends_like(run_dir, whole)


@pytest.mark.long
def test_a_finished_run_resumed_repeats_its_result(whole: Path, data_dir: Path):
    before = json.loads((whole / "result.json").read_text())["test"]
    lines = lasting_lines(whole)
    again = processes.run("train.py", "--resume", "--run-dir", whole, "--data.dir", data_dir)
    assert again.returncode == 0, again.stderr
    assert json.loads((whole / "result.json").read_text())["test"]["correct"] == before["correct"]
    assert lasting_lines(whole) == lines
