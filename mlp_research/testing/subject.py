"""A model under test: what its promises look at, and the calls that they make.

A model with state is looked at after one pass over a batch, as its running statistics are then
those of real examples. One that mixes the examples of a batch cannot be called on one image in
training mode: it is given companions.
"""

import dataclasses
import functools
from collections.abc import Callable
from math import prod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, PyTree

from mlp_research.models import (
    BATCH,
    Stateful,
    advanced,
    mixes_examples,
    over_batch,
    whole,
    without_state,
)
from mlp_research.objectives import cross_entropy
from mlp_research.shapes import HostOrDevice
from mlp_research.testing.promises import Fault, compiled_quickly, named_arrays, not_finite

EXAMPLES = 32
COMPANIONS = 7
"""Images beside the one that a model is called on, where it mixes the examples of a batch."""
DRAWS = 8
"""Dropout keys that are tried on one image."""
MEAN = np.full(EXAMPLES, 1 / EXAMPLES, np.float32)
"""Weights of a batch's losses."""

Keys = Any
Examples = tuple[Array, Array, Keys]


@dataclasses.dataclass(frozen=True)
class ModelUnderTest:
    """A way to build a model, and what several promises look at."""

    build: Callable[..., Any]
    image_shape: tuple[int, int]
    classes: int

    def made(self, *, key: Any) -> Any:
        """Return a new model, with its state where it has one."""
        return whole(self.build(key=key))

    @functools.cached_property
    def built(self) -> Any:
        return self.made(key=jr.key(0))

    @functools.cached_property
    def model(self) -> Any:
        """The model as built, its state advanced where that can be."""
        return self.built if self.state_fault else self.after_a_batch(self.built, jr.key(4))

    @functools.cached_property
    def inference_model(self) -> Any:
        return eqx.nn.inference_mode(self.model)

    @property
    def pixels(self) -> int:
        return prod(self.image_shape)

    @functools.cached_property
    def images(self) -> Float[Array, "examples pixels"]:
        return jr.normal(jr.key(1), (EXAMPLES, self.pixels))

    @functools.cached_property
    def labels(self) -> Int32[Array, " examples"]:
        return jr.randint(jr.key(2), (EXAMPLES,), 0, self.classes)

    @functools.cached_property
    def keys(self) -> Keys:
        return jr.split(jr.key(3), EXAMPLES)

    @property
    def examples(self) -> Examples:
        return self.images, self.labels, self.keys

    @functools.cached_property
    def mixes(self) -> bool:
        """Whether the examples of a batch influence each other in training, as they then must."""
        is_stateful = isinstance(self.built, Stateful)
        return is_stateful and mixes_examples(self.built, self.images[0], self.keys[0])

    @functools.cached_property
    def companions(self) -> Array | None:
        return self.images[-COMPANIONS:] if self.mixes else None

    def call(self, model: Any, image: Array, key: Array | None = None) -> Array:
        """Return the logits of one image, in training mode if the model is."""
        return call(model, image, key, self.companions)

    @functools.cached_property
    def logits(self) -> np.ndarray:
        """One plain call in training mode."""
        return np.asarray(self.call(self.model, self.images[0], self.keys[0]))

    @functools.cached_property
    def draws(self) -> np.ndarray:
        """Plain calls in training mode on one image with several keys."""
        calls = [self.call(self.model, self.images[0], key) for key in self.keys[:DRAWS]]
        return np.stack([np.asarray(logits) for logits in calls])

    @property
    def is_random(self) -> bool:
        return bool(np.ptp(self.draws, axis=0).any())

    @functools.cached_property
    def inference_logits(self) -> np.ndarray:
        return np.asarray(batch_logits(self.inference_model, self.images, self.keys))

    @functools.cached_property
    def gradients(self) -> PyTree:
        """The gradient of the mean loss of a batch, as in training."""
        return batch_gradients(self.model, self.examples, MEAN)

    def after_a_batch(self, model: Any, key: Array) -> Any:
        """Return a model with its state after a pass over all images; without one, as it is."""
        return batch_advanced(model, self.images, key) if isinstance(model, Stateful) else model

    @functools.cached_property
    def state_fault(self) -> Fault:
        """What is wrong with the state after a batch; the other promises then leave it as built."""
        try:
            after = self.after_a_batch(self.built, jr.key(4))
        except Exception as error:
            if "out_axes" not in str(error):
                return f"{type(error).__name__}: {' '.join(str(error).split()):.300}"
            return (
                "each example of a batch gives another next state: take the mean of what is kept "
                "over the batch, by jax.lax.pmean(..., BATCH)"
            )
        if not isinstance(after, Stateful):
            return None
        came, wanted = _shapes(after.state), _shapes(self.built.state)
        if came != wanted:
            return f"after a batch its arrays are {came}, but were {wanted}"
        return not_finite("state after a batch", after.state)


def _shapes(state: PyTree) -> dict[str, str]:
    return {path: str(jax.typeof(leaf)) for path, leaf in named_arrays(state).items()}


def call(model: Any, image: Array, key: Array | None, companions: Array | None) -> Array:
    """Return the logits of one image, among its companions where there are any."""
    if companions is None:
        return model(image, key=key)
    images = jnp.concatenate([image[None], companions])
    return jax.vmap(lambda image: model(image, key=key), axis_name=BATCH)(images)[0]


@compiled_quickly
def batch_logits(model: Any, images: Array, keys: Keys) -> Array:
    return over_batch(model, images, keys)


@compiled_quickly
def batch_gradients(
    model: Any, examples: Examples, weights: Float32[HostOrDevice, " examples"]
) -> PyTree:
    """The gradient of a weighted sum of losses."""
    images, labels, keys = examples

    @eqx.filter_grad
    def gradients(model: Any) -> Array:
        logits = over_batch(model, images, keys)
        losses = jax.vmap(cross_entropy, in_axes=(0, 0, None))(logits, labels, jnp.float32(0))
        return jnp.asarray(weights) @ losses

    return without_state(gradients(model))


@compiled_quickly
def batch_advanced(model: Any, images: Array, key: Array) -> Any:
    return advanced(model, images, key=key)
