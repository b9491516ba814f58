"""Flax nnx: the module holds its arrays, and a step changes it in place.

Notice: `step` returns the loss alone. `nnx.jit` reads model and optimizer into a pytree, runs the
pure function, and writes the results back into the same objects; `nnx.cached_partial` reads them
once an epoch in place of once a step. Chance is an `nnx.Rngs` object given to constructors: it
counts its calls, so that it, too, is state.
"""

from collections.abc import Sequence
from itertools import pairwise

import jax
import jax.numpy as jnp
import lesson
import numpy as np
import optax
from flax import nnx
from jax import Array
from peer import Code, Weights, sizes_of


class MLP(nnx.Module):
    def __init__(self, sizes: Sequence[int], *, rngs: nnx.Rngs):
        self.layers = nnx.List(
            [nnx.Linear(inputs, outputs, rngs=rngs) for inputs, outputs in pairwise(sizes)]
        )

    def __call__(self, images: Array) -> Array:
        *hidden_layers, last = self.layers
        hidden = images
        for layer in hidden_layers:
            hidden = nnx.relu(layer(hidden))
        return last(hidden)


optimizer = optax.adam(1e-3)


@nnx.jit
def step(model: MLP, optimizer: nnx.Optimizer, images: Array, labels: Array) -> Array:
    def loss(model: MLP) -> Array:
        logits = model(images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def train_epoch(
    model: MLP, optimizer: nnx.Optimizer, images: Array, labels: Array, order: np.ndarray
) -> list[Array]:
    cached_step = nnx.cached_partial(step, model, optimizer)
    return [cached_step(images[rows], labels[rows]) for rows in jnp.asarray(order)]


class FlaxNNX:
    name = "Flax nnx"
    state_lives = "in the module and the `nnx.Optimizer`, changed in place"
    randomness = "an `nnx.Rngs` given to constructors; it counts its calls"
    code: Code = ((__file__, "MLP", "optimizer", "step", "train_epoch"),)

    def __init__(self, weights: Weights):
        self.model = MLP(sizes_of(weights), rngs=nnx.Rngs(0))
        for layer, (weight, bias) in zip(self.model.layers, weights, strict=True):
            layer.kernel = nnx.Param(jnp.asarray(weight))
            layer.bias = nnx.Param(jnp.asarray(bias))
        self.optimizer = nnx.Optimizer(self.model, optimizer, wrt=nnx.Param)

    def place(self, images: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
        return lesson.on_device(images, labels)

    def step(self, images: Array, labels: Array) -> Array:
        return step(self.model, self.optimizer, images, labels)

    def train_epoch(self, images: Array, labels: Array, order: np.ndarray) -> np.ndarray:
        losses = train_epoch(self.model, self.optimizer, images, labels, order)
        return np.array(jax.device_get(losses))
