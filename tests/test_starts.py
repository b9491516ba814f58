"""A run may start from another's parameters, which are known by their checksum."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlp_research.config import Config, read_config
from mlp_research.errors import ConfigError
from mlp_research.fit import fit
from mlp_research.models import MLPConfig
from mlp_research.optimizers import AdamConfig
from mlp_research.programs.single import Experiment
from mlp_research.starts import RunStart
from mlp_research.terminal.report import Report
from tests import laws
from tests.made import (
    arrays_of,
    assert_bitwise,
    initial_state,
    small_config,
    small_execution,
    train_through,
)
from tests.outside import kinds, lab


def train(config: Config, data_dir: Path, run_dir: Path, *, resume: bool = False) -> Any:
    execution, quiet = small_execution(data_dir), Report(quiet=True)
    return fit(config, execution, run_dir=run_dir, resume=resume, report=quiet)


@pytest.fixture(scope="module")
def source(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return train(small_config(epochs=1), data_dir, tmp_path_factory.mktemp("source") / "run")


def start_from(source: Any, **fields: Any) -> RunStart:
    return RunStart(run_dir=str(source.run_dir), **fields)


def refusal(config: Config, data_dir: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        Experiment.of(config, small_execution(data_dir))
    return str(caught.value)


def test_it_starts_from_the_very_parameters(source: Any, data_dir: Path):
    run = Experiment.of(small_config(start=start_from(source)), small_execution(data_dir))
    assert_bitwise(initial_state(run).model, source.model)


def test_what_an_optimizer_evaluates_is_what_is_taken(data_dir: Path, tmp_path: Path):
    averaged = train(small_config(optimizer=lab.AveragedAdam()), data_dir, tmp_path / "averaged")
    run = Experiment.of(small_config(start=start_from(averaged)), small_execution(data_dir))
    assert_bitwise(initial_state(run).model, averaged.model)


def test_named_leaves_are_taken_and_all_else_is_the_seeds(source: Any, data_dir: Path):
    config = small_config(seed=5, start=start_from(source, leaves=("layers[0]", "layers[1].bias")))
    model = initial_state(Experiment.of(config, small_execution(data_dir))).model
    own = initial_state(Experiment.of(small_config(seed=5), small_execution(data_dir))).model
    assert_bitwise(model.layers[0], source.model.layers[0])
    assert_bitwise(model.layers[1].bias, source.model.layers[1].bias)
    assert_bitwise((model.layers[1].weight, model.layers[2]), (own.layers[1].weight, own.layers[2]))


def test_a_model_with_state_starts_with_its_statistics(data_dir: Path, tmp_path: Path):
    model = MLPConfig(widths=(8,), normalisation="batch")
    normed = train(small_config(model=model, epochs=1), data_dir, tmp_path / "normed")
    config = small_config(model=model, start=start_from(normed))
    assert_bitwise(
        initial_state(Experiment.of(config, small_execution(data_dir))).model, normed.model
    )
    named = start_from(normed, leaves=("layers[0]",))
    state = initial_state(
        Experiment.of(small_config(model=model, start=named), small_execution(data_dir))
    )
    assert_bitwise(state.model.model.layers[0], normed.model.model.layers[0])
    assert not arrays_of(state.model.state)[0].any()


def test_the_checksum_is_kept_and_frozen_leaves_stay(source: Any, data_dir: Path, tmp_path: Path):
    config = small_config(
        start=start_from(source), optimizer=AdamConfig(freeze=("layers[0]", "layers[1]"))
    )
    tuned = train(config, data_dir, tmp_path / "tuned")
    kept = read_config(tmp_path / "tuned").start
    assert isinstance(kept, RunStart) and kept.crc32 is not None
    assert_bitwise(tuned.model.layers[:2], source.model.layers[:2])
    assert not np.array_equal(tuned.model.layers[2].weight, source.model.layers[2].weight)
    resumed = train(read_config(tmp_path / "tuned"), data_dir, tmp_path / "tuned", resume=True)
    assert resumed.summary["test"] == tuned.summary["test"]


def test_a_changed_source_is_refused(source: Any, data_dir: Path, tmp_path: Path):
    run = Experiment.of(small_config(start=start_from(source)), small_execution(data_dir))
    crc32 = run.config.to_json()["start"]["crc32"]
    other = train(small_config(seed=9, epochs=1), data_dir, tmp_path / "other")
    message = refusal(small_config(start=start_from(other, crc32=crc32)), data_dir)
    assert "does not hold what the run was begun from: start.crc32 is" in message
    assert str(crc32) in message and "Put that checkpoint back" in message


def test_a_run_goes_on_without_its_source(source: Any, data_dir: Path, tmp_path: Path):
    gone = train(small_config(epochs=1), data_dir, tmp_path / "gone")
    tuned = train(small_config(start=start_from(gone)), data_dir, tmp_path / "tuned")
    (tmp_path / "gone").rename(tmp_path / "elsewhere")
    resumed = train(read_config(tmp_path / "tuned"), data_dir, tmp_path / "tuned", resume=True)
    assert resumed.summary["test"] == tuned.summary["test"]


def members_of(run_dir: Path) -> None:
    config = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({"members": [config, config]}))


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "no folder": ({"run_dir": "/no/such/run"}, {}, "which holds no checkpoint: name the folder"),
    "no name": ({"run_dir": ""}, {}, "start.run_dir is ''"),
    "other widths": ({}, {"model": MLPConfig(widths=(9, 6))}, "layers[0].bias is float32[8] there"),
    "other depth": (
        {},
        {"model": MLPConfig(widths=(8,))},
        "layers[2].bias is float32[3] there and",
    ),
    "unknown leaf": (
        {"leaves": ("layers[7]",)},
        {},
        "start.leaves layers[7]: the model has no such",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_before_a_folder_is_made(
    case: str, source: Any, data_dir: Path, tmp_path: Path
):
    fields, others, message = REFUSED[case]
    start = RunStart.model_validate({"run_dir": str(source.run_dir)} | fields)
    with pytest.raises(ConfigError) as caught:
        train(small_config(start=start, **others), data_dir, tmp_path / "new")
    assert message in str(caught.value)
    assert not (tmp_path / "new").exists()


def test_members_of_a_program_are_no_source(source: Any, data_dir: Path, tmp_path: Path):
    copied = train(small_config(epochs=1), data_dir, tmp_path / "members")
    members_of(copied.run_dir)
    assert "holds members of one program" in refusal(
        small_config(start=start_from(copied)), data_dir
    )


def test_members_start_from_the_run_as_single_runs_do(source: Any, data_dir: Path):
    configs = [small_config(seed=seed, start=start_from(source)) for seed in (1, 2)]
    laws.members_are_their_single_runs(configs, data_dir)


def test_a_mask_is_kept_through_training(data_dir: Path):
    config = small_config(start=kinds.Masked(kept=0.5))
    run = Experiment.of(config, small_execution(data_dir))
    before = initial_state(run).model
    after = train_through(run)[0].model
    for old, new in zip(before.layers, after.layers, strict=True):
        assert 0 < (np.asarray(old.weight) == 0).mean() < 1
        np.testing.assert_array_equal(np.asarray(old.weight) == 0, np.asarray(new.weight) == 0)
        assert not np.array_equal(old.weight, new.weight)
