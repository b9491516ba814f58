"""This package: an Equinox model and the pure `train_step` that every run here is made of.

Notice: the model is itself the pytree of its arrays, so a `TrainState` (model, optimizer state,
step, key) goes into a step and a new one comes out. One step is called by itself; an epoch is one
call, a scan over the rows of each step, with the bytes on the device and the state donated. Chance
is one seed: named streams, folded with the step and the example (mlp_research/prng.py).
"""

import inspect

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax import Array
from peer import Code, Weights, sizes_of

from mlp_research import step as steps
from mlp_research.config import Config
from mlp_research.data import inputs as inputs_file
from mlp_research.data.batches import Batch, RowChunk
from mlp_research.data.inputs import Inputs
from mlp_research.models import MLP, MLPConfig
from mlp_research.models import mlp as mlp_file
from mlp_research.objectives import CrossEntropy
from mlp_research.objectives import base as objective_file
from mlp_research.prng import StepKeys
from mlp_research.programs.base import recipe_of
from mlp_research.system import sharding

one_step = eqx.filter_jit(steps.train_step)


def model_of(weights: Weights) -> MLP:
    """The model with these weights; Equinox keeps a weight as [outputs, inputs]."""
    inputs, *widths, classes = sizes_of(weights)
    model = MLPConfig(widths=tuple(widths)).build((1, inputs), classes, key=jr.key(0))
    return eqx.tree_at(
        lambda model: [leaf for layer in model.layers for leaf in (layer.weight, layer.bias)],
        model,
        [jnp.asarray(leaf) for weight, bias in weights for leaf in (weight.T, bias)],
    )


class EquinoxMLP:
    name = "this package"
    state_lives = "in a `TrainState`, model included, in and out of each step"
    randomness = "one seed, named streams, a key per step and example"
    code: Code = (
        (mlp_file.__file__, "MLP"),
        (objective_file.__file__, "Objective"),
        (inspect.getfile(CrossEntropy), "CrossEntropy", "cross_entropy"),
        (inputs_file.__file__, "scaled", "Inputs"),
        (steps.__file__, "Recipe", "TrainState", "init_state", "train_step"),
        (steps.__file__, "train_steps", "compile_train_steps"),
    )

    def __init__(self, weights: Weights):
        mesh = sharding.device_mesh(1)
        self.recipe = recipe_of(Config(), total_steps=1, inputs=Inputs())
        state = steps.init_state(
            model_of(weights), self.recipe, keys=StepKeys(jr.key(0), jr.key(0))
        )
        self.state = sharding.place(state, sharding.replicated(mesh))
        self.train_steps = steps.compile_train_steps(mesh)

    def place(self, images: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
        """The bytes themselves: the compiled step scales them."""
        return jnp.asarray(images), jnp.asarray(labels)

    def step(self, images: Array, labels: Array) -> Array:
        self.state, metrics = one_step(self.state, self.recipe, Batch(images, labels))
        return jnp.asarray(metrics.loss)

    def train_epoch(self, images: Array, labels: Array, order: np.ndarray) -> np.ndarray:
        """One call. It is compiled for one shape of `order`: another is refused."""
        chunk = RowChunk(Batch(images, labels), jnp.asarray(order), jnp.int32(len(order)))
        self.state, metrics = self.train_steps(self.state, self.recipe, chunk)
        return np.asarray(metrics.loss)
