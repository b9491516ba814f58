"""Optimizers: from gradients to the updates of a step. Each is a part.

An optimizer gives any gradient transformation of Optax for a step's learning rate. Clipping, frozen
leaves and the schedule's rate are the step's, and so the same for every optimizer.
"""

import abc
import math
from typing import Annotated

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from mlp_research.base_config import NonNegativeFloat, PositiveFloat
from mlp_research.errors import ConfigError
from mlp_research.parts import TRACED, Part, Traced
from mlp_research.shapes import Scalar, is_below, is_trained, named_leaves

Rate = float | Float[Array, ""]
"""A learning rate: traced in a step, a plain number where a state is begun."""


LearningRate = Annotated[PositiveFloat, TRACED]


WeightDecay = Annotated[NonNegativeFloat, TRACED]


class OptimizerConfig(Part, abc.ABC, frozen=True):
    """From the gradients of a step to its updates."""

    learning_rate: LearningRate = 1e-3
    """Peak learning rate: the schedule's shape is multiplied by it."""
    clip_norm: Annotated[PositiveFloat | None, Traced(none=math.inf)] = None
    """Largest global norm of the gradient; a longer one is scaled to it (Pascanu et al. 2013)."""
    freeze: tuple[str, ...] = ()
    """Paths that are not trained, such as layers[0] or layers[1].bias: no update, decay, state."""

    @abc.abstractmethod
    def transformation(
        self, learning_rate: Rate
    ) -> optax.GradientTransformation | optax.GradientTransformationExtraArgs:
        """Return the whole transformation, sign and rate included, at a step's learning rate.

        Its update is given the parameters, and by name the batch's loss (`value`), its clipped
        gradient (`grad`) and `value_fn(parameters)`, the batch's loss elsewhere.
        """

    def evaluated(self, parameters: PyTree, state: PyTree) -> PyTree:
        """Return the parameters that are validated, tested and saved as the result.

        `state` is the transformation's. By default they are the parameters that are trained.
        """
        return parameters

    def trained(self, model: PyTree) -> PyTree:
        """Return the model's parameters with None in place of all that is frozen.

        Raises `ConfigError` for a path at which the model has no parameter.
        """
        paths = [path for path, leaf in named_leaves(model) if is_trained(leaf)]
        for name in self.freeze:
            if not any(is_below(path, name) for path in paths):
                raise ConfigError(
                    f"optimizer.freeze {name}: the model has no such parameter. It has "
                    f"{', '.join(paths)}"
                )
        kept = [
            leaf
            if is_trained(leaf) and not any(is_below(path, name) for name in self.freeze)
            else None
            for path, leaf in named_leaves(model)
        ]
        if not any(leaf is not None for leaf in kept):
            raise ConfigError("optimizer.freeze leaves no parameter to be trained")
        return jax.tree.unflatten(jax.tree.structure(model), kept)


def matrices(parameters: PyTree) -> PyTree:
    """Return true for each leaf of rank two and more: weights, not biases or scales."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, parameters)


def clip_by_global_norm(
    gradients: PyTree, clip_norm: Float[Array, ""]
) -> tuple[PyTree, Scalar, Bool[Array, ""]]:
    """Return (gradients no longer than `clip_norm`, their norm before, whether it was larger)."""
    norm = optax.tree.norm(gradients)
    return optax.tree.scale(jnp.minimum(1, clip_norm / norm), gradients), norm, norm > clip_norm
