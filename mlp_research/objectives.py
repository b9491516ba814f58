"""The loss of one example, and metrics as sums and counts, which are divided once, on the host."""

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from mlp_research.shapes import Counter, Label, Logits, Scalar


class Sums(eqx.Module):
    """What an evaluation adds up over examples; only counted examples enter."""

    loss: Scalar
    correct: Counter
    total: Counter


def cross_entropy(logits: Logits, label: Label, smoothing: Float[Array, ""]) -> Float[Array, ""]:
    """Cross-entropy in nats of one example against its label, smoothed.

    The target is 1 - s on the label plus s / classes everywhere (Szegedy et al. 2016, section 7).
    """
    log_probabilities = jax.nn.log_softmax(logits)
    return -(1 - smoothing) * log_probabilities[label] - smoothing * log_probabilities.mean()


def is_correct(logits: Logits, label: Label) -> Bool[Array, ""]:
    """Whether the largest logit is the label's; of equal ones the first counts."""
    return jnp.argmax(logits) == label


def masked_sums(
    losses: Float[Array, " batch"], correct: Bool[Array, " batch"], real: Bool[Array, " batch"]
) -> Sums:
    """Sums over the real rows; what stands in padding, even infinity, counts nothing."""
    return Sums(
        loss=jnp.where(real, losses, 0).sum(),
        correct=(correct & real).sum(dtype=jnp.int32),
        total=real.sum(dtype=jnp.int32),
    )
