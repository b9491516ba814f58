"""Objectives: what a step descends. Each is a part.

An objective is a part. Its hooks call one another: `gradients` calls `batch`, `batch` calls
`example`, `example` calls `loss` and `measure`. Override the narrowest that suffices.
"""

import abc
from typing import ClassVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, PyTree

from mlp_research.models import BATCH, Model
from mlp_research.objectives.sums import Measured, is_correct, summed
from mlp_research.parts import Part
from mlp_research.prng import example_keys
from mlp_research.shapes import Image, Label, Labels, Logits, RandomKey, Scalar, ScaledImages

RESERVED = frozenset(
    {"split", "step", "epoch", "member", "seed", "total", "loss", "accuracy", "correct"}
    | {"gradient_norm", "clipped", "learning_rate", "parameters", "steps"}
)
"""Names in metrics.jsonl and result.json that a measurement cannot have."""


class Objective(Part, abc.ABC, frozen=True):
    """A loss, its gradient, and what is measured beside. All chance comes from `key`."""

    unit: ClassVar[str] = ""
    """Unit of the loss, as reports name it."""

    @abc.abstractmethod
    def loss(self, logits: Logits, label: Label) -> Float[Array, ""]:
        """Return the loss of one example."""

    def evaluation_loss(self, logits: Logits, label: Label) -> Float[Array, ""]:
        """Return the loss of one example as evaluation reports it: by default `loss`."""
        return self.loss(logits, label)

    def measure(self, logits: Logits, label: Label) -> Measured:
        """Return further numbers of one example, by name, to be averaged in every log line."""
        return {}

    def measured(self, logits: Logits, label: Label) -> Measured:
        """Return all that is measured of one example: `correct` and what `measure` adds."""
        # Compiled apart from the loss: what is measured must not change the bits of training, nor
        # be rounded otherwise in a program of many members.
        apart = jax.lax.stop_gradient(logits)
        logits, label = jax.lax.optimization_barrier((apart, label))
        return {"correct": is_correct(logits, label)} | self.measure(logits, label)

    def example(
        self, model: Model, image: Image, label: Label, *, key: RandomKey
    ) -> tuple[Float[Array, ""], Measured]:
        """Return (loss, measurements) of one example. `key` is the example's own."""
        logits = model(image, key=key)
        return self.loss(logits, label), self.measured(logits, label)

    def batch(
        self, model: Model, images: ScaledImages, labels: Labels, *, key: RandomKey
    ) -> tuple[Scalar, Measured]:
        """Return (mean loss, summed measurements) of a batch. `key` is the step's."""
        keys = example_keys(key, len(labels))
        losses, measured = jax.vmap(
            lambda image, label, key: self.example(model, image, label, key=key), axis_name=BATCH
        )(images, labels, keys)
        return losses.mean(), summed(measured)

    def gradients(
        self, model: Model, images: ScaledImages, labels: Labels, *, key: RandomKey
    ) -> tuple[tuple[Scalar, Measured], PyTree]:
        """Return ((mean loss, summed measurements), gradient) of a batch.

        The gradient is a pytree like the model, with None in place of what is not trained. What
        stands at a model's state is not used.
        """
        return eqx.filter_value_and_grad(self.batch, has_aux=True)(model, images, labels, key=key)
