"""Several processes over loopback compute one run: its batches, its numbers, its one folder."""

import json
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest

from mlp_research.data.loader import evaluation_batches, row_chunks, train_chunks
from mlp_research.fit import fit
from mlp_research.system import sharding
from mlp_research.terminal.report import Report
from tests import processes
from tests.laws import experiment_of, lasting_lines
from tests.made import VALIDATION_ROWS, small_config, small_execution

EPOCH_LINES = 14
"""Lines of an epoch of the made data: 12 steps, its validation, its speed."""
ENDS_WITHIN = 60.0
"""Seconds in which a group ends of which one process is lost; silence is noticed after 20."""


def start_group(
    count: int, data_dir: Path, run_dir: Path, *words: object, last_data_dir: Path | None = None
) -> list["subprocess.Popen[str]"]:
    """So many processes that train the config of `made.small_config` together."""
    folders = [data_dir] * (count - 1) + [last_data_dir or data_dir]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    group = ("--distributed", "--distributed.coordinator", address)
    config = (
        *("--data.validation", VALIDATION_ROWS),
        *("--model.widths", 8, 6, "--model.dropout", 0.3, "--train.batch-size", 16),
        *("--evaluation.batch-size", 16, "--train.steps-per-call", 5, "--run-dir", run_dir),
    )
    return [
        processes.start(
            *("train.py", *group, "--distributed.processes", count),
            *("--distributed.process", index, "--data.dir", folders[index], *config, *words),
        )
        for index in range(count)
    ]


def alone(
    data_dir: Path, run_dir: Path, devices: int, *, epochs: int = 2, resume: bool = False
) -> dict:
    """What one process makes of the same config on so many devices."""
    execution = small_execution(data_dir, mesh_data=devices)
    quiet = Report(quiet=True)
    config = small_config(epochs=epochs)
    return fit(config, execution, run_dir=run_dir, resume=resume, report=quiet).summary


def assert_alike(lines: list[dict], others: list[dict]) -> None:
    """The same lines, but that losses and norms may differ by rounding."""
    rounded = ("loss", "gradient_norm")
    for line, other in zip(lines, others, strict=True):
        assert {k: v for k, v in line.items() if k not in rounded} == {
            k: v for k, v in other.items() if k not in rounded
        }
        for name in rounded:
            assert np.isclose(line.get(name, 0), other.get(name, 0), rtol=1e-5, atol=0)


def result_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "result.json").read_text())


@pytest.mark.parametrize("count", [2, pytest.param(4, marks=pytest.mark.long)])
def test_processes_compute_the_run_of_as_many_devices(count: int, data_dir: Path, tmp_path: Path):
    """The same batches and masks: losses to rounding, what is counted to the last example."""
    group = start_group(count, data_dir, tmp_path / "group", "--train.epochs", 2)
    ended = [processes.finished(process) for process in group]
    assert [each.returncode for each in ended] == [0] * count, ended[0].stderr
    assert f"in {count} processes" in ended[0].stdout
    assert not any("epoch" in other.stdout for other in ended[1:]), "only the first reports"
    single = alone(data_dir, tmp_path / "alone", count)
    lines, others = (lasting_lines(tmp_path / name) for name in ("group", "alone"))
    assert_alike(lines, others)
    assert_alike([result_of(tmp_path / "group")["test"]], [single["test"]])


@pytest.mark.long
def test_layers_are_spread_over_processes(data_dir: Path, tmp_path: Path):
    words = ("--train.epochs", 1, "--mesh.data", 1, "--mesh.model", 2)
    group = start_group(2, data_dir, tmp_path / "group", *words)
    ended = [processes.finished(process) for process in group]
    assert [each.returncode for each in ended] == [0, 0], ended[0].stderr
    assert "dense layers, each over 2 devices" in ended[0].stdout
    single = alone(data_dir, tmp_path / "alone", 1, epochs=1)
    result = result_of(tmp_path / "group")
    assert result["test"]["correct"] == single["test"]["correct"]
    assert np.isclose(result["test"]["loss"], single["test"]["loss"], rtol=1e-5)


def interrupted_group(
    data_dir: Path, run_dir: Path, number: signal.Signals
) -> tuple[list["subprocess.CompletedProcess[str]"], float]:
    """How both of two processes ended after a signal to the second, and in how many seconds."""
    group = start_group(2, data_dir, run_dir, "--train.epochs", 40)
    last = processes.signal_after_lines(
        group[1], run_dir / "metrics.jsonl", 3 * EPOCH_LINES + 2, number
    )
    began = time.monotonic()
    return [processes.finished(group[0]), last], time.monotonic() - began


@pytest.fixture(scope="module")
def uninterrupted(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The result of 40 epochs of one process on one device."""
    return alone(data_dir, tmp_path_factory.mktemp("whole") / "run", 1, epochs=40)


def assert_goes_on_alone(data_dir: Path, run_dir: Path, uninterrupted: dict) -> None:
    assert not (run_dir / "result.json").exists()
    resumed = alone(data_dir, run_dir, 1, epochs=40, resume=True)
    assert resumed["test"]["correct"] == uninterrupted["test"]["correct"]
    assert np.isclose(resumed["test"]["loss"], uninterrupted["test"]["loss"], rtol=1e-4)
    steps = [line["step"] for line in lasting_lines(run_dir) if line["split"] == "train"]
    assert steps == list(range(1, 40 * 12 + 1))


def test_a_killed_process_ends_the_others_and_the_run_goes_on_alone(
    data_dir: Path, tmp_path: Path, uninterrupted: dict
):
    run_dir = tmp_path / "run"
    (survivor, killed), seconds = interrupted_group(data_dir, run_dir, signal.SIGKILL)
    assert (survivor.returncode, killed.returncode) == (1, -9), survivor.stderr
    assert seconds < ENDS_WITHIN
    assert "process 0 of 2 ends: another process of the run is gone" in survivor.stderr
    assert "--resume" in survivor.stderr and "Traceback" not in survivor.stderr
    assert_goes_on_alone(data_dir, run_dir, uninterrupted)


@pytest.mark.long
def test_sigterm_to_one_process_stops_all_at_one_step(
    data_dir: Path, tmp_path: Path, uninterrupted: dict
):
    run_dir = tmp_path / "run"
    both, _ = interrupted_group(data_dir, run_dir, signal.SIGTERM)
    assert [each.returncode for each in both] == [143, 143], both[0].stderr
    assert f"--resume --run-dir {run_dir}" in both[0].stderr
    assert_goes_on_alone(data_dir, run_dir, uninterrupted)


def test_a_folder_that_the_first_process_cannot_use_ends_all(data_dir: Path, tmp_path: Path):
    run_dir = tmp_path / "run"
    alone(data_dir, run_dir, 1, epochs=1)
    before = shutil.copytree(run_dir, tmp_path / "before")
    group = start_group(2, data_dir, run_dir, "--train.epochs", 1)
    first, second = [processes.finished(process) for process in group]
    assert (first.returncode, second.returncode) == (1, 1)
    assert "already holds a run" in first.stderr
    assert "the first process says why" in second.stderr
    assert result_of(run_dir) == result_of(before)


def test_processes_that_have_different_data_compute_nothing_together(
    data_dir: Path, other_data_dir: Path, tmp_path: Path
):
    group = start_group(2, data_dir, tmp_path / "run", last_data_dir=other_data_dir)
    for process in group:
        ended = processes.finished(process)
        assert ended.returncode == 1
        assert "the processes have different data" in ended.stderr
        assert "Traceback" not in ended.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--distributed",), "--distributed needs --run-dir"),
        (("--distributed", "--run-dir", "run"), "give --distributed.coordinator HOST:PORT"),
    ],
)
def test_a_group_that_cannot_be_is_refused(words: tuple, said: str):
    ended = processes.run("train.py", *words)
    assert ended.returncode == 2
    assert said in " ".join(ended.stderr.split()) and "Traceback" not in ended.stderr


def test_the_parts_of_a_batch_make_it_up(data_dir: Path):
    """Each process loads its part alone; side by side they are the whole batch."""
    run = experiment_of(data_dir)
    plan, train, test = run.chunk_plan(0), run.data.train, run.data.test
    parts = [slice(start, start + 4) for start in range(0, 16, 4)]
    assert run.resident_rows is not None
    for whole, *shares in zip(
        train_chunks(plan, train), *(train_chunks(plan, train, part=p) for p in parts), strict=True
    ):
        joined = np.concatenate([share.steps.images for share in shares], axis=1)
        assert np.array_equal(joined, whole.steps.images)
        joined = np.concatenate([share.steps.labels for share in shares], axis=1)
        assert np.array_equal(joined, whole.steps.labels)
    rows = run.resident_rows
    for whole, *shares in zip(
        row_chunks(plan, rows), *(row_chunks(plan, rows, p) for p in parts), strict=True
    ):
        joined = np.concatenate([share.steps for share in shares], axis=1)
        assert np.array_equal(joined, whole.steps)
    for whole, *shares in zip(
        evaluation_batches(test, 16), *(evaluation_batches(test, 16, p) for p in parts), strict=True
    ):
        for name in ("images", "labels", "real"):
            joined = np.concatenate([getattr(share, name) for share in shares])
            assert np.array_equal(joined, getattr(whole, name))


def test_one_process_loads_the_whole_batch():
    assert sharding.local_part(sharding.device_mesh(4, 2), 16) == slice(0, 16)
    assert sharding.local_part(sharding.device_mesh(1, 1), 16) == slice(0, 16)
