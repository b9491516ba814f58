"""Arrays to a folder of IDX files that the kind `idx` reads: whole, or not there at all."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from mlp_research.data.arrays import rows_of_arrays
from mlp_research.data.base import DataError, Pair
from mlp_research.data.batches import Split
from mlp_research.data.checks import CheckedRows, checked, described, pieces
from mlp_research.data.idx import TYPES, by
from mlp_research.data.idx_folder import data_files

_LONGEST = 2**32  # A size of an IDX file has 32 bits.


def save_idx(
    directory: Path | str,
    *,
    train: Pair,
    test: Pair,
    groups: Pair | None = None,
) -> None:
    """Write the IDX files of a data set into a folder, which is made where there is none.

    `train` and `test` are (features, labels); `groups` those of the training and of the test rows.
    Pixels in uint8 are written as they are, floats as float32; labels as bytes where there are at
    most 256 classes. A call that is interrupted leaves no folder that can be read.

    Raises `DataError` before anything is written for arrays that `load` would refuse, and for a
    folder that holds such files already.
    """
    given = {"train": train, "test": test} | ({} if groups is None else {"groups": groups})
    for name, pair in given.items():
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            wanted = "(training, test)" if name == "groups" else "(features, labels)"
            raise DataError(f"{name} is {described(pair)}: give a pair {wanted}")
    rows = checked(rows_of_arrays((*train, *test) if groups is None else (*train, *test, *groups)))
    files = _files(rows)
    folder = Path(directory)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        there = data_files(folder)
        if there:
            raise DataError(
                f"{folder} holds data already ({', '.join(there)}): name another folder, or "
                "remove them"
            )
        _write(folder, files)
    except OSError as error:
        raise DataError(f"{folder} cannot be written: {error.strerror or error}") from None


def _files(rows: CheckedRows) -> dict[str, np.ndarray]:
    """Return the array of each file by its name, groups first: the others make a folder whole."""
    if len(rows.image_shape) > 8:
        raise DataError(
            f"x is of {by(rows.image_shape)} an example: an IDX file has at most 8 such dimensions"
        )
    features: dict[str, np.ndarray] = {}
    groups: dict[str, np.ndarray] = {}
    for part, split in (("train", rows.train), ("t10k", rows.test)):
        kind = "ubyte" if split.images.dtype == np.uint8 else "float"
        images = split.images.reshape(-1, *rows.image_shape)
        features[f"{part}-images-idx{images.ndim}-{kind}"] = images
        kind = "ubyte" if split.labels.dtype == np.uint8 else "int"
        features[f"{part}-labels-idx1-{kind}"] = split.labels
        if split.groups is not None:
            groups[f"{part}-groups-idx1-int"] = _in_32_bits(split, part)
    for name, array in features.items():
        if max(array.shape) >= _LONGEST:
            raise DataError(f"{name} would have {by(array.shape)}: a size has at most 32 bits")
    return groups | features


def _in_32_bits(split: Split, part: str) -> np.ndarray:
    assert split.groups is not None
    small = split.groups.astype(np.int32)
    wrong = small != split.groups
    if wrong.any():
        row = int(wrong.argmax())
        raise DataError(
            f"the groups of {part} hold {split.groups[row]} in row {row}: an IDX file holds 32 bits"
        )
    return small


def _write(folder: Path, files: dict[str, np.ndarray]) -> None:
    """Write all files under names that are not looked at, then rename them one by one."""
    made: list[Path] = []
    try:
        for name, array in files.items():
            made.append(folder / f".{name}.{os.getpid()}")
            with made[-1].open("wb") as file:
                for content in _contents(array, name.rpartition("-")[2]):
                    file.write(content)
                file.flush()
                os.fsync(file.fileno())
        for place, name in enumerate(files):
            made[place] = made[place].rename(folder / name)
    except BaseException:
        for path in made:
            with contextlib.suppress(OSError):
                path.unlink()
        raise


def _contents(array: np.ndarray, kind: str) -> Iterator[bytes]:
    """Stream the bytes of an IDX file: its header, then its numbers, big-endian."""
    number, dtype = TYPES[kind]
    magic = (number << 8) + array.ndim
    yield np.array([magic, *array.shape], ">u4").tobytes()
    for piece in pieces(len(array), array[0].size):
        yield array[piece].astype(dtype.newbyteorder(">")).tobytes()
