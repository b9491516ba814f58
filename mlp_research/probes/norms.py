"""Norms of the weights, and of their updates."""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import PyTree

from mlp_research.models import Model, parameters_of, without_state
from mlp_research.objectives import Measured
from mlp_research.probes.base import Examples, Probe
from mlp_research.shapes import named_leaves


class WeightNorms(Probe, frozen=True):
    """The Euclidean norm of each array of parameters: `weight_norm.layers[0].weight`."""

    kind: Literal["weight-norms"] = "weight-norms"

    def measure(self, model: Model, data: Examples) -> Measured:
        parameters = named_leaves(without_state(parameters_of(model)))
        return {f"weight_norm.{path}": jnp.linalg.norm(leaf) for path, leaf in parameters}


class UpdateRatio(Probe, frozen=True):
    """The norm of each weight's update over the weight's own, in every step.

    `update_ratio.layers[0].weight`; biases are left out, as they begin at 0.
    """

    kind: Literal["update-ratio"] = "update-ratio"

    def measure(self, model: Model, data: Examples) -> Measured:
        return {}

    def measure_step(self, before: PyTree, after: PyTree) -> Measured:
        pairs = zip(named_leaves(before), named_leaves(after), strict=True)
        return {
            f"update_ratio.{path}": jnp.linalg.norm(new - old) / jnp.linalg.norm(old)
            for (path, old), (_, new) in pairs
            if old.ndim >= 2
        }
