"""From a seed to named streams: the only place where a seed becomes randomness.

A stream is derived from the seed by its name, so a new stream changes no other one. Both JAX's
threefry `fold_in` and numpy's `SeedSequence` are hashes: neighbouring seeds share nothing.
"""

import hashlib

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Integer

from mlp_research.shapes import HostOrDevice, RandomKey, RandomKeys

SEEDS = 2**32
"""Seeds are 0 to SEEDS - 1: what a JAX key holds without 64-bit mode."""


def stream_key(seed: int, name: str) -> RandomKey:
    """The key of the stream `name` ("init", "dropout", ...) of an experiment's seed."""
    return jr.fold_in(jr.key(seed), _number(name))


class StepKeys(eqx.Module):
    """One key for each stream of a step's chance: of a run, or of one of its steps."""

    dropout: RandomKey
    """For the objective: dropout masks, noise, and whatever else it draws."""
    augmentation: RandomKey

    def at(self, step: Integer[HostOrDevice, ""]) -> "StepKeys":
        """Return the keys of one step, from a run's. The length of a chunk does not enter."""
        return StepKeys(step_key(self.dropout, step), step_key(self.augmentation, step))


def step_key(key: RandomKey, step: Integer[HostOrDevice, ""]) -> RandomKey:
    """Return the key of one step, from the root of its stream."""
    return jr.fold_in(key, step)


def example_keys(key: RandomKey, examples: int) -> RandomKeys:
    """Return one key for each example of a step, by its index in the global batch.

    `key` is the step's. The number of devices does not enter.
    """
    return jax.vmap(jr.fold_in, in_axes=(None, 0))(key, jnp.arange(examples))


def order_generator(seed: int, epoch: int) -> np.random.Generator:
    """The generator of one epoch's data order, independent over (seed, epoch)."""
    sequence = np.random.SeedSequence([seed, _number("order"), epoch])
    return np.random.Generator(np.random.Philox(sequence))


def _number(name: str) -> int:
    """32 bits that name a stream; unlike `hash`, the same in every process."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big")
