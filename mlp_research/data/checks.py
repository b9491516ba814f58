"""What is asked of all rows, whatever brought them: types, sizes, finite numbers, fitting labels.

Pixels are of any value from 0 to 255, so that a memory-mapped file of them is not read for this.
"""

import dataclasses
from collections.abc import Iterator
from typing import TypeGuard

import numpy as np
from jaxtyping import Integer

from mlp_research.data.base import DataError, Rows
from mlp_research.data.batches import Split
from mlp_research.data.idx import by

ROLES = ("features", "labels", "groups")
LARGEST_LABEL = 2**31 - 2
"""Labels and their number are kept in 32 bits."""
_PIECE = 2**20  # Numbers that are looked at together.
_RETURNS = "it must be a pair (training rows, test rows), each of them Rows(features, labels)"


@dataclasses.dataclass(frozen=True)
class CheckedRows:
    """Rows that passed, in the form that the package computes with."""

    train: Split
    test: Split
    image_shape: tuple[int, ...]
    classes: int


def checked(came: object) -> CheckedRows:
    """Return what a kind of data gave, checked; there are 1 + the largest training label classes.

    Labels become uint8 where there are at most 256 classes, else int32; groups become int64.
    Raises `DataError` that names what came, where, and what is wanted.
    """
    if not (isinstance(came, tuple) and len(came) == 2):
        raise DataError(f"the data are {described(came)}: {_RETURNS}")
    for part, rows in zip(("training", "test"), came, strict=True):
        if not isinstance(rows, Rows):
            raise DataError(f"the {part} rows are {described(rows)}: {_RETURNS}")
    train, test = (_named(rows, part) for part, rows in zip(("train", "test"), came, strict=True))
    for rows in (train, test):
        _check_types(rows)
        _check_sizes(rows)
    _check_alike(train, test)
    for rows in (train, test):
        _check_finite(rows)
        _check_not_negative(rows)
    classes = _count_classes(train)
    _check_known(test, classes)
    shape = tuple(int(size) for size in train.features.shape[1:])
    return CheckedRows(_split(train, classes), _split(test, classes), shape, classes)


def described(value: object) -> str:
    """Return what a value is, for a message: `a list`, or `float64 of 6 x 4`."""
    if isinstance(value, np.ma.MaskedArray):
        return f"a masked array of {value.dtype}"
    if isinstance(value, np.ndarray):
        return f"{value.dtype} of {by(value.shape) or 'no dimension'}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    if value is None:
        return "None"
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def pieces(rows: int, width: int) -> Iterator[slice]:
    """Stream slices that cover all rows, each of about a million numbers."""
    count = 1 + _PIECE // max(width, 1)
    for first in range(0, rows, count):
        yield slice(first, min(first + count, rows))


def _named(rows: Rows, part: str) -> Rows:
    """Return the rows with a name for each array, for messages."""
    given = rows.names if isinstance(rows.names, tuple) and len(rows.names) == 3 else ("",) * 3
    names = [str(name) or f"{part} {role}" for name, role in zip(given, ROLES, strict=True)]
    return dataclasses.replace(rows, names=(names[0], names[1], names[2]))


def _check_types(rows: Rows) -> None:
    features, labels, groups = rows.names
    if _is_array(rows.features) and rows.features.ndim < 2:
        raise DataError(
            f"{features} is {described(rows.features)}: it must have a row for each example, and "
            "at least one more dimension"
        )
    if not _is_array(rows.features) or rows.features.dtype not in (np.uint8, np.float32):
        raise DataError(
            f"{features} is {described(rows.features)}: it must be a NumPy array of uint8 (pixels "
            "of 0 to 255) or of float32"
        )
    integers = [(labels, rows.labels)] + [(groups, rows.groups)] * (rows.groups is not None)
    for name, array in integers:
        if not _is_array(array) or array.dtype.kind not in "iu" or array.ndim != 1:
            raise DataError(
                f"{name} is {described(array)}: it must be a NumPy array of integers in one "
                "dimension, one for each example"
            )


def _is_array(value: object) -> TypeGuard[np.ndarray]:
    return isinstance(value, np.ndarray) and not isinstance(value, np.ma.MaskedArray)


def _check_sizes(rows: Rows) -> None:
    features, labels, groups = rows.names
    if rows.features.size == 0:
        raise DataError(
            f"{features} is empty: its shape is {by(rows.features.shape)}. Use data with examples"
        )
    for noun, name, array in (("labels", labels, rows.labels), ("groups", groups, rows.groups)):
        if array is not None and len(array) != len(rows.features):
            raise DataError(
                f"{features} holds {len(rows.features)} {_noun(rows.features)}, but {name} holds "
                f"{len(array)} {noun}: use those that belong together"
            )


def _noun(features: np.ndarray) -> str:
    return "images" if features.ndim > 2 else "rows"


def _check_alike(train: Rows, test: Rows) -> None:
    """Check that the rows of both parts have one type and shape, and groups in both or neither."""
    for of, mine, others in (
        ("shape", by(train.features.shape[1:]), by(test.features.shape[1:])),
        ("type", str(train.features.dtype), str(test.features.dtype)),
    ):
        if mine != others:
            raise DataError(
                f"{test.names[0]} holds {_noun(test.features)} of {of} {others}, but "
                f"{train.names[0]} of {mine}: use those of one data set"
            )
    if (train.groups is None) != (test.groups is None):
        there, lacking = ("train", "test") if test.groups is None else ("test", "train")
        raise DataError(f"there are groups of the {there} rows, but none of the {lacking} rows")


def _check_finite(rows: Rows) -> None:
    if rows.features.dtype == np.uint8:
        return
    faults, first = 0, -1
    count = len(rows.features)
    for piece in pieces(count, rows.features[0].size):
        finite = np.isfinite(rows.features[piece]).reshape(piece.stop - piece.start, -1)
        wrong = ~finite.all(axis=1)
        if first < 0 and wrong.any():
            first = piece.start + int(wrong.argmax())
        faults += int(wrong.sum())
    if faults:
        row = rows.features[first].ravel()
        raise DataError(
            f"{rows.names[0]} row {first} holds {row[~np.isfinite(row)][0]}, and so {faults} of "
            f"{count} rows are not finite: leave such rows out, or fill them in"
        )


def _check_not_negative(rows: Rows) -> None:
    row = int(rows.labels.argmin())
    if rows.labels[row] < 0:
        raise DataError(
            f"{rows.names[1]} row {row} has the label {rows.labels[row]}: labels are counted from 0"
        )


def _count_classes(train: Rows) -> int:
    name, row = train.names[1], int(train.labels.argmax())
    largest = int(train.labels[row])
    if largest == 0:
        raise DataError(f"{name} holds only the label 0: a classifier needs at least 2 classes")
    if largest > LARGEST_LABEL:
        raise DataError(
            f"{name} row {row} has the label {largest}: it must be at most {LARGEST_LABEL}"
        )
    return 1 + largest


def _check_known(test: Rows, classes: int) -> None:
    row = int(test.labels.argmax())
    if test.labels[row] >= classes:
        raise DataError(
            f"{test.names[1]} row {row} has the label {test.labels[row]}, but the training labels "
            f"end at {classes - 1} ({classes} classes): use those that belong together"
        )


def _split(rows: Rows, classes: int) -> Split:
    features = rows.features.reshape(len(rows.features), -1)
    labels = rows.labels.astype(np.uint8 if classes <= 256 else np.int32, copy=False)
    groups = None if rows.groups is None else _as_int64(rows.groups, rows.names[2])
    return Split(
        _read_only(features), _read_only(labels), None if groups is None else _read_only(groups)
    )


def _as_int64(groups: Integer[np.ndarray, " examples"], name: str) -> np.ndarray:
    row = int(groups.argmax())
    if int(groups[row]) >= 2**63:
        raise DataError(f"{name} row {row} is {groups[row]}: it must be below 2 ** 63")
    return groups.astype(np.int64, copy=False)


def _read_only(array: np.ndarray) -> np.ndarray:
    """Return a view that cannot be written through: the caller's array stays the caller's."""
    view = (array if array.flags.c_contiguous else np.ascontiguousarray(array)).view()
    view.flags.writeable = False
    return view
