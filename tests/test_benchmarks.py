"""What the benchmarks say is what they measured."""

import importlib
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import numpy as np
import pytest
from benchmarks import results_page

from mlp_research.config import Config, Execution, TrainConfig
from mlp_research.data import IdxConfig, datasets
from mlp_research.errors import Failure
from mlp_research.models import MLPConfig, summary
from mlp_research.programs.single import Experiment
from mlp_research.sweep import design
from tests import processes
from tests.made import small_config, small_execution

benchmark = processes.load_script("benchmark")


def part(name: str) -> ModuleType:
    """A file of scripts/benchmarks/, as benchmark.py imports it."""
    return importlib.import_module(f"benchmarks.{name}")


def test_every_measurement_is_offered_described_and_there():
    offered = set(get_args(benchmark.What))
    assert set(benchmark.WHERE) == offered
    for what, where in benchmark.WHERE.items():
        assert f"\n{what} " in str(benchmark.__doc__)
        assert callable(getattr(part(where), what))


def test_ratios_are_those_of_the_medians_within_a_group():
    times = {"wide": {"mine": [3.0, 1.0, 2.0], "other": [4.0, 5.0, 8.0]}, "deep": {"mine": [1.0]}}
    measured = part("measurement").compared("Title", times, "other", say=["Said."])
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in measured.lines[2:5]]
    assert rows == [
        ["wide", "mine", "3", "2.00 s", "1.00 s", "3.00 s", "0.400"],
        ["wide", "other", "3", "5.00 s", "4.00 s", "8.00 s", "1.000"],
        ["deep", "mine", "1", "1.00 s", "1.00 s", "1.00 s", "-"],
    ]
    assert measured.lines[5:] == ["", "Said."]
    assert measured.values == times


def test_the_floors_operations_are_the_matrix_products_of_a_step(data_dir: Path):
    """XLA counts these and, beside them, what is done for each number: little in a wide model."""
    config = Config(
        data=IdxConfig(validation=0),
        model=MLPConfig(widths=(512, 512)),
        train=TrainConfig(batch_size=64, epochs=1),
    )
    experiment = Experiment.of(config, Execution(data_dir=data_dir, mesh_data=1))
    products = part("speed").product_operations(config.model, 64, 12, 3)
    assert products == 2 * 64 * (2 * 12 * 512 + 3 * (512 * 512 + 512 * 3))
    counted = summary.operations(experiment.step_program())
    assert products < counted < 1.1 * products


def test_a_made_set_repeats_the_real_images(tmp_path: Path):
    directory = part("growth").write_set(tmp_path / "set", 130_000)
    made = datasets.load(directory, IdxConfig(validation=0)).train
    real = datasets.load(datasets.DEFAULT_DIRECTORY, IdxConfig(validation=0)).train
    assert len(made) == 130_000
    for row in (0, 59_999, 60_000, 129_999):
        assert np.array_equal(made.images[row], real.images[row % 60_000])
        assert made.labels[row] == real.labels[row % 60_000]


def test_a_program_that_fails_ends_the_benchmark_and_memory_is_told():
    call = part("measurement").call
    held = call("-c", "block = bytearray(200_000_000)")
    assert 200_000_000 < held < 400_000_000
    with pytest.raises(subprocess.CalledProcessError):
        call("-c", "raise SystemExit(3)")


def test_numbers_pictures_and_sections_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    measurement = part("measurement")
    monkeypatch.setattr(results_page, "DOCUMENT", tmp_path / "docs" / "results.md")
    results_page.DOCUMENT.parent.mkdir()
    output = tmp_path / "output"

    def measured(repeats: int, folder: Path) -> Any:
        return measurement.compared("Speed", {"group": {"mine": [1.0] * repeats}}, "mine")

    monkeypatch.setattr(part("speed"), "loader", measured)
    monkeypatch.setattr(part("speed"), "members", measured)
    for what in ("loader", "members"):
        benchmark.main([what, "--repeats", "2", "--output", str(output)])
    kept = json.loads((output / "benchmark.json").read_text())
    assert kept["loader"]["values"] == kept["members"]["values"] == {"group": {"mine": [1.0, 1.0]}}
    assert (output / "loader.png").read_bytes().startswith(b"\x89PNG")
    assert not results_page.DOCUMENT.exists()
    benchmark.main(["loader", "--repeats", "3", "--output", str(output), "--record"])
    section = results_page.DOCUMENT.read_text()
    assert "`python scripts/benchmark.py loader --repeats 3`" in section
    assert (
        "![Speed](loader.png)" in section and (results_page.DOCUMENT.parent / "loader.png").exists()
    )
    kept = json.loads((output / "benchmark.json").read_text())
    assert len(kept["loader"]["values"]["group"]["mine"]) == 3 and "members" in kept
    assert "| group | mine |" in capsys.readouterr().out


def test_the_loader_and_an_epoch_are_measured(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The shipped measurement, on the small made set."""
    speed = part("speed")
    small = Experiment.of(small_config(), small_execution(data_dir))
    monkeypatch.setattr(speed, "of_batch", lambda batch_size: small)
    (times,) = speed.loader(2, tmp_path).values.values()
    assert set(times) == {"numpy gather", "loader, pixels", "loader, rows", "an epoch of training"}
    assert all(0 < seconds < 60 for each in times.values() for seconds in each)
    assert {len(each) for each in times.values()} == {2}


def test_settings_are_found_by_the_names_that_a_sweep_gives_them():
    studies = part("studies")
    for rates in studies.RATES.values():
        vary = [
            f"schedule={','.join(studies.SCHEDULES)}",
            f"train.batch-size={','.join(map(str, studies.BATCHES))}",
            f"optimizer.learning-rate={','.join(rates)}",
        ]
        named = {setting.name for setting in design.grid(Config(), 1, vary)}
        assert named == {
            studies._name(schedule, batch, rate)
            for schedule in studies.SCHEDULES
            for batch in studies.BATCHES
            for rate in rates
        }


def test_several_are_measured_each_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch):
    """One that has started JAX leaves no choice of devices to the next."""
    started: list[list[str]] = []

    def run(command: list[str]) -> subprocess.CompletedProcess:
        started.append(command[2:])
        return subprocess.CompletedProcess(command, returncode=int("members" in command))

    monkeypatch.setattr(benchmark.subprocess, "run", run)
    with pytest.raises(Failure, match="members was not measured"):
        benchmark.main(["loader", "members", "start", "--repeats", "2", "--record"])
    rest = ["--repeats", "2", "--output", "runs/benchmark", "--record"]
    assert started == [["loader", *rest], ["members", *rest]]
