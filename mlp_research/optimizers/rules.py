"""The update rules of the package, by Optax."""

from typing import Annotated, Literal

import optax

from mlp_research.base_config import Fraction, PositiveFloat
from mlp_research.optimizers.base import LearningRate, OptimizerConfig, Rate, WeightDecay, matrices
from mlp_research.parts import TRACED


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
