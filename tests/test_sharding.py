"""Meshes: where arrays lie changes no number but in rounding."""

import functools
import shutil
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

from mlp_research.errors import ConfigError
from mlp_research.fit import Result, fit
from mlp_research.models import MixerConfig, MLPConfig, ModelConfig, ResidualConfig
from mlp_research.objectives import Evaluation
from mlp_research.programs.single import Experiment
from mlp_research.shapes import is_shape
from mlp_research.step import TrainState
from mlp_research.system import sharding
from mlp_research.terminal.report import Report
from tests.made import initial_state, small_config, small_execution, train_through

MODELS: dict[str, ModelConfig] = {
    "mlp": MLPConfig(widths=(8, 8), dropout=0.3),
    "residual": ResidualConfig(width=8),
    "mixer": MixerConfig(patch_size=1, width=8, token_width=8, channel_width=8),
}
Shape = tuple[int, int]


def on_mesh(data_dir: Path, model: ModelConfig, shape: Shape) -> Experiment:
    execution = small_execution(data_dir, mesh_data=shape[0], mesh_model=shape[1])
    return Experiment.of(small_config(model=model), execution)


@functools.cache
def trained(
    data_dir: Path, name: str, shape: Shape
) -> tuple[TrainState, dict[str, np.ndarray], Evaluation]:
    """Final state, metrics and test evaluation of a whole run."""
    run = on_mesh(data_dir, MODELS[name], shape)
    state, metrics = train_through(run)
    return state, metrics, run.evaluate(state.model, run.data.test)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp", (4, 2)),
        ("mlp", (2, 4)),
        pytest.param("mixer", (2, 4), marks=pytest.mark.long),
        pytest.param("mixer", (4, 2), marks=pytest.mark.long),
        pytest.param("residual", (2, 4), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_mesh_of_batches_and_layers_changes_only_rounding(
    name: str, shape: Shape, data_dir: Path
):
    _, one, alone = trained(data_dir, name, (1, 1))
    _, many, spread = trained(data_dir, name, shape)
    assert np.allclose(many["loss"], one["loss"], rtol=1e-5, atol=0)
    assert (spread.correct, spread.total) == (alone.correct, alone.total)


def test_dense_layers_are_spread_by_outputs_and_inputs_in_turn(data_dir: Path):
    model: Any = initial_state(on_mesh(data_dir, MLPConfig(widths=(8, 8, 8, 8)), (2, 4))).model
    on_device = [
        (layer.weight.addressable_shards[0].data.shape, layer.bias.addressable_shards[0].data.shape)
        for layer in model.layers
    ]
    by_outputs, by_inputs, whole = ((2, 8), (2,)), ((8, 2), (8,)), ((3, 8), (3,))
    assert on_device == [((2, 12), (2,)), by_inputs, by_outputs, by_inputs, whole]


def test_the_branches_of_a_mixer_take_turns_each_for_itself(data_dir: Path):
    model: Any = initial_state(on_mesh(data_dir, MODELS["mixer"], (1, 2))).model
    block = model.blocks[0]
    for branch in (block.mix_tokens, block.mix_channels):
        assert branch.inner.weight.sharding.spec == jax.P("model")
        assert branch.outer.weight.sharding.spec == jax.P(None, "model")


@pytest.mark.parametrize("name", ["mlp", pytest.param("mixer", marks=pytest.mark.long)])
def test_moments_lie_like_their_parameters_after_a_run(name: str, data_dir: Path):
    state, _, _ = trained(data_dir, name, (2, 4))
    parameters = jax.tree.leaves(eqx.filter(state.model, eqx.is_inexact_array))
    moments = [leaf for leaf in jax.tree.leaves(state.optimizer_state) if leaf.ndim]
    assert len(moments) == 2 * len(parameters)
    for moment, parameter in zip(moments, 2 * parameters, strict=True):
        assert moment.sharding.is_equivalent_to(parameter.sharding, parameter.ndim)
    assert any(not leaf.sharding.is_fully_replicated for leaf in parameters)


def test_a_layer_that_does_not_divide_is_whole_and_named(data_dir: Path):
    run = on_mesh(data_dir, MODELS["mlp"], (1, 4))
    assert sharding.undivided(run.mesh, run.template().model) == ["layers[2] (8 -> 3)"]
    assert run.facts(0)["spread"].endswith("but whole on each: layers[2] (8 -> 3)")
    assert "spread" not in on_mesh(data_dir, MODELS["mlp"], (4, 1)).facts(0)


def test_after_a_whole_layer_the_turn_is_by_outputs_again():
    mesh = sharding.device_mesh(1, 4)
    layers = [eqx.nn.Linear(*size, key=jax.random.key(0)) for size in ((8, 8), (6, 8), (4, 8))]
    placed: Any = sharding.layouts(mesh, layers)
    specs = [layer.weight.spec for layer in placed]
    assert specs == [jax.P("model"), jax.P(), jax.P("model")]


@pytest.fixture(scope="module")
def whole(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A whole run on eight devices, batches over four and layers over two."""
    return fitted(data_dir, tmp_path_factory.mktemp("whole") / "run", (4, 2))


@pytest.mark.parametrize(
    "resumed", [(1, 1), pytest.param((2, 1), marks=pytest.mark.long), (2, 4)], ids=str
)
def test_a_run_saved_on_one_mesh_goes_on_on_another(
    resumed: Shape, whole: Result, data_dir: Path, tmp_path: Path
):
    folder = Path(shutil.copytree(whole.run_dir, tmp_path / "run"))
    shutil.rmtree(folder / "checkpoints" / "24")
    (folder / "result.json").unlink()
    result = fitted(data_dir, folder, resumed, resume=True)
    assert result.summary["test"]["correct"] == whole.summary["test"]["correct"]
    assert np.isclose(result.summary["test"]["loss"], whole.summary["test"]["loss"], rtol=1e-5)


def test_a_run_of_one_device_goes_on_on_eight(data_dir: Path, tmp_path: Path):
    whole = fitted(data_dir, tmp_path / "run", (1, 1))
    shutil.rmtree(whole.run_dir / "checkpoints" / "24")
    result = fitted(data_dir, whole.run_dir, (8, 1), resume=True)
    assert result.summary["test"]["correct"] == whole.summary["test"]["correct"]
    assert np.isclose(result.summary["test"]["loss"], whole.summary["test"]["loss"], rtol=1e-5)


def fitted(data_dir: Path, run_dir: Path, shape: Shape, *, resume: bool = False) -> Result:
    execution = small_execution(data_dir, mesh_data=shape[0], mesh_model=shape[1])
    config = small_config(model=MODELS["mlp"])
    return fit(config, execution, run_dir=run_dir, resume=resume, report=Report(quiet=True))


def test_more_devices_than_there_are_are_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"mesh\.data 3 x mesh\.model 4 needs 12 devices.* 8: "):
        sharding.device_mesh(3, 4)
    assert dict(sharding.device_mesh(None, 4).shape) == {"data": 2, "model": 4}


def test_one_device_is_a_mesh_of_one(data_dir: Path):
    """Every array is whole, whatever the axes are called."""
    run = on_mesh(data_dir, MODELS["mlp"], (1, 1))
    for leaf in jax.tree.leaves(run.template()):
        if is_shape(leaf):
            assert leaf.sharding is not None and leaf.sharding.is_fully_replicated
