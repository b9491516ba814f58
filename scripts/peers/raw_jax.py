"""Raw JAX and Optax: the program of lesson.py, over a given order of rows.

Notice: there is no object. The parameters are a dictionary, the optimizer's state a tuple, and
`step` takes both and returns both; whoever calls it must keep what it returns.
"""

import jax
import jax.numpy as jnp
import lesson
import numpy as np
import optax
from jax import Array
from peer import Code, Weights


def train_epoch(
    parameters: lesson.Parameters,
    state: optax.OptState,
    images: Array,
    labels: Array,
    order: np.ndarray,
) -> tuple[lesson.Parameters, optax.OptState, list[Array]]:
    losses = []
    for rows in jnp.asarray(order):
        parameters, state, value = lesson.step(parameters, state, images[rows], labels[rows])
        losses.append(value)
    return parameters, state, losses


def parameters_of(weights: Weights) -> lesson.Parameters:
    return {
        f"layer{index}": {"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)}
        for index, (weight, bias) in enumerate(weights)
    }


class RawJax:
    name = "raw JAX"
    state_lives = "with the caller: a dict and a tuple, in and out of each step"
    randomness = "a key as an argument, split by hand"
    code: Code = (
        (lesson.__file__, "Parameters", "optimizer", "forward", "loss", "step"),
        (__file__, "train_epoch"),
    )

    def __init__(self, weights: Weights):
        self.parameters = parameters_of(weights)
        self.state = lesson.optimizer.init(self.parameters)

    def place(self, images: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
        return lesson.on_device(images, labels)

    def step(self, images: Array, labels: Array) -> Array:
        self.parameters, self.state, value = lesson.step(
            self.parameters, self.state, images, labels
        )
        return value

    def train_epoch(self, images: Array, labels: Array, order: np.ndarray) -> np.ndarray:
        self.parameters, self.state, losses = train_epoch(
            self.parameters, self.state, images, labels, order
        )
        return np.array(jax.device_get(losses))
