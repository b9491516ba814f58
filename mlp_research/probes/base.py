"""Probes: what is measured of a model while it trains, and changes nothing. Each is a part."""

import abc
from typing import Literal

import equinox as eqx
from jaxtyping import Array, Integer, PyTree
from pydantic import PositiveInt

from mlp_research.models import Model
from mlp_research.objectives import Measured
from mlp_research.parts import Part
from mlp_research.shapes import ScaledImages


class Examples(eqx.Module):
    """Rows of the training data as a model is called on them."""

    images: ScaledImages
    labels: Integer[Array, " batch"]


class Probe(Part, abc.ABC, frozen=True):
    """Scalars by name, of the model after each epoch and of the update in each step."""

    rows: PositiveInt = 1000
    """First training rows that are looked at after each epoch; of fewer rows, all."""

    @abc.abstractmethod
    def measure(self, model: Model, data: Examples) -> Measured:
        """Return scalars by name after an epoch. The model's randomness is off."""

    def measure_step(self, before: PyTree, after: PyTree) -> Measured:
        """Return scalars by name of a step, from the parameters before and after it.

        Both are trees like the model, with None in place of what is not trained.
        """
        return {}


class NoProbe(Probe, frozen=True):
    """Nothing is measured beside."""

    kind: Literal["none"] = "none"

    def measure(self, model: Model, data: Examples) -> Measured:
        return {}
