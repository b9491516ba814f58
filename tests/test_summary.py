"""What a run says of its model and its cost is true."""

from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest

from mlp_research.models import MLPConfig, ModelConfig, summary
from mlp_research.models.base import Dense
from mlp_research.programs.single import Experiment
from tests.made import initial_state, own_kinds, small_config, small_execution

KINDS = own_kinds(ModelConfig)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_count_every_parameter_once(kind: str):
    model = KINDS[kind]().build((28, 28), 10, key=jr.key(0))
    leaves = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))
    rows = summary.layers(model, 784, jr.key(1))
    assert sum(row.parameters for row in rows) == sum(leaf.size for leaf in leaves)
    assert rows[-1].output == "10"


def test_layers_name_the_shapes_they_return():
    model = MLPConfig(widths=(8, 6), dropout=0.5).build((4, 3), 3, key=jr.key(0))
    rows = summary.layers(model, 12, jr.key(1))
    assert [(row.path, row.output, row.parameters) for row in rows] == [
        ("layers[0]", "8", 104),
        ("layers[1]", "6", 54),
        ("layers[2]", "3", 21),
    ]


class Bare(eqx.Module):
    """A model that holds its weights itself."""

    weight: jax.Array

    def __call__(self, image: jax.Array, /, *, key: jax.Array | None = None) -> jax.Array:
        return self.weight @ image


def test_weights_that_are_in_no_layer_are_counted_as_the_models_own():
    (row,) = summary.layers(Bare(jnp.ones((3, 12))), 12, jr.key(0))
    assert (row.path, row.kind, row.output, row.parameters) == ("", "Bare", "3", 36)


class Twice(eqx.Module):
    """A model that calls one layer twice."""

    layer: eqx.nn.Linear

    def __call__(self, image: jax.Array, /, *, key: jax.Array | None = None) -> jax.Array:
        return self.layer(self.layer(image))


def test_a_layer_that_is_called_twice_shows_its_output_once():
    (row,) = summary.layers(Twice(eqx.nn.Linear(12, 12, key=jr.key(0))), 12, jr.key(0))
    assert (row.path, row.output, row.parameters) == ("layer", "12", 156)


def test_looking_at_a_model_leaves_it_as_it_was():
    model = MLPConfig(widths=(8,)).build((4, 3), 3, key=jr.key(0))
    before = jax.tree.structure(model)
    summary.layers(model, 12, jr.key(1))
    assert jax.tree.structure(model) == before
    assert type(model.layers[0]) is Dense


def test_the_operations_of_a_step_are_those_of_its_matrix_products(data_dir: Path):
    """6 x batch x weights, less the first layer's gradient of its input, plus elementwise work."""
    config = small_config(model=MLPConfig(widths=(64, 32)))
    run = Experiment.of(config, small_execution(data_dir))
    weights = [12 * 64, 64 * 32, 32 * 3]
    products = 2 * 16 * (3 * sum(weights) - weights[0])
    counted = summary.operations(run.step_program())
    assert products < counted < 2 * products


def test_a_shape_costs_what_its_array_costs(data_dir: Path):
    run = Experiment.of(small_config(), small_execution(data_dir))
    assert summary.count(run.template().model) == summary.count(initial_state(run).model)
