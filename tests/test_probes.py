"""Probes measure what they say, change nothing, and stand in every record of a run."""

# pyright: reportIncompatibleVariableOverride=false

import json
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
import pytest

from mlp_research.errors import ConfigError
from mlp_research.fit import fit, fit_program
from mlp_research.optimizers import SGDConfig
from mlp_research.probes import NoProbe, Probe, UpdateRatio, WeightNorms
from mlp_research.programs.members import Members
from mlp_research.programs.single import Experiment
from mlp_research.terminal.report import Report
from tests.made import (
    assert_bitwise,
    initial_state,
    small_config,
    small_execution,
    train_through,
)
from tests.test_tensorboard import points


class Odd(Probe, frozen=True):
    """Numbers that are not finite now and then."""

    kind: Literal["odd"] = "odd"

    def measure(self, model: Any, data: Any) -> Any:
        return {"odd.never": jnp.float32(jnp.nan), "odd.rows": jnp.float32(len(data.images))}

    def measure_step(self, before: Any, after: Any) -> Any:
        return {
            "odd.step": jnp.where(after.layers[0].bias[0] > before.layers[0].bias[0], 1.0, jnp.nan)
        }


class Reserved(Odd, frozen=True):
    kind: Literal["reserved"] = "reserved"

    def measure(self, model: Any, data: Any) -> Any:
        return {"loss": jnp.float32(0)}


class Wide(Odd, frozen=True):
    kind: Literal["wide"] = "wide"

    def measure(self, model: Any, data: Any) -> Any:
        return {"wide": jnp.zeros(3)}


def lines_of(run_dir: Path, split: str) -> list[dict[str, Any]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [line for line in lines if line["split"] == split]


def run_with(probe: Probe, data_dir: Path, run_dir: Path, **fields: Any) -> Any:
    return fit(
        small_config(probes=probe, **fields),
        small_execution(data_dir),
        run_dir=run_dir,
        report=Report(quiet=True),
    )


def test_weight_norms_are_the_norms_after_each_epoch(data_dir: Path, tmp_path: Path):
    result = run_with(WeightNorms(), data_dir, tmp_path / "run")
    lines = lines_of(tmp_path / "run", "probes")
    assert [line["epoch"] for line in lines] == [1, 2]
    for index, layer in enumerate(result.model.layers):
        for name in ("weight", "bias"):
            norm = np.linalg.norm(np.asarray(getattr(layer, name), np.float64))
            assert lines[-1][f"weight_norm.layers[{index}].{name}"] == pytest.approx(norm, rel=1e-5)


def test_the_update_ratio_is_that_of_each_step(data_dir: Path):
    config = small_config(probes=UpdateRatio(), optimizer=SGDConfig(learning_rate=0.1))
    run = Experiment.of(config, small_execution(data_dir, steps_per_call=1))
    before = initial_state(run)
    weights = [np.asarray(layer.weight, np.float64) for layer in before.model.layers]
    stepped: Any = run.train_steps(before, run.recipe, next(run.chunks(0)))
    after, metrics = stepped
    for index, (old, layer) in enumerate(zip(weights, after.model.layers, strict=True)):
        change = np.asarray(layer.weight, np.float64) - old
        wanted = np.linalg.norm(change) / np.linalg.norm(old)
        found = metrics.probed[f"update_ratio.layers[{index}].weight"][0]
        assert found == pytest.approx(wanted, rel=1e-4)


@pytest.mark.parametrize("probe", [WeightNorms(), UpdateRatio()])
def test_a_probe_changes_no_bit_of_the_training(probe: Probe, data_dir: Path):
    ends = [
        train_through(Experiment.of(small_config(probes=each), small_execution(data_dir)))
        for each in (NoProbe(), probe)
    ]
    assert_bitwise(ends[0][0], ends[1][0])
    for name, values in ends[0][1].items():
        assert np.array_equal(values, ends[1][1][name])


def test_epoch_means_stand_in_the_log_in_tensorboard_and_in_a_picture(
    data_dir: Path, tmp_path: Path
):
    run_with(UpdateRatio(), data_dir, tmp_path / "run")
    name = "update_ratio.layers[0].weight"
    probed = [line[name] for line in lines_of(tmp_path / "run", "probes")]
    steps = [line[name] for line in lines_of(tmp_path / "run", "train")]
    assert len(steps) == 24
    assert probed == pytest.approx([np.mean(steps[:12]), np.mean(steps[12:])], rel=1e-6)
    shown = points(tmp_path / "run", "update_ratio.layers_0_.weight")  # the name that it allows
    assert shown == pytest.approx({1: probed[0], 2: probed[1]}, rel=1e-6)
    assert (tmp_path / "run" / "probes.png").stat().st_size > 5000


def test_each_member_has_its_own(data_dir: Path, tmp_path: Path):
    configs = [small_config(seed=seed, probes=WeightNorms()) for seed in (1, 2)]
    program = Members.of(configs, small_execution(data_dir), "map")
    fit_program(program, tmp_path / "members", False, Report(quiet=True))
    many = lines_of(tmp_path / "members", "probes")
    for member, seed in enumerate((1, 2)):
        run_with(WeightNorms(), data_dir, tmp_path / f"{seed}", seed=seed)
        own = [
            {k: v for k, v in line.items() if k != "member"}
            for line in many
            if line["member"] == member
        ]
        assert own == lines_of(tmp_path / f"{seed}", "probes")


def test_numbers_that_are_not_finite_are_null_and_stop_nothing(data_dir: Path, tmp_path: Path):
    run_with(Odd(rows=7), data_dir, tmp_path / "run")
    lines = lines_of(tmp_path / "run", "probes")
    assert [line["odd.never"] for line in lines] == [None, None]
    assert [line["odd.rows"] for line in lines] == [7, 7]
    steps = [line["odd.step"] for line in lines_of(tmp_path / "run", "train")]
    assert set(steps) <= {1.0, None} and lines[0]["odd.step"] in (1.0, None)


@pytest.mark.parametrize(
    ("probe", "message"),
    [
        (Reserved(), "the measurement loss has the name of another number"),
        (Wide(), "the measurement wide is float32[3], wanted one number"),
    ],
)
def test_what_no_line_can_hold_is_refused_before_a_run(
    probe: Probe, message: str, data_dir: Path, tmp_path: Path
):
    with pytest.raises(ConfigError) as caught:
        run_with(probe, data_dir, tmp_path / "run")
    assert message in str(caught.value) and not (tmp_path / "run").exists()
