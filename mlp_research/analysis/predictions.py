"""What a classifier's answers are worth: counts by class, calibration, the worst mistakes.

Numpy in float64, on the host. Probabilities come from `probabilities`; rows are examples.
"""

import numpy as np
from jaxtyping import Bool, Float, Float64, Int64, Integer

from mlp_research.errors import Failure

BINS = 15
"""Bins of the calibration error, as in Guo et al. 2017."""

Numbers = Float[np.ndarray, "examples classes"]
Classes = Integer[np.ndarray, " examples"]


class NotFiniteError(Failure, ArithmeticError):
    """Logits that are no numbers: how many rows, and the first of them."""


def probabilities(logits: Numbers) -> Float64[np.ndarray, "examples classes"]:
    """Softmax of each row. Raises `NotFiniteError` where one is not finite."""
    wrong = ~np.isfinite(logits).all(axis=1)
    if wrong.any():
        row = int(np.argmax(wrong))
        raise NotFiniteError(
            f"the logits of {int(wrong.sum())} of {len(logits)} rows are not finite; "
            f"the first is row {row}: {logits[row].tolist()}"
        )
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    weights = np.exp(shifted)
    return weights / weights.sum(axis=1, keepdims=True)


def confusion_counts(
    labels: Classes, predictions: Classes, classes: int
) -> Int64[np.ndarray, "classes classes"]:
    """How many rows of each label (first axis) were given each prediction (second axis)."""
    cells = labels.astype(np.int64) * classes + predictions
    return np.bincount(cells, minlength=classes * classes).reshape(classes, classes)


def recall(counts: Int64[np.ndarray, "classes classes"]) -> Float64[np.ndarray, " classes"]:
    """Share of each label's rows that are predicted right; NaN for a label without rows."""
    return _shares(counts.diagonal(), counts.sum(axis=1))


def precision(counts: Int64[np.ndarray, "classes classes"]) -> Float64[np.ndarray, " classes"]:
    """Share of each prediction that is right; NaN for a class that is never predicted."""
    return _shares(counts.diagonal(), counts.sum(axis=0))


def calibration_error(
    confidences: Float[np.ndarray, " examples"],
    correct: Bool[np.ndarray, " examples"],
    bins: int = BINS,
) -> float:
    """Expected calibration error (Guo et al. 2017, equation 3), from 0 to 1.

    ECE = sum over bins m of |B_m| / n * |accuracy(B_m) - confidence(B_m)|, where bin m of M holds
    the rows whose confidence, the probability of their prediction, lies in ((m - 1) / M, m / M].
    """
    index = np.clip(np.ceil(confidences * bins).astype(np.int64) - 1, 0, bins - 1)
    # A bin's |B| * |accuracy - confidence| is the size of the sum of its rows' differences.
    differences = np.bincount(index, weights=correct - confidences, minlength=bins)
    return float(np.abs(differences).sum() / len(confidences))


def brier_score(chances: Numbers, labels: Classes) -> float:
    """Mean over rows of the sum over classes of (p - y)^2, y one for the label; from 0 to 2.

    Brier 1950, equation 2.
    """
    errors = chances.astype(np.float64)
    errors[np.arange(len(labels)), labels] -= 1
    return float((errors**2).sum(axis=1).mean())


def worst(chances: Numbers, labels: Classes, count: int) -> Int64[np.ndarray, " worst"]:
    """The rows that are wrong with the largest probability, at most `count`, the worst first.

    Of equal ones the first row comes first.
    """
    wrong = np.flatnonzero(chances.argmax(axis=1) != labels)
    order = np.argsort(-chances[wrong].max(axis=1), kind="stable")
    return wrong[order[:count]]


def _shares(
    parts: Int64[np.ndarray, " classes"], wholes: Int64[np.ndarray, " classes"]
) -> Float64[np.ndarray, " classes"]:
    return np.divide(parts, wholes, out=np.full(len(parts), np.nan), where=wholes > 0)
