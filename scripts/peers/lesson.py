"""The lesson's own program: an MLP in plain JAX and Optax, one jitted step a call.

A dictionary of parameters, He initialisation by hand, the loss from log-softmax and one-hot labels,
a Python loop over shuffled arrays that lie on the device. It is the first peer to measure against.

    python scripts/peers/lesson.py [--epochs 10] [--seed 0]
"""

import argparse
import time
from collections.abc import Iterator
from itertools import pairwise

import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from jax import Array

from mlp_research.data import IdxConfig
from mlp_research.data.datasets import DEFAULT_DIRECTORY, load

Parameters = dict[str, dict[str, Array]]

CLASSES = 10
BATCH_SIZE = 128
optimizer = optax.adam(1e-3)


def init(key: Array, sizes: tuple[int, ...] = (784, 256, 128, CLASSES)) -> Parameters:
    parameters = {}
    keys = jr.split(key, len(sizes) - 1)
    for layer, (inputs, outputs) in enumerate(pairwise(sizes)):
        weight = jnp.sqrt(2 / inputs) * jr.normal(keys[layer], (inputs, outputs))
        parameters[f"layer{layer}"] = {"weight": weight, "bias": jnp.zeros(outputs)}
    return parameters


def forward(parameters: Parameters, images: Array) -> Array:
    """Logits of a batch; the depth is that of the pytree."""
    last = len(parameters) - 1
    hidden = images
    for layer in range(last + 1):
        dense = parameters[f"layer{layer}"]
        hidden = hidden @ dense["weight"] + dense["bias"]
        if layer < last:
            hidden = jax.nn.relu(hidden)
    return hidden


def loss(parameters: Parameters, images: Array, labels: Array) -> Array:
    log_probabilities = jax.nn.log_softmax(forward(parameters, images))
    return -(jax.nn.one_hot(labels, CLASSES) * log_probabilities).sum(axis=-1).mean()


@jax.jit
def step(parameters: Parameters, state: optax.OptState, images: Array, labels: Array):
    value, gradients = jax.value_and_grad(loss)(parameters, images, labels)
    updates, state = optimizer.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state, value


@jax.jit
def accuracy(parameters: Parameters, images: Array, labels: Array) -> Array:
    return (forward(parameters, images).argmax(axis=-1) == labels).mean()


def batches(key: Array, images: Array, labels: Array) -> Iterator[tuple[Array, Array]]:
    order = jr.permutation(key, len(labels))
    for start in range(0, len(labels) - BATCH_SIZE + 1, BATCH_SIZE):
        rows = order[start : start + BATCH_SIZE]
        yield images[rows], labels[rows]


def train_epoch(
    parameters: Parameters, state: optax.OptState, key: Array, images: Array, labels: Array
):
    for batch_images, batch_labels in batches(key, images, labels):
        parameters, state, _ = step(parameters, state, batch_images, batch_labels)
    return jax.block_until_ready((parameters, state))


def on_device(images, labels) -> tuple[Array, Array]:
    return jnp.asarray(images, jnp.float32) / 255, jnp.asarray(labels, jnp.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    flags = parser.parse_args()
    data = load(DEFAULT_DIRECTORY, IdxConfig(validation=0))
    train = on_device(data.train.images, data.train.labels)
    test = on_device(data.test.images, data.test.labels)
    init_key, order_key = jr.split(jr.key(flags.seed))
    parameters = init(init_key)
    state = optimizer.init(parameters)
    for epoch in range(flags.epochs):
        started = time.perf_counter()
        key = jr.fold_in(order_key, epoch)
        parameters, state = train_epoch(parameters, state, key, *train)
        seconds = time.perf_counter() - started
        seen = accuracy(parameters, train[0][:5000], train[1][:5000])
        print(
            f"epoch {epoch + 1:2}  train {100 * seen:.2f} %  "
            f"test {100 * accuracy(parameters, *test):.2f} %  {seconds:.2f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
