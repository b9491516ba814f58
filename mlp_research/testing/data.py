"""What a kind of data promises; `testing.check_data` asks."""

import contextlib
import dataclasses
import functools
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mlp_research.data import DataConfig, Rows
from mlp_research.data.checks import checked, pieces
from mlp_research.data.datasets import Splits, load
from mlp_research.parts import blaming
from mlp_research.testing.promises import Fault

Digest = dict[str, tuple[str, tuple[int, ...], int]]
"""Of each array by name: its type, its shape, and a checksum of all its numbers."""


@dataclasses.dataclass(frozen=True)
class DataUnderTest:
    """A way to make the config, the folder that it reads, and what several promises look at."""

    build: Callable[[], Any]
    directory: Path
    """Absolute, so that it is the same folder from any other one."""

    @functools.cached_property
    def config(self) -> Any:
        return self.build()

    def read(self) -> tuple[Rows, Rows]:
        """Return (training rows, test rows) as they are read now."""
        with blaming([self.config]):
            return self.config.read(self.directory)

    @functools.cached_property
    def first(self) -> tuple[tuple[Rows, Rows], Digest]:
        """The rows that are read first, and their digest at that time."""
        rows = self.read()
        return rows, digest(rows)

    @functools.cached_property
    def second(self) -> Digest:
        _ = self.first
        return digest(self.read())

    @property
    def repeat(self) -> Fault:
        """What differs between the first and the second time."""
        return _changed(self.first[1], self.second)

    @functools.cached_property
    def splits(self) -> Splits:
        """The data set, all training rows in use."""
        return load(self.directory, self.with_fields(validation=0, limit=None, crc32=None))

    def with_fields(self, **fields: Any) -> DataConfig:
        return self.config.model_copy(update=fields)


def digest(rows: tuple[Rows, Rows]) -> Digest:
    """Return what tells other rows from these. Little of a memory-mapped file is held at a time."""
    arrays: dict[str, np.ndarray] = {}
    for part, each in zip(("training", "test"), rows, strict=True):
        arrays |= {f"{part} features": each.features, f"{part} labels": each.labels}
        if each.groups is not None:
            arrays[f"{part} groups"] = each.groups
    found = {}
    for name, array in arrays.items():
        checksum = 0
        for piece in pieces(len(array), max(array[:1].size, 1)):
            checksum = zlib.crc32(array[piece].tobytes(), checksum)
        found[name] = (str(array.dtype), array.shape, checksum)
    return found


def _changed(one: Digest, other: Digest) -> Fault:
    names = sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))
    return f"other {', '.join(names)}" if names else None


def can_be_built(test: DataUnderTest) -> Fault:
    """`build()` returns a config of data. Without this the others are not looked at."""
    return None if isinstance(test.config, DataConfig) else f"wanted data, not {test.config!r}"


def gives_rows_that_can_be_used(test: DataUnderTest) -> Fault:
    """Types, shapes, finite features and labels of the classes; the others need it too."""
    checked(test.read())
    return None


def reads_the_same_rows_twice(test: DataUnderTest) -> Fault:
    """To the bit and in one order, as a run that goes on reads them again."""
    return f"a second time it reads {test.repeat}" if test.repeat else None


def leaves_alone_what_it_gave(test: DataUnderTest) -> Fault:
    """Rows that it returned are not written into when it reads again."""
    rows, before = test.first
    _ = test.second
    fault = _changed(before, digest(rows))
    return (
        f"after a second reading the rows of the first are {fault}: give a copy" if fault else None
    )


def reads_all_rows_whatever_is_used(test: DataUnderTest) -> Fault:
    """Validation, limit, normalisation and checksum are the package's to heed, not the kind's.

    Else the checksum that a run keeps would not be found again.
    """
    if test.repeat:  # what differs from time to time is said there
        return None
    used = {"validation": 1, "limit": 1, "normalize": True, "crc32": test.splits.crc32}
    with blaming([test.config]):
        came = digest(test.with_fields(**used).read(test.directory))
    fault = _changed(test.first[1], came)
    fields = ", ".join(f"{name} {value}" for name, value in used.items())
    return f"with {fields} it reads {fault}: read all rows" if fault else None


def reads_from_any_working_directory(test: DataUnderTest) -> Fault:
    """By the folder that it is given, wherever the process stands."""
    if test.repeat:
        return None
    with tempfile.TemporaryDirectory() as elsewhere, contextlib.chdir(elsewhere):
        came = digest(test.read())
    fault = _changed(test.first[1], came)
    return f"from another working directory it reads {fault}" if fault else None


def tests_on_no_training_row(test: DataUnderTest) -> Fault:
    """No test row has the features of a training row. Leave it out for data that have such rows."""
    if test.splits.duplicates:
        return (
            f"{test.splits.duplicates} of {len(test.splits.test)} test rows are training rows too: "
            "take them out, or use without=('tests_on_no_training_row',)"
        )
    return None
