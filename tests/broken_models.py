"""Models that each break a promise on purpose, and the table of what breaks with it.

All are small perceptrons for 4 x 4 images and three classes, called as any model is.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.custom_batching import custom_vmap

from mlp_research.models import BATCH

IMAGE_SHAPE, PIXELS, CLASSES, WIDTH = (4, 4), 16, 3, 32
random = np.random.default_rng(0)


class Sound(eqx.Module):
    """Keeps every promise; the others are made of it."""

    hidden: eqx.nn.Linear
    head: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self, *, key: Any):
        hidden_key, head_key = jr.split(key)
        self.hidden = eqx.nn.Linear(PIXELS, WIDTH, key=hidden_key)
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=head_key)
        self.dropout = eqx.nn.Dropout(0.2)

    def __call__(self, image: Any, *, key: Any = None) -> Any:
        return self.head(self.dropout(jax.nn.relu(self.hidden(image)), key=key))


class Wrapped(eqx.Module):
    """A sound model with something wrong around it."""

    sound: Sound

    def __init__(self, *, key: Any):
        self.sound = Sound(key=key)


def edited(where: Callable, change: Callable) -> Callable:
    """A constructor whose parts at `where` are changed."""

    def build(*, key: Any) -> Sound:
        return eqx.tree_at(where, Sound(key=key), replace_fn=change)

    return build


def raises(*, key: Any) -> Any:
    raise ValueError("no such architecture")


class HalfPrecision(Wrapped):
    def __call__(self, image, *, key=None):
        return self.sound(image, key=key).astype(jnp.float16)


class OneClassTooMany(Wrapped):
    def __call__(self, image, *, key=None):
        return jnp.append(self.sound(image, key=key), -1.0)


class BranchesInPython(Wrapped):
    def __call__(self, image, *, key=None):
        logits = self.sound(image, key=key)
        return logits if logits.sum() > 0 else 2 * logits


@custom_vmap
def _nothing(image):
    return jnp.zeros(())


@_nothing.def_vmap
def _mix_rows(axis_size, in_batched, images):
    return jnp.zeros(axis_size).at[0].set(images.sum()), True


class MixesRows(Wrapped):
    def __call__(self, image, *, key=None):
        return self.sound(image, key=key).at[0].add(_nothing(jax.lax.stop_gradient(image)))


class LoopsWithoutDerivative(Wrapped):
    def __call__(self, image, *, key=None):
        logits = self.sound(image, key=key)
        return jax.lax.while_loop(lambda values: values[0] > 1e6, lambda values: values / 2, logits)


@custom_vmap
def _same(gradient):
    return gradient


@_same.def_vmap
def _mix_gradients(axis_size, in_batched, gradients):
    return gradients + 1e-2 * gradients.sum(0, keepdims=True), True


@jax.custom_vjp
def _identity(logits):
    return logits


_identity.defvjp(lambda logits: (logits, None), lambda _, gradient: (_same(gradient),))


class MixesGradients(Wrapped):
    def __call__(self, image, *, key=None):
        return _identity(self.sound(image, key=key))


class HidesArrayInStaticField(Wrapped):
    scale: Any = eqx.field(static=True)

    def __init__(self, *, key: Any):
        super().__init__(key=key)
        self.scale = np.ones(CLASSES)

    def __call__(self, image, *, key=None):
        return self.sound(image, key=key)


class RandomInPython(Wrapped):
    def __call__(self, image, *, key=None):
        return self.sound(image, key=key) + random.normal()


class FixedMask(Wrapped):
    def __call__(self, image, *, key=None):
        return self.sound(image, key=jr.key(7))


class AlwaysNeedsKey(Wrapped):
    def __call__(self, image, *, key=None):
        if key is None:
            raise ValueError("a key is needed")
        return self.sound(image, key=key)


class IgnoresInferenceMode(Wrapped):
    def __call__(self, image, *, key: Any = None):
        kept = jr.bernoulli(key, 0.99, (PIXELS,))
        return self.sound(image * kept, key=jr.fold_in(key, 1))


class AcceptsMissingKey(Wrapped):
    def __call__(self, image, *, key=None):
        return self.sound(image, key=jr.key(0) if key is None else key)


class OneKeyForTwoMasks(Wrapped):
    def __call__(self, image, *, key=None):
        return self.sound(self.sound.dropout(image, key=key), key=key)


class OneKeyForTwoLayers(Sound):
    def __init__(self, *, key: Any):
        super().__init__(key=key)
        self.head = eqx.nn.Linear(WIDTH, CLASSES, key=key)


class SharedRandomLayer(Sound):
    def __init__(self, *, key: Any):
        super().__init__(key=key)
        self.hidden = eqx.nn.Linear(PIXELS, WIDTH, key=jr.key(5))


def ignores_its_key(*, key: Any) -> Sound:
    return Sound(key=jr.key(5))


class UnusedParameter(Sound):
    unused: Any

    def __init__(self, *, key: Any):
        super().__init__(key=key)
        self.unused = jnp.ones(3)


class InfiniteSlope(Wrapped):
    def __call__(self, image, *, key=None):
        logits = self.sound(image, key=key)
        return logits + jnp.sqrt(jnp.abs(0 * logits))


class AcceptsAnyShape(Wrapped):
    def __call__(self, image, *, key=None):
        return self.sound(jnp.resize(image, (PIXELS,)), key=key)


@jax.tree_util.register_pytree_node_class
class Forgetful:
    """A node that loses its scale when it is taken apart."""

    def __init__(self, sound: Sound, scale: float = 1.0):
        self.sound = sound
        self.scale = scale

    def __call__(self, image, *, key=None):
        return self.scale * self.sound(image, key=key)

    def tree_flatten(self):
        return (self.sound,), None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(*children)


class LooksAtItsWeights(Sound):
    def __init__(self, *, key: Any):
        super().__init__(key=key)
        if float(self.hidden.weight.max()) > 100:
            raise ValueError("too large")


@custom_vmap
def _alone(array):
    return array


@_alone.def_vmap
def _refuse(axis_size, in_batched, array):
    raise NotImplementedError("one model at a time")


class CannotBeBatched(Sound):
    def __init__(self, *, key: Any):
        super().__init__(key=key)
        self.head = eqx.tree_at(lambda head: head.bias, self.head, replace_fn=_alone)


class EmptyArray(Sound):
    empty: Any

    def __init__(self, *, key: Any):
        super().__init__(key=key)
        self.empty = jnp.zeros(0, jnp.int32)


class FreshFunction(Sound):
    activation: Any = eqx.field(static=True)

    def __init__(self, *, key: Any):
        super().__init__(key=key)
        self.activation = lambda values: values


class WeakType(Sound):
    scale: Any

    def __init__(self, *, key: Any):
        super().__init__(key=key)
        self.scale = jnp.asarray(1.0)

    def __call__(self, image, *, key=None):
        return self.scale * super().__call__(image, key=key)


class SharedParameter(Sound):
    again: Any

    def __init__(self, *, key: Any):
        super().__init__(key=key)
        self.again = self.head.bias

    def __call__(self, image, *, key=None):
        return super().__call__(image, key=key) + self.again


class SeesOnlyTheMean(Wrapped):
    def __call__(self, image, *, key=None):
        return self.sound(image.mean() + 0 * image, key=key)


class IgnoresItsInput(Sound):
    def __call__(self, image, *, key=None):
        return super().__call__(0 * image, key=key)


class Centred(Sound):
    """It subtracts a running mean of the images; it keeps every promise of a model with state."""

    mean: eqx.nn.StateIndex
    inference: bool

    def __init__(self, *, key: Any):
        super().__init__(key=key)
        self.mean = eqx.nn.StateIndex(jnp.zeros(PIXELS))
        self.inference = False

    def __call__(self, image, state, *, key=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        mean = state.get(self.mean)
        return super().__call__(image - mean, key=key), self.advanced(image, state)

    def advanced(self, image, state):
        return state if self.inference else self.moved(jax.lax.pmean(image, BATCH), state)

    def moved(self, image, state):
        return state.set(self.mean, 0.9 * state.get(self.mean) + 0.1 * image)


class LeaksFromEvaluation(Centred):
    """Its running mean is also of the images that it is evaluated on."""

    def advanced(self, image, state):
        return self.moved(image, state) if self.inference else super().advanced(image, state)


class StateForEachExample(Centred):
    def advanced(self, image, state):
        return state if self.inference else self.moved(image, state)


class StateNotFinite(Centred):
    def moved(self, image, state):
        return super().moved(image / jnp.zeros(()), state)


class OneKeyForTwoMasksAmongOthers(Centred):
    def __call__(self, image, state, *, key=None):
        return super().__call__(self.dropout(image, key=key), state, key=key)


class Spectral(Sound):
    """A model with state that does not mix the examples of a batch."""

    norm: eqx.nn.SpectralNorm

    def __init__(self, *, key: Any):
        model_key, norm_key = jr.split(key)
        super().__init__(key=model_key)
        self.norm = eqx.nn.SpectralNorm(self.hidden, "weight", key=norm_key)
        self.hidden: Any = None  # it stands in the norm

    def __call__(self, image, state, *, key=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        hidden, state = self.norm(image, state)
        return self.head(self.dropout(jax.nn.relu(hidden), key=key)), state


def with_state(model: type[Sound]) -> Callable:
    """A constructor of (model, state)."""
    build = eqx.nn.make_with_state(model)
    return functools.wraps(model, updated=())(lambda *, key: build(key=key))


@dataclasses.dataclass(frozen=True)
class Broken:
    """A constructor, the promise it is made to break, and the others that fall with it."""

    build: Callable
    promise: str
    follows: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return getattr(self.build, "__name__", self.promise)


DIFFERENTIATED = (
    "works_under_all_together",
    "has_a_gradient_for_every_parameter",
    "learns_32_examples",
)
"""Without a derivative there is no training."""

BROKEN = [
    Broken(raises, "can_be_built"),
    Broken(HalfPrecision, "gives_one_float32_logit_for_each_class"),
    Broken(OneClassTooMany, "gives_one_float32_logit_for_each_class"),
    Broken(
        BranchesInPython,
        "works_under_jit",
        ("works_under_vmap", "works_under_grad", "starts_with_moderate_logits", *DIFFERENTIATED),
    ),
    Broken(MixesRows, "works_under_vmap", ("works_under_all_together",)),
    Broken(LoopsWithoutDerivative, "works_under_grad", DIFFERENTIATED),
    Broken(MixesGradients, "works_under_all_together"),
    Broken(
        edited(lambda model: model.head.bias, np.asarray),
        "trains_jax_arrays_and_nothing_else",
        ("builds_without_allocating", "builds_many_at_once"),  # numpy cannot hold what is traced
    ),
    Broken(
        HidesArrayInStaticField,
        "trains_jax_arrays_and_nothing_else",
        ("compiles_once", "survives_donation"),  # arrays in static fields cannot be compared
    ),
    Broken(
        RandomInPython,
        "repeats_its_output_for_the_same_key",
        (  # all that compare two calls
            "works_under_jit",
            "works_under_vmap",
            "needs_no_key_in_inference_mode",
            "can_be_taken_apart",
            "saves_and_restores",
        ),
    ),
    Broken(FixedMask, "draws_another_mask_for_another_key"),
    Broken(AlwaysNeedsKey, "needs_no_key_in_inference_mode"),
    Broken(IgnoresInferenceMode, "needs_no_key_in_inference_mode"),
    Broken(AcceptsMissingKey, "refuses_a_missing_key"),
    Broken(OneKeyForTwoMasks, "uses_no_key_twice"),
    Broken(OneKeyForTwoLayers, "uses_no_key_twice"),
    Broken(ignores_its_key, "starts_elsewhere_for_another_key"),
    Broken(SharedRandomLayer, "starts_elsewhere_for_another_key"),
    Broken(
        edited(lambda model: model.hidden.bias, lambda bias: bias.at[0].set(-jnp.inf)),
        "starts_finite",
    ),
    Broken(
        edited(lambda model: (model.head.weight, model.head.bias), lambda leaf: 1e-3 * leaf),
        "starts_with_moderate_logits",
    ),
    Broken(
        edited(lambda model: model.head.weight, lambda weight: 1e3 * weight),
        "starts_with_moderate_logits",
    ),
    Broken(UnusedParameter, "has_a_gradient_for_every_parameter"),
    Broken(
        InfiniteSlope,
        "has_a_gradient_for_every_parameter",
        ("works_under_all_together", "learns_32_examples"),
    ),
    Broken(AcceptsAnyShape, "refuses_a_wrong_image_shape"),
    Broken(
        lambda *, key: Forgetful(Sound(key=key), 2.0),
        "can_be_taken_apart",
        ("works_under_jit", "works_under_vmap", "saves_and_restores"),  # all take it apart
    ),
    Broken(LooksAtItsWeights, "builds_without_allocating", ("builds_many_at_once",)),
    Broken(CannotBeBatched, "builds_many_at_once"),
    Broken(EmptyArray, "saves_and_restores"),
    Broken(FreshFunction, "compiles_once"),
    Broken(WeakType, "compiles_once"),
    Broken(SharedParameter, "survives_donation"),
    Broken(SeesOnlyTheMean, "learns_32_examples"),
    Broken(IgnoresItsInput, "learns_32_examples", ("has_a_gradient_for_every_parameter",)),
    Broken(with_state(OneKeyForTwoMasksAmongOthers), "uses_no_key_twice"),
    Broken(with_state(LeaksFromEvaluation), "changes_no_state_in_inference_mode"),
    Broken(with_state(StateForEachExample), "has_one_state_for_the_whole_batch"),
    Broken(with_state(StateNotFinite), "has_one_state_for_the_whole_batch"),
]
