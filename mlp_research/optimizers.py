"""Update rules and schedules. What is a number is traced; what is a structure is static.

A rule says the direction of a step, a schedule the shape of the learning rate over a run with peak
one. The peak and the other numbers come in as `Settings`, so one compiled program serves them all.
"""

import abc
import dataclasses
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Integer, PyTree
from pydantic import AfterValidator, Field
from pydantic_core import PydanticKnownError

from mlp_research.frozen import ConfigError, Frozen
from mlp_research.shapes import Scalar

MOST_STEPS = 2**31 - 1
"""Steps are counted in 32 bits."""
SMALLEST, LARGEST = float(np.finfo(np.float32).tiny), float(np.finfo(np.float32).max)


def _in_float32(value: float) -> float:
    """A number that does not become zero or infinity in float32, in which a step computes."""
    if 0 < value < SMALLEST:
        raise PydanticKnownError("greater_than_equal", {"ge": SMALLEST})
    if value > LARGEST:
        raise PydanticKnownError("less_than_equal", {"le": LARGEST})
    return value


PositiveFloat = Annotated[float, Field(gt=0), AfterValidator(_in_float32)]
NonNegativeFloat = Annotated[float, Field(ge=0), AfterValidator(_in_float32)]
Beta = Annotated[float, Field(ge=0, lt=1)]

TRACED = ("learning_rate", "weight_decay", "momentum", "clip_norm")
"""Fields of a rule that are traced; all others are part of the compiled program."""


class Settings(eqx.Module):
    """The traced numbers of a step; all are float32 scalars."""

    learning_rate: Float[Array, ""]
    """The schedule's peak."""
    weight_decay: Float[Array, ""]
    momentum: Float[Array, ""]
    clip_norm: Float[Array, ""]
    """Largest global norm of the gradient; infinity clips nothing."""
    label_smoothing: Float[Array, ""]

    @classmethod
    def of(cls, rule: "OptimizerConfig", label_smoothing: float) -> "Settings":
        """The numbers of a config; a number that the rule does not have is zero."""
        numbers = rule.model_dump(include=set(TRACED))
        if numbers["clip_norm"] is None:
            numbers["clip_norm"] = np.inf
        traced = {name: jnp.float32(numbers.get(name, 0.0)) for name in TRACED}
        return cls(**traced, label_smoothing=jnp.float32(label_smoothing))


class OptimizerConfig(Frozen, abc.ABC, frozen=True):
    """An update rule."""

    kind: str
    learning_rate: PositiveFloat = 1e-3
    """Peak learning rate: the schedule's shape is multiplied by it."""
    clip_norm: PositiveFloat | None = None
    """Largest global norm of the gradient; a longer one is scaled to it (Pascanu et al. 2013)."""

    @abc.abstractmethod
    def direction(self, settings: Settings) -> optax.GradientTransformation:
        """From gradients to the step's direction, before the learning rate and the sign."""


class AdamConfig(OptimizerConfig, frozen=True):
    """Adam (Kingma and Ba 2015)."""

    kind: Literal["adam"] = "adam"
    b1: Beta = 0.9
    """Decay of the first moment."""
    b2: Beta = 0.999
    """Decay of the second moment."""
    epsilon: PositiveFloat = 1e-8
    """Added to the root of the second moment."""

    def direction(self, settings: Settings) -> optax.GradientTransformation:
        return optax.scale_by_adam(self.b1, self.b2, self.epsilon)


class AdamWConfig(AdamConfig, frozen=True):
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019)."""

    kind: Literal["adamw"] = "adamw"  # pyright: ignore[reportIncompatibleVariableOverride]
    weight_decay: NonNegativeFloat = 0.01
    """Decay of the weight matrices, in units of the learning rate; biases and scales are exempt."""

    def direction(self, settings: Settings) -> optax.GradientTransformation:
        return optax.chain(super().direction(settings), _decay_matrices(settings.weight_decay))


class SGDConfig(OptimizerConfig, frozen=True):
    """Stochastic gradient descent with momentum (Sutskever et al. 2013)."""

    kind: Literal["sgd"] = "sgd"
    learning_rate: PositiveFloat = 0.1
    """Peak learning rate: the schedule's shape is multiplied by it."""
    momentum: Beta = 0.9
    """Decay of the velocity; 0 is plain gradient descent."""
    nesterov: bool = False
    """Look ahead along the velocity."""
    weight_decay: NonNegativeFloat = 0.0
    """Decay of the weight matrices, in units of the learning rate; biases and scales are exempt."""

    def direction(self, settings: Settings) -> optax.GradientTransformation:
        return optax.chain(
            optax.trace(settings.momentum, self.nesterov), _decay_matrices(settings.weight_decay)
        )


class LionConfig(OptimizerConfig, frozen=True):
    """Lion (Chen et al. 2023)."""

    kind: Literal["lion"] = "lion"
    learning_rate: PositiveFloat = 1e-4
    """Peak learning rate: the schedule's shape is multiplied by it."""
    b1: Beta = 0.9
    """Weight of the momentum in the sign that is followed."""
    b2: Beta = 0.99
    """Decay of the momentum."""
    weight_decay: NonNegativeFloat = 0.1
    """Decay of the weight matrices, in units of the learning rate; biases and scales are exempt."""

    def direction(self, settings: Settings) -> optax.GradientTransformation:
        return optax.chain(
            optax.scale_by_lion(self.b1, self.b2), _decay_matrices(settings.weight_decay)
        )


OPTIMIZERS: dict[str, type[OptimizerConfig]] = {
    "adam": AdamConfig,
    "adamw": AdamWConfig,
    "sgd": SGDConfig,
    "lion": LionConfig,
}


class ScheduleConfig(Frozen, abc.ABC, frozen=True):
    """The learning rate over a run, as a shape with peak one."""

    kind: str

    @abc.abstractmethod
    def shape(self, total_steps: int) -> optax.Schedule:
        """From the number of steps taken to a factor in [0, 1]."""


class ConstantConfig(ScheduleConfig, frozen=True):
    """The peak throughout."""

    kind: Literal["constant"] = "constant"

    def shape(self, total_steps: int) -> optax.Schedule:
        return optax.constant_schedule(1.0)


class LinearConfig(ScheduleConfig, frozen=True):
    """From the peak down to zero in a straight line."""

    kind: Literal["linear"] = "linear"

    def shape(self, total_steps: int) -> optax.Schedule:
        return optax.linear_schedule(1.0, 0.0, total_steps)


class WarmupCosineConfig(ScheduleConfig, frozen=True):
    """From zero up to the peak in a straight line, then down to zero as half a cosine."""

    kind: Literal["warmup-cosine"] = "warmup-cosine"
    warmup_steps: Annotated[int, Field(ge=0, le=MOST_STEPS)] = 100
    """Steps until the peak."""
    decay_steps: Annotated[int, Field(gt=0, le=MOST_STEPS)] | None = None
    """Steps until zero, the warm-up included; by default the length of the run."""

    def shape(self, total_steps: int) -> optax.Schedule:
        steps = total_steps if self.decay_steps is None else self.decay_steps
        if self.warmup_steps >= steps:
            raise ConfigError(
                f"schedule.warmup_steps is {self.warmup_steps}, but the schedule has {steps} "
                f"steps: use at most {steps - 1}, or train longer"
            )
        return optax.warmup_cosine_decay_schedule(0.0, 1.0, self.warmup_steps, steps)


class OneCycleConfig(ScheduleConfig, frozen=True):
    """Up to the peak and down to nearly zero, both as half a cosine (Smith and Topin 2018)."""

    kind: Literal["one-cycle"] = "one-cycle"
    warmup_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.3
    """Share of the run until the peak."""
    start_divisor: Annotated[float, Field(gt=1)] = 25.0
    """The run starts at the peak divided by this."""
    end_divisor: Annotated[float, Field(gt=1)] = 1e4
    """The run ends at the start's rate divided by this."""

    def shape(self, total_steps: int) -> optax.Schedule:
        return optax.cosine_onecycle_schedule(
            total_steps, 1.0, self.warmup_fraction, self.start_divisor, self.end_divisor
        )


SCHEDULES: dict[str, type[ScheduleConfig]] = {
    "constant": ConstantConfig,
    "linear": LinearConfig,
    "warmup-cosine": WarmupCosineConfig,
    "one-cycle": OneCycleConfig,
}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """A rule and a schedule without their traced numbers: the static part of a step."""

    rule: OptimizerConfig
    schedule: ScheduleConfig
    total_steps: int

    @classmethod
    def of(cls, rule: OptimizerConfig, schedule: ScheduleConfig, total_steps: int) -> "Optimizer":
        """Two configs that differ only in traced numbers make the same optimizer."""
        untraced = type(rule)(**rule.model_dump(exclude=set(TRACED)))
        schedule.shape(total_steps)
        return cls(untraced, schedule, total_steps)

    def init(self, parameters: PyTree) -> PyTree:
        return self.rule.direction(Settings.of(self.rule, 0.0)).init(parameters)

    def learning_rate(self, settings: Settings, step: Integer[Array, ""]) -> Scalar:
        """The rate applied in the step after `step` steps."""
        shape = self.schedule.shape(self.total_steps)
        return jnp.asarray(settings.learning_rate * shape(step), jnp.float32)

    def update(
        self, gradients: PyTree, state: PyTree, parameters: PyTree, settings: Settings, rate: Scalar
    ) -> tuple[PyTree, PyTree]:
        """The updates to add to the parameters, and the rule's next state."""
        directions, state = self.rule.direction(settings).update(gradients, state, parameters)
        return optax.tree.scale(-rate, directions), state


def clip_by_global_norm(
    gradients: PyTree, clip_norm: Float[Array, ""]
) -> tuple[PyTree, Scalar, Bool[Array, ""]]:
    """Gradients no longer than `clip_norm`, their norm before, and whether they were clipped."""
    norm = optax.tree.norm(gradients)
    return optax.tree.scale(jnp.minimum(1, clip_norm / norm), gradients), norm, norm > clip_norm


def _decay_matrices(weight_decay: Float[Array, ""]) -> optax.GradientTransformation:
    """Decay for leaves of rank two and more: weights, not biases or scales."""

    def is_matrix(parameters: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.ndim >= 2, parameters)

    return optax.add_decayed_weights(weight_decay, mask=is_matrix)
