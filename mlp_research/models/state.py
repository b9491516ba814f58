"""Models with state, such as running statistics: `eqx.nn.make_with_state` makes them.

What is trained, saved and evaluated is one pytree, called on one image as any other model is. A
step advances the state by one pass over its batch; a call of the model itself never does.
"""

from typing import Any

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from mlp_research.errors import ConfigError
from mlp_research.prng import example_keys
from mlp_research.shapes import RandomKey, RandomKeys, ScaledImages, is_trained

BATCH = "batch"
"""Name of the axis of a batch's examples, over which a layer may take `jax.lax.pmean`."""


class Stateful(eqx.Module):
    """A model called as `model(image, state, key=key) -> (logits, state)`, with its state."""

    model: Any
    state: eqx.nn.State

    def __call__(self, image: Array, /, *, key: RandomKey | None = None) -> Array:
        """Return the logits. In training, statistics are those of the examples beside it.

        Raises `ConfigError` where the model needs such examples and there are none.
        """
        return self.call(image, key)[0]

    def call(self, image: Array, key: RandomKey | None) -> tuple[Array, eqx.nn.State]:
        """Return (logits, next state)."""
        # A copy, as Equinox lets a state be used once. No gradient reaches what is not trained.
        state = jax.tree.map(jax.lax.stop_gradient, self.state)
        try:
            return self.model(image, state, key=key)
        except NameError as error:
            if "unbound axis name" not in str(error):
                raise
            raise ConfigError(
                "this model's batch statistics need all examples of a batch, but here it is called "
                "on one example alone, as for per-example gradients: use a model without them, "
                "such as --model.normalisation layer"
            ) from None


def whole(built: Any) -> Any:
    """Return what a model's `build` made as one model: of (model, state) a `Stateful` one."""
    if isinstance(built, tuple) and len(built) == 2 and isinstance(built[1], eqx.nn.State):
        return Stateful(*built)
    return built


def without_state(model: PyTree) -> PyTree:
    """Return the model itself, or a tree like it, such as a gradient, without the state."""
    return model.model if isinstance(model, Stateful) else model


def with_model(before: PyTree, model: PyTree) -> PyTree:
    """Return the model in place of the one in `before`, whose state it keeps."""
    return Stateful(model, before.state) if isinstance(before, Stateful) else model


def parameter_mask(model: PyTree) -> PyTree:
    """Return true at each leaf that can be trained: floating-point arrays that are no state."""
    mask = jax.tree.map(is_trained, model)
    if isinstance(model, Stateful):
        state = jax.tree.map(lambda _: False, model.state)
        return Stateful(mask.model, state)
    return mask


def parameters_of(model: PyTree) -> PyTree:
    """Return the model with None in place of all that cannot be trained."""
    return eqx.filter(model, parameter_mask(model))


def over_batch(
    model: PyTree, images: ScaledImages, keys: RandomKeys | None
) -> Float[Array, "batch classes"]:
    """Return the logits of each image, in training mode if the model is."""
    return jax.vmap(
        lambda image, key: model(image, key=key),
        in_axes=(0, None if keys is None else 0),
        axis_name=BATCH,
    )(images, keys)


def advanced(model: PyTree, images: ScaledImages, *, key: RandomKey) -> PyTree:
    """Return the model with its state after one pass over a batch. `key` is the step's.

    The masks are those of the objective's own pass, so that XLA computes what is common once.
    """
    if not isinstance(model, Stateful):
        return model
    state = jax.vmap(lambda image, key: model.call(image, key)[1], out_axes=None, axis_name=BATCH)(
        images, example_keys(key, len(images))
    )
    return Stateful(model.model, state)


def mixes_examples(model: PyTree, image: Array, key: RandomKey) -> bool:
    """Return whether a model, in the mode that it is in, needs the other examples of a batch."""
    try:
        eqx.filter_eval_shape(lambda m, x, k: m(x, key=k), model, image, key)
    except ConfigError:
        return isinstance(model, Stateful)
    return False
