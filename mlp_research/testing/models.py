"""What a model promises to those who call it; `testing.check_model` asks.

Outputs, transformations, dropout keys, initialisation, gradients.
"""

import warnings
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from mlp_research.models import Stateful, parameters_of, without_state
from mlp_research.objectives import cross_entropy
from mlp_research.testing.promises import (
    Fault,
    bits_differ,
    compiled_quickly,
    differs,
    named_arrays,
    named_parameters,
    not_finite,
    short,
    trees_differ,
)
from mlp_research.testing.subject import (
    DRAWS,
    EXAMPLES,
    ModelUnderTest,
    batch_gradients,
    batch_logits,
    call,
)

LOGITS_BAND = (0.01, 10.0)
"""Standard deviation of the first logits: wide, as initialisations differ."""


def can_be_built(test: ModelUnderTest) -> Fault:
    """`build(key=key)` returns a callable model. Without this the others are not looked at."""
    model = without_state(test.built)
    return None if callable(model) else f"{type(model).__name__} cannot be called"


def gives_one_float32_logit_for_each_class(test: ModelUnderTest) -> Fault:
    came, wanted = (test.logits.shape, str(test.logits.dtype)), ((test.classes,), "float32")
    return None if came == wanted else f"shape and dtype are {came}, wanted {wanted}"


def works_under_jit(test: ModelUnderTest) -> Fault:
    arguments = test.images[0], test.keys[0], test.companions
    logits = compiled_quickly(call)(test.model, *arguments)
    return differs("compiled", logits, "plain", test.logits)


def works_under_vmap(test: ModelUnderTest) -> Fault:
    """A row of a batch is as alone, but in a model that mixes the examples of a batch."""
    rows = batch_logits(test.model, test.images, test.keys)
    for row in () if test.mixes else (0, 1):
        alone = test.model(test.images[row], key=test.keys[row])
        fault = differs(f"in row {row} of a batch", rows[row], "alone", alone)
        if fault:
            return fault
    return None


def works_under_grad(test: ModelUnderTest) -> Fault:
    """By shapes alone; that it is finite is asked below."""
    example = test.images[0], test.labels[0], test.keys[0], test.companions
    eqx.filter_eval_shape(eqx.filter_grad(_loss), test.model, *example)
    return None


def works_under_all_together(test: ModelUnderTest) -> Fault:
    """Compiled, batched and differentiated, an example's gradient is its own.

    Not asked of a model that mixes the examples of a batch.
    """
    if test.mixes:
        return None
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
    parameters = named_arrays(without_state(parameters_of(test.built)))
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
    again = np.asarray(test.call(test.model, test.images[0], test.keys[0]))
    if not np.array_equal(test.logits, again):
        return f"two calls with one key gave {short(test.logits)} and {short(again)}"
    return None


def draws_another_mask_for_another_key(test: ModelUnderTest) -> Fault:
    """Asked only of a model without state whose training differs from its inference mode."""
    if isinstance(test.built, Stateful):  # whose statistics may be all that differs
        return None
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
        test.call(test.model, test.images[0])
    except Exception:
        return None
    return "in training mode the output depends on the key, but a call without one is accepted"


def uses_no_key_twice(test: ModelUnderTest) -> Fault:
    """Neither in the constructor nor in one call that is not batched; JAX's own check sees it."""
    reused = _key_reuse(lambda key: test.made(key=key), jr.key(0))
    if reused:
        return f"in the constructor: {reused}"
    reused = _key_reuse(lambda key: test.call(test.model, test.images[0], key), jr.key(3))
    return f"in a call: {reused}" if reused else None


def starts_elsewhere_for_another_key(test: ModelUnderTest) -> Fault:
    """Some parameter differs, and none that looks random is the same for two keys."""
    one, other = (named_parameters(test.made(key=jr.key(seed))) for seed in (0, 1))
    same = [path for path, leaf in one.items() if np.array_equal(leaf, other[path])]
    random = [path for path in same if len(np.unique(one[path])) > max(2, one[path].size // 2)]
    if random:
        return f"random, but the same for two keys: {', '.join(random)}"
    return "all parameters are the same for two keys" if one and len(same) == len(one) else None


def starts_finite(test: ModelUnderTest) -> Fault:
    return not_finite("parameter", without_state(parameters_of(test.built)))


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


def changes_no_state_in_inference_mode(test: ModelUnderTest) -> Fault:
    """A call after `eqx.nn.inference_mode` returns the state that it was given, to the bit."""
    model = test.inference_model
    if not isinstance(model, Stateful):
        return None
    _, after = model.call(test.images[0], None)
    fault = bits_differ(model.state, after)
    return f"a call in inference mode changed the state: {fault}" if fault else None


def has_one_state_for_the_whole_batch(test: ModelUnderTest) -> Fault:
    """The state after a batch is one for all its examples, finite, and like the one before."""
    return test.state_fault


def _loss(model: Any, image: Array, label: Array, key: Array, companions: Array | None) -> Array:
    return cross_entropy(call(model, image, key, companions), label, jnp.float32(0))


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
