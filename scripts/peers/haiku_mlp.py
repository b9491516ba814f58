"""Haiku: modules are made inside a function, and `hk.transform` makes that function pure.

Notice: `hk.nets.MLP` is made anew at each trace and owns nothing. `transform` turns the function
into a pair: `init(key, ...)` returns the parameters as a dictionary by the module's path
("mlp/~/linear_0"), and `apply(parameters, ...)` computes with them. Chance is a key given to both,
from which `hk.next_rng_key()` draws inside; this network needs none, so
`hk.without_apply_rng` leaves it out. Haiku is in maintenance: its authors name Flax for new work.
"""

import functools
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import lesson
import numpy as np
import optax
from jax import Array
from peer import Code, Weights, sizes_of


class TrainingState(NamedTuple):
    parameters: hk.Params
    optimizer_state: optax.OptState


@hk.without_apply_rng
@hk.transform
def network(images: Array, widths: tuple[int, ...]) -> Array:
    return hk.nets.MLP(widths)(images)


optimizer = optax.adam(1e-3)


def loss(parameters: hk.Params, images: Array, labels: Array, widths: tuple[int, ...]) -> Array:
    logits = network.apply(parameters, images, widths)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


@functools.partial(jax.jit, static_argnames="widths")
def step(
    state: TrainingState, images: Array, labels: Array, widths: tuple[int, ...]
) -> tuple[TrainingState, Array]:
    value, gradients = jax.value_and_grad(loss)(state.parameters, images, labels, widths)
    updates, optimizer_state = optimizer.update(gradients, state.optimizer_state)
    parameters: Any = optax.apply_updates(state.parameters, updates)
    return TrainingState(parameters, optimizer_state), value


def train_epoch(
    state: TrainingState, images: Array, labels: Array, order: np.ndarray, widths: tuple[int, ...]
) -> tuple[TrainingState, list[Array]]:
    losses = []
    for rows in jnp.asarray(order):
        state, value = step(state, images[rows], labels[rows], widths)
        losses.append(value)
    return state, losses


class HaikuMLP:
    name = "Haiku"
    state_lives = "with the caller: a dict by module path, in and out of each step"
    randomness = "a key to `init` and `apply`; `hk.next_rng_key()` inside"
    code: Code = (
        (__file__, "TrainingState", "network", "optimizer", "loss", "step", "train_epoch"),
    )

    def __init__(self, weights: Weights):
        parameters = {
            f"mlp/~/linear_{index}": {"w": jnp.asarray(weight), "b": jnp.asarray(bias)}
            for index, (weight, bias) in enumerate(weights)
        }
        self.state = TrainingState(parameters, optimizer.init(parameters))
        self.widths = tuple(sizes_of(weights)[1:])

    def place(self, images: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
        return lesson.on_device(images, labels)

    def step(self, images: Array, labels: Array) -> Array:
        self.state, value = step(self.state, images, labels, self.widths)
        return value

    def train_epoch(self, images: Array, labels: Array, order: np.ndarray) -> np.ndarray:
        self.state, losses = train_epoch(self.state, images, labels, order, self.widths)
        return np.array(jax.device_get(losses))
