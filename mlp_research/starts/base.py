"""Starts: the parameters before the first step. Each is a part."""

import abc
from typing import Any, Literal

from jaxtyping import PyTree

from mlp_research.models import Model, with_model, without_state
from mlp_research.parts import Part
from mlp_research.shapes import RandomKey


class Start(Part, abc.ABC, frozen=True):
    """From the model as its config builds it to the one that is trained."""

    @abc.abstractmethod
    def prepare(self, model: Any, *, key: RandomKey) -> Any:
        """Return the model with other numbers, in arrays of the same shapes and dtypes.

        `key` is of the stream "init", apart from the model's own.
        """

    def prepare_whole(self, model: Model, *, key: RandomKey) -> Model:
        """Return the model prepared; its state, where it has one, stays as it is."""
        return with_model(model, self.prepare(without_state(model), key=key))

    def constrain(self, before: PyTree, after: PyTree) -> PyTree:
        """Return the parameters after a step, from those before and after the optimizer's update.

        Both are trees like the model, with None in place of what is not trained. By default `after`
        as it is; `jnp.where(before == 0, 0, after)` of each leaf keeps pruned weights at 0.
        """
        return after

    @property
    def is_gone(self) -> bool:
        """True where what the start reads is no longer there; a run that was begun can go on."""
        return False

    def identified(self) -> "Start":
        """Return the start with the checksum of whatever it reads, to stand in config.json.

        Raises `ConfigError` where that is not what the run was begun with.
        """
        return self


class SeedStart(Start, frozen=True):
    """The model as its config builds it from the seed."""

    kind: Literal["seed"] = "seed"

    def prepare(self, model: Any, *, key: RandomKey) -> Any:
        return model
