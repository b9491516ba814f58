"""What a model promises to those who call it; `testing.check_model` asks.

Outputs, transformations, dropout keys, initialisation, gradients.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable
from math import prod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, PyTree

from mlp_research.objectives import cross_entropy
from mlp_research.shapes import HostOrDevice
from mlp_research.testing.promises import (
    Fault,
    compiled_quickly,
    differs,
    named_arrays,
    not_finite,
    parameters_of,
    short,
    trees_differ,
)

EXAMPLES = 32
DRAWS = 8
"""Dropout keys that are tried on one image."""
LOGITS_BAND = (0.01, 10.0)
"""Standard deviation of the first logits: wide, as initialisations differ."""
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

    @functools.cached_property
    def model(self) -> Any:
        return self.build(key=jr.key(0))

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
    def logits(self) -> np.ndarray:
        """One plain call in training mode."""
        return np.asarray(self.model(self.images[0], key=self.keys[0]))

    @functools.cached_property
    def draws(self) -> np.ndarray:
        """Plain calls in training mode on one image with several keys."""
        calls = [self.model(self.images[0], key=key) for key in self.keys[:DRAWS]]
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


@compiled_quickly
def batch_logits(model: Any, images: Array, keys: Keys) -> Array:
    return eqx.filter_vmap(_call, in_axes=(None, 0, 0))(model, images, keys)


@compiled_quickly
@eqx.filter_grad
def batch_gradients(
    model: Any, examples: Examples, weights: Float32[HostOrDevice, " examples"]
) -> Array:
    """The gradient of a weighted sum of losses."""
    losses = eqx.filter_vmap(_loss, in_axes=(None, 0, 0, 0))(model, *examples)
    return weights @ losses


def can_be_built(test: ModelUnderTest) -> Fault:
    """`build(key=key)` returns a callable model. Without this the others are not looked at."""
    return None if callable(test.model) else f"{type(test.model).__name__} cannot be called"


def gives_one_float32_logit_for_each_class(test: ModelUnderTest) -> Fault:
    came, wanted = (test.logits.shape, str(test.logits.dtype)), ((test.classes,), "float32")
    return None if came == wanted else f"shape and dtype are {came}, wanted {wanted}"


def works_under_jit(test: ModelUnderTest) -> Fault:
    logits = compiled_quickly(_call)(test.model, test.images[0], test.keys[0])
    return differs("compiled", logits, "plain", test.logits)


def works_under_vmap(test: ModelUnderTest) -> Fault:
    rows = batch_logits(test.model, test.images, test.keys)
    for row in (0, 1):
        alone = test.model(test.images[row], key=test.keys[row])
        fault = differs(f"in row {row} of a batch", rows[row], "alone", alone)
        if fault:
            return fault
    return None


def works_under_grad(test: ModelUnderTest) -> Fault:
    """By shapes alone; that it is finite is asked below."""
    example = test.images[0], test.labels[0], test.keys[0]
    eqx.filter_eval_shape(eqx.filter_grad(_loss), test.model, *example)
    return None


def works_under_all_together(test: ModelUnderTest) -> Fault:
    """Compiled, batched and differentiated, an example's gradient is its own."""
    first = np.eye(1, EXAMPLES, dtype=np.float32)[0]
    images, labels, keys = test.examples
    others = images.at[1:].set(0), labels.at[1:].set(0), keys
    return trees_differ(
        "among these examples",
        batch_gradients(test.model, test.examples, first),
        "among others",
        batch_gradients(test.model, others, first),
    )


def trains_jax_arrays_and_nothing_else(test: ModelUnderTest) -> Fault:
    """Parameters are floating-point JAX arrays, and none is hidden in a static field."""
    parameters = named_arrays(eqx.filter(test.model, eqx.is_inexact_array))
    if not parameters:
        return "it has no parameter: no floating-point array among its leaves"
    for path, leaf in parameters.items():
        if not isinstance(leaf, jax.Array) or jnp.iscomplexobj(leaf):
            return f"{path} is {type(leaf).__name__} of {leaf.dtype}: make it a float jnp array"
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* array is being set as static.*")
        try:
            test.build(key=jr.key(0))
        except UserWarning:
            return "an array lies in a static field, where it is neither trained nor saved"
    return None


def repeats_its_output_for_the_same_key(test: ModelUnderTest) -> Fault:
    again = np.asarray(test.model(test.images[0], key=test.keys[0]))
    if not np.array_equal(test.logits, again):
        return f"two calls with one key gave {short(test.logits)} and {short(again)}"
    return None


def draws_another_mask_for_another_key(test: ModelUnderTest) -> Fault:
    """Asked only of a model whose training mode differs from its inference mode."""
    inference = np.asarray(test.inference_model(test.images[0], key=test.keys[0]))
    if differs("", test.draws[0], "", inference) and not test.is_random:
        return f"training differs from inference, but {DRAWS} keys gave the same output"
    return None


def needs_no_key_in_inference_mode(test: ModelUnderTest) -> Fault:
    """Neither asks for one nor looks at one, after `eqx.nn.inference_mode`."""
    without = np.asarray(test.inference_model(test.images[0]))
    for key in test.keys[:DRAWS]:
        if not np.array_equal(without, test.inference_model(test.images[0], key=key)):
            return "in inference mode the output depends on the key"
    return None


def refuses_a_missing_key(test: ModelUnderTest) -> Fault:
    """Asked only of a model whose output depends on the key."""
    if not test.is_random:
        return None
    try:
        test.model(test.images[0])
    except Exception:
        return None
    return "in training mode the output depends on the key, but a call without one is accepted"


def uses_no_key_twice(test: ModelUnderTest) -> Fault:
    """Neither in the constructor nor in one call that is not batched; JAX's own check sees it."""
    image, model = test.images[0], test.model
    reused = _key_reuse(lambda key: test.build(key=key), jr.key(0))
    if reused:
        return f"in the constructor: {reused}"
    reused = _key_reuse(lambda key: model(image, key=key), jr.key(3))
    return f"in a call: {reused}" if reused else None


def starts_elsewhere_for_another_key(test: ModelUnderTest) -> Fault:
    """Some parameter differs, and none that looks random is the same for two keys."""
    one, other = (parameters_of(test.build(key=jr.key(seed))) for seed in (0, 1))
    same = [path for path, leaf in one.items() if np.array_equal(leaf, other[path])]
    random = [path for path in same if len(np.unique(one[path])) > max(2, one[path].size // 2)]
    if random:
        return f"random, but the same for two keys: {', '.join(random)}"
    return "all parameters are the same for two keys" if one and len(same) == len(one) else None


def starts_finite(test: ModelUnderTest) -> Fault:
    return not_finite("parameter", eqx.filter(test.model, eqx.is_inexact_array))


def starts_with_moderate_logits(test: ModelUnderTest) -> Fault:
    """Their standard deviation on standard-normal images lies within `LOGITS_BAND`."""
    deviation, (low, high) = float(test.inference_logits.std()), LOGITS_BAND
    if not low <= deviation <= high:
        return f"their standard deviation is {deviation:.3g}, wanted {low} to {high}"
    return None


def has_a_gradient_for_every_parameter(test: ModelUnderTest) -> Fault:
    """Over a batch, each parameter's gradient is finite and somewhere not zero."""
    fault = not_finite("gradient", test.gradients)
    zero = [path for path, leaf in named_arrays(test.gradients).items() if not np.any(leaf)]
    return fault or (f"the loss does not depend on {', '.join(zero)}" if zero else None)


def refuses_a_wrong_image_shape(test: ModelUnderTest) -> Fault:
    """A pixel too many, one too few, a batch: each raises."""

    def accepts(shape: tuple[int, ...]) -> bool:
        image = jax.ShapeDtypeStruct(shape, test.images.dtype)
        try:
            jax.eval_shape(lambda image: test.inference_model(image, key=test.keys[0]), image)
        except Exception:
            return False
        return True

    wrong = [(test.pixels + 1,), (test.pixels - 1,), (3, test.pixels)]
    accepted = [str(shape) for shape in wrong if accepts(shape)]
    if accepted:
        return f"it accepts {' and '.join(accepted)}, wanted only ({test.pixels},)"
    return None


def _loss(model: Any, image: Array, label: Array, key: Array) -> Array:
    return cross_entropy(model(image, key=key), label, jnp.float32(0))


def _call(model: Any, image: Array, key: Array) -> Array:
    return model(image, key=key)


def _key_reuse(function: Callable[[Array], Any], key: Array) -> Fault:
    with jax.debug_key_reuse(True):
        try:
            eqx.filter_eval_shape(function, key)
        except jax.errors.KeyReuseError as error:
            return str(error).strip().partition("\n")[0]
        except Exception:  # it cannot be traced: run it
            try:
                function(key)
            except jax.errors.KeyReuseError as error:
                return str(error).strip().partition("\n")[0]
    return None
