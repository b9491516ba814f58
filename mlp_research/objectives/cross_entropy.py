"""Cross-entropy: the default objective."""

from typing import Annotated, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float
from pydantic import Field

from mlp_research.objectives.base import Objective
from mlp_research.parts import TRACED
from mlp_research.shapes import Label, Logits


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


def cross_entropy(logits: Logits, label: Label, smoothing: Float[Array, ""]) -> Float[Array, ""]:
    """Return the cross-entropy in nats of one example against its label, smoothed.

    The target is 1 - s on the label plus s / classes everywhere (Szegedy et al. 2016, section 7).
    """
    log_probabilities = jax.nn.log_softmax(logits)
    return -(1 - smoothing) * log_probabilities[label] - smoothing * log_probabilities.mean()
