"""Optimizers: from gradients to the updates of a step. Each is a part.

An optimizer gives any gradient transformation of Optax for a step's learning rate. Clipping, frozen
leaves and the schedule's rate are the step's, and so the same for every optimizer.
"""

import abc
import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PyTree

from mlp_research.frozen import ConfigError, Fraction, NonNegativeFloat, PositiveFloat
from mlp_research.parts import TRACED, Part, Traced
from mlp_research.shapes import Scalar, is_trained, named_leaves

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
            if not any(_is_below(path, name) for path in paths):
                raise ConfigError(
                    f"optimizer.freeze {name}: the model has no such parameter. It has "
                    f"{', '.join(paths)}"
                )
        kept = [
            leaf
            if is_trained(leaf) and not any(_is_below(path, name) for name in self.freeze)
            else None
            for path, leaf in named_leaves(model)
        ]
        if not any(leaf is not None for leaf in kept):
            raise ConfigError("optimizer.freeze leaves no parameter to be trained")
        return jax.tree.unflatten(jax.tree.structure(model), kept)


class AdamConfig(OptimizerConfig, frozen=True):
    """Adam (Kingma and Ba 2015)."""

    kind: Literal["adam"] = "adam"
    b1: Fraction = 0.9
    """Decay of the first moment."""
    b2: Fraction = 0.999
    """Decay of the second moment."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    def transformation(self, learning_rate: Rate) -> optax.GradientTransformation:
        return optax.adam(learning_rate, self.b1, self.b2, self.epsilon)


class AdamWConfig(AdamConfig, frozen=True):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"  # pyright: ignore[reportIncompatibleVariableOverride]
    weight_decay: WeightDecay = 0.01
    """Decay of the weight matrices, in units of the learning rate; biases and scales are exempt."""

    def transformation(self, learning_rate: Rate) -> optax.GradientTransformation:
        return optax.adamw(
            learning_rate,
            self.b1,
            self.b2,
            self.epsilon,
            weight_decay=self.weight_decay,
            mask=matrices,
        )


class SGDConfig(OptimizerConfig, frozen=True):
    """Stochastic gradient descent with momentum (Sutskever et al. 2013)."""

    kind: Literal["sgd"] = "sgd"
    learning_rate: LearningRate = 0.1
    """Peak learning rate: the schedule's shape is multiplied by it."""
    momentum: Annotated[Fraction, TRACED] = 0.9
    """Decay of the velocity; 0 is plain gradient descent."""
    nesterov: bool = False
    """Look ahead along the velocity."""
    weight_decay: WeightDecay = 0.0
    """Decay of the weight matrices, in units of the learning rate; biases and scales are exempt."""

    def transformation(self, learning_rate: Rate) -> optax.GradientTransformation:
        return optax.chain(
            optax.trace(self.momentum, self.nesterov),
            optax.add_decayed_weights(self.weight_decay, matrices),
            optax.scale_by_learning_rate(learning_rate),
        )


class LionConfig(OptimizerConfig, frozen=True):
    """Lion (Chen et al. 2023)."""

    kind: Literal["lion"] = "lion"
    learning_rate: LearningRate = 1e-4
    """Peak learning rate: the schedule's shape is multiplied by it."""
    b1: Fraction = 0.9
    """Weight of the momentum in the sign that is followed."""
    b2: Fraction = 0.99
    """Decay of the momentum."""
    weight_decay: WeightDecay = 0.1
    """Decay of the weight matrices, in units of the learning rate; biases and scales are exempt."""

    def transformation(self, learning_rate: Rate) -> optax.GradientTransformation:
        return optax.lion(
            learning_rate, self.b1, self.b2, weight_decay=self.weight_decay, mask=matrices
        )


def matrices(parameters: PyTree) -> PyTree:
    """Return true for each leaf of rank two and more: weights, not biases or scales."""
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, parameters)


def clip_by_global_norm(
    gradients: PyTree, clip_norm: Float[Array, ""]
) -> tuple[PyTree, Scalar, Bool[Array, ""]]:
    """Return (gradients no longer than `clip_norm`, their norm before, whether it was larger)."""
    norm = optax.tree.norm(gradients)
    return optax.tree.scale(jnp.minimum(1, clip_norm / norm), gradients), norm, norm > clip_norm


def _is_below(path: str, name: str) -> bool:
    """Return whether a path is that of `name` or of a part of it."""
    return path == name or path.startswith((f"{name}.", f"{name}["))
