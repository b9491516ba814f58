"""Test rows that stand among the training rows too: a result on them is no test."""

from collections.abc import Iterator

import numpy as np
from jaxtyping import Bool, UInt64

from mlp_research.data.batches import Split
from mlp_research.data.idx import is_mapped, let_go, rows_of

_PIECE = 2**18  # Bytes of rows that are read at once.


def count_duplicates(train: Split, test: Split) -> int:
    """Return how many test rows have the features of some training row, byte for byte.

    A sum over each row finds those that may be equal; only these are compared whole.
    """
    keys, test_keys = _sums(train), _sums(test)
    candidates = np.isin(test_keys, keys)
    if not candidates.any():
        return 0
    sought = set(_contents(test, candidates))
    seen = {row for row in _contents(train, np.isin(keys, test_keys)) if row in sought}
    return sum(row in seen for row in _contents(test, candidates))


def _sums(split: Split) -> UInt64[np.ndarray, " examples"]:
    """Return a number for each row that equal rows share: the sum of its bytes by eight."""
    width = split.images[0].nbytes
    sums = np.zeros(len(split), np.uint64)
    count = 1 + _PIECE // width
    for first in range(0, len(split), count):
        rows = split.images[first : first + count].view(np.uint8).reshape(-1, width)
        words = width // 8
        if words:
            eights = np.ndarray((len(rows), words), np.uint64, rows, strides=(width, 8))
            sums[first : first + count] = eights.sum(axis=1)
        for place in range(8 * words, width):
            sums[first : first + count] += rows[:, place]
        if is_mapped(split.images):
            let_go(split.images)
    return sums


def _contents(split: Split, chosen: Bool[np.ndarray, " examples"]) -> Iterator[bytes]:
    """Stream the bytes of the chosen rows, some read at a time."""
    places = np.flatnonzero(chosen)
    count = 1 + _PIECE // split.images[0].nbytes
    for first in range(0, len(places), count):
        for row in rows_of(split.images, places[first : first + count]):
            yield row.tobytes()
