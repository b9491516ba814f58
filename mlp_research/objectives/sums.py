"""Measurements as sums and counts, which are divided once, on the host."""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mlp_research.shapes import Counter, Label, Logits, Scalar

Measured = dict[str, Array]
"""Numbers by name: of one example, or summed over examples."""


class Sums(eqx.Module):
    """Sums over the counted examples of an evaluation."""

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
