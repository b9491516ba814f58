"""Flax linen: the module describes, the variables lie outside it.

Notice: `MLP` holds no array. `apply` is given the parameters at each call, and a `TrainState`
carries them with the optimizer's state; `apply_gradients` returns a new one. The layers are named
by the order in which `__call__` makes them: Dense_0, Dense_1, ... Chance, where a module needs
some, comes as a key by name: `apply(variables, images, rngs={"dropout": key})`.
"""

from collections.abc import Sequence

import flax.linen as nn
import jax
import jax.numpy as jnp
import lesson
import numpy as np
import optax
from flax.training.train_state import TrainState
from jax import Array
from peer import Code, Weights, sizes_of


class MLP(nn.Module):
    widths: Sequence[int]

    @nn.compact
    def __call__(self, images: Array) -> Array:
        *hidden_widths, classes = self.widths
        hidden = images
        for width in hidden_widths:
            hidden = nn.relu(nn.Dense(width)(hidden))
        return nn.Dense(classes)(hidden)


optimizer = optax.adam(1e-3)


@jax.jit
def step(state: TrainState, images: Array, labels: Array) -> tuple[TrainState, Array]:
    def loss(parameters: dict) -> Array:
        logits = state.apply_fn({"params": parameters}, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def train_epoch(
    state: TrainState, images: Array, labels: Array, order: np.ndarray
) -> tuple[TrainState, list[Array]]:
    losses = []
    for rows in jnp.asarray(order):
        state, value = step(state, images[rows], labels[rows])
        losses.append(value)
    return state, losses


class FlaxLinen:
    name = "Flax linen"
    state_lives = "in a `TrainState` outside the module, in and out of each step"
    randomness = "keys by name: `rngs={'dropout': key}` at each call"
    code: Code = ((__file__, "MLP", "optimizer", "step", "train_epoch"),)

    def __init__(self, weights: Weights):
        parameters = {
            f"Dense_{index}": {"kernel": jnp.asarray(weight), "bias": jnp.asarray(bias)}
            for index, (weight, bias) in enumerate(weights)
        }
        model = MLP(tuple(sizes_of(weights)[1:]))
        self.state = TrainState.create(apply_fn=model.apply, params=parameters, tx=optimizer)

    def place(self, images: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
        return lesson.on_device(images, labels)

    def step(self, images: Array, labels: Array) -> Array:
        self.state, value = step(self.state, images, labels)
        return value

    def train_epoch(self, images: Array, labels: Array, order: np.ndarray) -> np.ndarray:
        self.state, losses = train_epoch(self.state, images, labels, order)
        return np.array(jax.device_get(losses))
