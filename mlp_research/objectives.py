"""Objectives: what a step descends, and the sums from which evaluation divides once.

An objective is a part. Its hooks call one another: `gradients` calls `batch`, `batch` calls
`example`, `example` calls `loss` and `measure`. Override the narrowest that suffices.
"""

import abc
import dataclasses
from typing import Annotated, Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, PyTree
from pydantic import Field

from mlp_research.models import Model
from mlp_research.parts import TRACED, Part
from mlp_research.prng import example_keys
from mlp_research.shapes import Counter, Image, Label, Labels, Logits, RandomKey, Scalar

ScaledImages = Float32[Array, "batch pixels"]
"""Flat images in [0, 1]."""
Measured = dict[str, Array]
"""Numbers by name: of one example, or summed over examples."""
RESERVED = frozenset(
    {"split", "step", "epoch", "member", "seed", "total", "loss", "accuracy", "correct"}
    | {"gradient_norm", "clipped", "learning_rate", "parameters", "steps"}
)
"""Names in metrics.jsonl and result.json that a measurement cannot have."""


class Objective(Part, abc.ABC, frozen=True):
    """What training descends. Randomness comes from `key` alone: the step's, or one example's."""

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
        # Compiled apart from the loss: what is measured must not change the bits of training.
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
            lambda image, label, key: self.example(model, image, label, key=key)
        )(images, labels, keys)
        sums = summed(jax.lax.stop_gradient(measured))
        # Compiled apart from what a subclass makes of it, so that a member has a single run's bits.
        return jax.lax.optimization_barrier((losses.mean(), sums))

    def gradients(
        self, model: Model, images: ScaledImages, labels: Labels, *, key: RandomKey
    ) -> tuple[tuple[Scalar, Measured], PyTree]:
        """Return ((mean loss, summed measurements), gradient) of a batch.

        The gradient is a pytree like the model, with None in place of what is not trained.
        """
        return eqx.filter_value_and_grad(self.batch, has_aux=True)(model, images, labels, key=key)


class CrossEntropy(Objective, frozen=True):
    """Cross-entropy in nats against the label, smoothed (Szegedy et al. 2016, section 7).

    The target is 1 - s on the label plus s / classes everywhere. Evaluation does not smooth.
    """

    unit = "nats"
    kind: Literal["cross-entropy"] = "cross-entropy"
    label_smoothing: Annotated[float, Field(ge=0, lt=1), TRACED] = 0.0
    """Share s of the target that is spread over all classes, 0 to 1."""

    def loss(self, logits: Logits, label: Label) -> Float[Array, ""]:
        return cross_entropy(logits, label, jnp.asarray(self.label_smoothing, jnp.float32))

    def evaluation_loss(self, logits: Logits, label: Label) -> Float[Array, ""]:
        return cross_entropy(logits, label, jnp.float32(0))


class Sums(eqx.Module):
    """What an evaluation adds up over examples; only counted examples enter."""

    loss: Scalar
    correct: Counter
    total: Counter
    measured: Measured


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Exact numbers of one split: every row counted once."""

    correct: int
    total: int
    accuracy: float
    loss: float
    """Mean of the objective's evaluation loss; of cross-entropy, in nats."""
    measured: dict[str, float] = dataclasses.field(default_factory=dict)
    """Means of what the objective measures beside."""

    @classmethod
    def of(cls, batches: list[Sums]) -> "Evaluation":
        """Return the means from the sums of all batches, on the host: the one division is here."""
        correct = sum(int(sums.correct) for sums in batches)
        total = sum(int(sums.total) for sums in batches)
        loss = sum(float(sums.loss) for sums in batches)
        measured = {
            name: sum(sums.measured[name].item() for sums in batches) / total
            for name in batches[0].measured
        }
        return cls(correct, total, correct / total, loss / total, measured)

    def numbers(self) -> dict[str, float]:
        """Return all numbers by name, as a log line holds them."""
        values = dataclasses.asdict(self)
        return values | values.pop("measured")


def cross_entropy(logits: Logits, label: Label, smoothing: Float[Array, ""]) -> Float[Array, ""]:
    """Return the cross-entropy in nats of one example against its label, smoothed.

    The target is 1 - s on the label plus s / classes everywhere (Szegedy et al. 2016, section 7).
    """
    log_probabilities = jax.nn.log_softmax(logits)
    return -(1 - smoothing) * log_probabilities[label] - smoothing * log_probabilities.mean()


def is_correct(logits: Logits, label: Label) -> Bool[Array, ""]:
    """Return whether the largest logit is the label's; of equal ones the first counts."""
    return jnp.argmax(logits) == label


def summed(measured: Any) -> Any:
    """Return the sum of each measurement over examples: whole numbers and truths as int32."""
    return jax.tree.map(lambda values: jnp.sum(values, dtype=_sum_dtype(values)), measured)


def masked_sums(losses: Float[Array, " batch"], measured: Any, real: Bool[Array, " batch"]) -> Sums:
    """Return sums over the real rows; what stands in padding, even infinity, counts nothing."""
    kept = {
        name: jnp.where(real, values, jnp.zeros((), values.dtype))
        for name, values in measured.items()
    }
    sums = summed(kept)
    return Sums(
        loss=jnp.where(real, losses, 0).sum(),
        correct=sums.pop("correct"),
        total=real.sum(dtype=jnp.int32),
        measured=sums,
    )


def _sum_dtype(values: Array) -> Any:
    return jnp.float32 if jnp.issubdtype(values.dtype, jnp.inexact) else jnp.int32
