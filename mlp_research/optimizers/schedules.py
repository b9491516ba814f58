"""Schedules: the learning rate over a run, as a shape with peak one. Each is a part."""

import abc
from typing import Annotated, Literal

import optax
from pydantic import Field

from mlp_research.errors import ConfigError
from mlp_research.parts import Part

MOST_STEPS = 2**31 - 1
"""Steps are counted in 32 bits."""


class ScheduleConfig(Part, abc.ABC, frozen=True):
    """The learning rate over a run, as a shape with peak one."""

    @abc.abstractmethod
    def shape(self, total_steps: int) -> optax.Schedule:
        """Return the function from the number of steps taken to a factor in [0, 1]."""


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
