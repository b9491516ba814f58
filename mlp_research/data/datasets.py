"""From the rows that a kind of data brings to a data set: checked, split in a fixed way."""

import dataclasses
import zlib
from pathlib import Path

import numpy as np

from mlp_research.data.arrays import rows_of_arrays
from mlp_research.data.base import Arrays, DataConfig, DataError
from mlp_research.data.batches import Split
from mlp_research.data.checks import CheckedRows, checked
from mlp_research.data.duplicates import count_duplicates
from mlp_research.data.idx import is_mapped, rows_of
from mlp_research.errors import ConfigError
from mlp_research.parts import blaming

DEFAULT_DIRECTORY = Path(__file__).parent.parent.parent / "data" / "mnist"
_PIECE = 2**18  # Bytes of images that are summed at once.
_WHOLLY_SUMMED = 2**16  # Images of a file up to which each is in the checksum; of more, _SUMMED.
_SUMMED = 2**13


@dataclasses.dataclass(frozen=True)
class Splits:
    """A data set: its three parts, the shape of an example, and how many classes there are."""

    train: Split
    validation: Split
    """May have no rows."""
    test: Split
    image_shape: tuple[int, ...]
    """Shape of one example: (28, 28), (32, 32, 3), or (13,) for a row of a table."""
    classes: int
    crc32: int
    """Of labels and features, whatever part of them is used: it tells data sets apart."""
    duplicates: int | None
    """Test rows whose features are those of a training or held-out row; None for too many rows."""


def load(directory: Path, config: DataConfig, arrays: Arrays | None = None) -> Splits:
    """Return the data set that a kind of data reads, or that of arrays in memory.

    `arrays` are (x, y, x_test, y_test), or these and (groups, groups_test); where they are given,
    `directory` is not read. There are 1 + the largest training label classes, held-out rows
    included.

    Raises `DataError` for data that cannot be used or are not those of `config.crc32`,
    `ConfigError` for more rows than there are.
    """
    rows = _read(directory, config) if arrays is None else checked(rows_of_arrays(arrays))
    crc32 = _checksum(rows)
    if config.crc32 not in (None, crc32):
        lacking, things, mend = (
            (f"{directory} does not hold", "files", "folder by --data.dir")
            if arrays is None
            else ("the arrays are not", "arrays", "arrays")
        )
        raise DataError(
            f"{lacking} the data that the run was begun with: data.crc32 is {config.crc32}, that "
            f"of these {things} {crc32}. Name the right {mend}"
        )
    holder = "training files hold" if arrays is None else "training arrays hold"
    trained, held_out = _split_rows(len(rows.train), config, holder)
    return Splits(
        train=rows.train[trained],
        validation=rows.train[held_out],
        test=rows.test,
        image_shape=rows.image_shape,
        classes=rows.classes,
        crc32=crc32,
        duplicates=_duplicates(rows),
    )


def _read(directory: Path, config: DataConfig) -> CheckedRows:
    """Return what a kind of data reads; a fault of a kind from outside is told with its place."""
    try:
        with blaming([config]):
            came = config.read(directory)
    except ConfigError as error:
        if isinstance(error.__cause__, DataError):  # said for people by the part itself
            raise error.__cause__ from None
        raise
    try:
        return checked(came)
    except DataError as error:
        if type(config).__module__.startswith("mlp_research."):
            raise
        raise DataError(f"{config.location}, read of data {config.kind}: {error}") from None


def _checksum(rows: CheckedRows) -> int:
    """Return the CRC-32 of all labels and groups, and of the features.

    Of many rows, as many as are soon read.
    """
    found = zlib.crc32(repr(rows.image_shape).encode())
    for each in (rows.train, rows.test):
        found = zlib.crc32(each.labels.tobytes(), found)
        every = 1 if len(each) <= _WHOLLY_SUMMED else len(each) // _SUMMED
        summed = np.arange(0, len(each), every)
        count = 1 + _PIECE // each.images.shape[1]
        for first in range(0, len(summed), count):
            images = rows_of(each.images, summed[first : first + count])
            found = zlib.crc32(images.tobytes(), found)
        if each.groups is not None:
            found = zlib.crc32(each.groups.tobytes(), found)
    return found


def _duplicates(rows: CheckedRows) -> int | None:
    """Return the test rows that are training rows too, but not where a whole file is to be read."""
    parts = (rows.train, rows.test)
    if any(is_mapped(each.images) and len(each) > _WHOLLY_SUMMED for each in parts):
        return None
    return count_duplicates(*parts)


def _split_rows(rows: int, config: DataConfig, holder: str) -> tuple[slice, slice]:
    """Return the rows that are trained on and those held out."""
    if config.validation >= rows:
        raise ConfigError(
            f"data.validation is {config.validation}, but the {holder} {rows} rows: use "
            f"at most {rows - 1}"
        )
    left = rows - config.validation
    if config.limit is not None and config.limit > left:
        raise ConfigError(
            f"data.limit is {config.limit}, but data.validation leaves {left} of {rows} training "
            f"rows: use at most {left}"
        )
    return slice(0, config.limit or left), slice(left, rows)
