"""Models with state: running statistics of the global batch, kept exactly, frozen in evaluation."""

from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from mlp_research.analysis.per_example import factored_norms, per_example_norms
from mlp_research.config import Config
from mlp_research.data.batches import Batch
from mlp_research.data.inputs import scaled
from mlp_research.errors import ConfigError
from mlp_research.models import (
    MLPConfig,
    Stateful,
    advanced,
    parameters_of,
    summary,
    whole,
)
from mlp_research.objectives import CrossEntropy
from mlp_research.programs.single import Experiment
from tests import laws
from tests.made import (
    arrays_of,
    assert_bitwise,
    initial_state,
    small_config,
    small_execution,
    train_through,
)
from tests.outside import lab

BATCH_NORM = MLPConfig(widths=(8, 6), normalisation="batch", dropout=0.3)


def run_of(data_dir: Path, **execution: Any) -> Experiment:
    return Experiment.of(small_config(model=BATCH_NORM), small_execution(data_dir, **execution))


def first_batch(run: Experiment) -> Batch:
    rows = run.plan.indices(0, 1)[0]
    return Batch(run.data.train.images[rows], run.data.train.labels[rows])


@pytest.mark.parametrize("devices", [1, 2, 8])
def test_running_statistics_are_those_of_the_global_batch(devices: int, data_dir: Path):
    run = run_of(data_dir, mesh_data=devices, steps_per_call=1)
    before = initial_state(run)
    batch, layer = first_batch(run), before.model.model.layers[0]
    weight, bias = (np.asarray(leaf, np.float64) for leaf in (layer.weight, layer.bias))
    hidden = np.asarray(scaled(batch.images), np.float64) @ weight.T + bias
    stepped: Any = run.train_steps(before, run.recipe, next(run.chunks(0)))
    state = stepped[0]
    mean, variance = state.model.state.get(state.model.model.norms[0].running)
    np.testing.assert_allclose(mean, 0.1 * hidden.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(variance, 0.9 + 0.1 * hidden.var(axis=0), rtol=1e-5, atol=1e-6)


def test_devices_change_only_rounding(data_dir: Path):
    losses = [train_through(run_of(data_dir, mesh_data=n))[1]["loss"] for n in (1, 8)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5, atol=0)


def test_a_member_is_the_single_run(data_dir: Path):
    configs = [small_config(seed=seed, model=BATCH_NORM) for seed in (1, 2)]
    laws.members_are_their_single_runs(configs, data_dir)


def test_evaluation_changes_no_statistic_and_needs_no_other_row(data_dir: Path):
    run = run_of(data_dir)
    state, _ = train_through(run)
    before = [array.copy() for array in arrays_of(state.model)]
    together = run.evaluate(run.evaluated(state), run.data.test)
    apart = [run.evaluate(run.evaluated(state), run.data.test.rows(n)).correct for n in (1, 2, 3)]
    assert all(np.array_equal(a, b) for a, b in zip(before, arrays_of(state.model), strict=True))
    assert together.total == 70 and sorted(apart) == apart
    alone = eqx.nn.inference_mode(state.model)(scaled(run.data.test.images[0]))
    assert np.isfinite(np.asarray(alone)).all()


def test_evaluation_normalises_by_the_running_statistics():
    model: Any = whole(
        MLPConfig(widths=(5,), normalisation="batch").build((2, 3), 3, key=jr.key(0))
    )
    images = jr.uniform(jr.key(1), (32, 6))
    for step in range(200):
        model = advanced(model, images, key=jr.key(step))
    hidden = np.asarray(jax.vmap(model.model.layers[0])(images), np.float64)
    normed = (hidden - hidden.mean(0)) / np.sqrt(hidden.var(0) + 1e-5)
    last = model.model.layers[1]
    wanted = np.maximum(normed, 0) @ np.asarray(last.weight, np.float64).T + np.asarray(last.bias)
    found = jax.vmap(eqx.nn.inference_mode(model))(images)
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4)


def test_the_state_is_neither_trained_nor_counted():
    plain, normed = (
        whole(MLPConfig(widths=(8, 6), normalisation=kind).build((4, 3), 3, key=jr.key(0)))
        for kind in ("none", "batch")
    )
    assert isinstance(normed, Stateful)
    assert summary.count(normed) == summary.count(plain) + 2 * (8 + 6)
    assert not jax.tree.leaves(parameters_of(normed).state)


PER_EXAMPLE = "one example alone, as for per-example gradients"


def test_per_example_gradients_are_refused_in_a_sentence(data_dir: Path):
    run = run_of(data_dir)
    model, batch = initial_state(run).model, first_batch(run)
    for norms in (per_example_norms, factored_norms):
        with pytest.raises(ConfigError, match="an example has no gradient of its own"):
            norms(model, batch)
    with pytest.raises(ConfigError, match=PER_EXAMPLE):
        Experiment.of(
            small_config(model=BATCH_NORM, objective=lab.DPSGD()), small_execution(data_dir)
        )


@pytest.mark.parametrize("objective", [lab.VAT(), lab.SAM(), lab.Mixup()])
def test_objectives_that_need_the_batch_train_with_batch_norm(objective: Any, data_dir: Path):
    config = small_config(epochs=1, model=BATCH_NORM, objective=objective)
    state, metrics = train_through(Experiment.of(config, small_execution(data_dir)))
    assert np.isfinite(metrics["loss"]).all()
    running = state.model.state.get(state.model.model.norms[0].running)
    assert not np.array_equal(running[0], np.zeros(8))


class Spectral(eqx.Module):
    """Softmax regression whose weight has the spectral norm 1 (Miyato et al. 2018)."""

    linear: Any

    def __init__(self, pixels: int, classes: int, *, key: Any):
        one, other = jr.split(key)
        self.linear = eqx.nn.SpectralNorm(
            eqx.nn.Linear(pixels, classes, key=one), "weight", key=other
        )

    def __call__(self, image: Any, state: eqx.nn.State, *, key: Any = None) -> Any:
        return self.linear(image, state)


def test_spectral_norm_advances_and_has_gradients_of_single_examples():
    model: Any = whole(eqx.nn.make_with_state(Spectral)(6, 3, key=jr.key(0)))
    images, labels = jr.uniform(jr.key(1), (8, 6)), jnp.arange(8) % 3
    (loss, _), gradient = CrossEntropy().traced().gradients(model, images, labels, key=jr.key(2))
    assert np.isfinite(loss) and not arrays_of(gradient.state)[0].any()
    after = advanced(model, images, key=jr.key(2))
    assert any(
        not np.array_equal(a, b)
        for a, b in zip(arrays_of(model.state), arrays_of(after.state), strict=True)
    )
    assert_bitwise(after.model, model.model)
    raw = np.random.default_rng(0).integers(0, 256, (8, 6)).astype(np.uint8)
    assert np.isfinite(per_example_norms(model, Batch(raw, np.asarray(labels, np.uint8)))).all()


def test_the_description_names_the_norms_and_counts_what_is_trained(data_dir: Path):
    rows = {row.path: (row.kind, row.output, row.parameters) for row in run_of(data_dir).layers()}
    assert rows["norms[0]"] == ("BatchNorm", "8", 16)
    assert Config(model=BATCH_NORM).model == BATCH_NORM
