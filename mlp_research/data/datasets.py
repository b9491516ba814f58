"""A folder of four IDX files to a data set: checked, split in a fixed way."""

import dataclasses
import os
import re
import zlib
from pathlib import Path
from typing import Annotated

import numpy as np
from jaxtyping import UInt8
from pydantic import Field, NonNegativeInt, PositiveInt

from mlp_research.base_config import BaseConfig
from mlp_research.data.batches import Split
from mlp_research.data.idx import CHECKSUMS, DataError, by, opened, read_idx, rows_of
from mlp_research.errors import ConfigError

DEFAULT_DIRECTORY = Path(__file__).parent.parent.parent / "data" / "mnist"
ENDINGS = (
    ("train-images-idx3-ubyte",),
    ("train-labels-idx1-ubyte",),
    ("t10k-images-idx3-ubyte", "test-images-idx3-ubyte"),
    ("t10k-labels-idx1-ubyte", "test-labels-idx1-ubyte"),
)
"""How the names of the four files end; .gz may follow. EMNIST puts words before, and says test."""
_LONGEST_LIST = 2**20  # Bytes of SHA256SUMS that are read.
_PIECE = 2**18  # Bytes of images that are summed at once.
_WHOLLY_SUMMED = 2**16  # Images of a file up to which each is in the checksum; of more, _SUMMED.
_SUMMED = 2**13


class DataConfig(BaseConfig, frozen=True):
    """Which rows of the training files are trained on."""

    validation: NonNegativeInt = 5000
    """Rows held out for validation: the last ones of the training files, never trained on."""
    limit: PositiveInt | None = None
    """Train only on the first N rows, to overfit a few examples; by default all that are left."""
    crc32: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Checksum that the files must have; by default that of what the run finds first and keeps."""


@dataclasses.dataclass(frozen=True)
class Splits:
    """A data set: its three parts, the height and width of an image, and how many classes."""

    train: Split
    validation: Split
    """May have no rows."""
    test: Split
    image_shape: tuple[int, int]
    classes: int
    crc32: int
    """Of labels and images, whatever part of them is used: it tells data sets apart."""


def load(directory: Path, config: DataConfig) -> Splits:
    """The data set in a folder of four IDX files.

    A file is known by the end of its name (`ENDINGS`). Of a raw file and its gzipped twin the raw
    one is read. Where the folder holds SHA256SUMS, it must list all four files, by the checksum of
    the unpacked content. There are 1 + the largest label of the whole training file classes.

    Raises `DataError` for files that cannot be used or are not those of `config.crc32`,
    `ConfigError` for more rows than they hold.
    """
    files = _find(directory)
    checksums = _read_checksums(directory, files)
    images_path, labels_path, test_images_path, test_labels_path = files
    images, labels = _read_pair(images_path, labels_path, checksums)
    test_images, test_labels = _read_pair(test_images_path, test_labels_path, checksums)
    if images.shape[1:] != test_images.shape[1:]:
        raise DataError(
            f"{test_images_path} holds images of {by(test_images.shape[1:])} pixels, but "
            f"{images_path.name} of {by(images.shape[1:])}: use files of one data set"
        )
    classes = _count_classes(labels_path, labels)
    _check_labels(test_labels_path, test_labels, classes)
    flat, test_flat = (each.reshape(len(each), -1) for each in (images, test_images))
    image_shape = (images.shape[1], images.shape[2])
    crc32 = _checksum(image_shape, Split(flat, labels), Split(test_flat, test_labels))
    if config.crc32 not in (None, crc32):
        raise DataError(
            f"{directory} does not hold the data that the run was begun with: data.crc32 is "
            f"{config.crc32}, that of these files {crc32}. Name the right folder by --data.dir"
        )
    trained, held_out = _split_rows(len(images), config)
    return Splits(
        train=Split(flat[trained], labels[trained]),
        validation=Split(flat[held_out], labels[held_out]),
        test=Split(test_flat, test_labels),
        image_shape=image_shape,
        classes=classes,
        crc32=crc32,
    )


def _find(directory: Path) -> list[Path]:
    """The four files, in the order of `ENDINGS`; hidden files are not looked at."""
    names = _visible_names(directory)
    stems = {name.removesuffix(".gz") for name in names}
    found, missing = [], []
    for endings in ENDINGS:
        match sorted(stem for stem in stems if stem.endswith(endings)):
            case []:
                missing.append(" or ".join(endings))
            case [stem]:
                found.append(directory / (stem if stem in names else f"{stem}.gz"))
            case several:
                raise DataError(
                    f"{directory} holds {len(several)} files for {endings[0]}: "
                    f"{', '.join(several)}. Give each data set a folder of its own"
                )
    if missing:
        shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise DataError(
            f"{directory} lacks {', '.join(missing)} (with or without .gz). "
            f"It holds {shown or 'nothing'}: add the files or name another folder"
        )
    return found


def _visible_names(directory: Path) -> list[str]:
    try:
        return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    except (OSError, ValueError) as error:  # ValueError: a name that no system takes
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"the data folder {directory} cannot be read ({reason}): name a folder of files"
        ) from None


def _read_checksums(directory: Path, files: list[Path]) -> dict[Path, str | None]:
    """The checksum that each file must have, None where the folder has no list of them."""
    path = directory / CHECKSUMS
    if not os.path.lexists(path):
        return dict.fromkeys(files)
    with opened(path) as file:
        lines = file.read(_LONGEST_LIST).decode(errors="replace").splitlines()
    listed: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        # sha256sum puts a star before the name of a file that it read as binary.
        entry = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line)
        if entry is None:
            raise DataError(
                f"{path} line {number} is {line[:100]!r}: it must be the 64 hexadecimal digits of "
                "a SHA-256, two spaces and a file name without .gz"
            )
        digest, name = entry[1].lower(), entry[2]
        if listed.setdefault(name, digest) != digest:
            raise DataError(f"{path} line {number} gives {name} a second checksum: keep one")
    for name in (file.name.removesuffix(".gz") for file in files):
        if name not in listed:
            raise DataError(
                f"{path} does not list {name}: add the SHA-256 of its unpacked content under this "
                f"name, or remove {CHECKSUMS}"
            )
    return {file: listed[file.name.removesuffix(".gz")] for file in files}


def _read_pair(
    images_path: Path, labels_path: Path, checksums: dict[Path, str | None]
) -> tuple[UInt8[np.ndarray, "examples height width"], UInt8[np.ndarray, " examples"]]:
    images = read_idx(images_path, 3, checksums[images_path])
    labels = read_idx(labels_path, 1, checksums[labels_path])
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} holds {len(images)} images, but {labels_path.name} holds "
            f"{len(labels)} labels: use files that belong together"
        )
    return images, labels


def _count_classes(path: Path, labels: UInt8[np.ndarray, " examples"]) -> int:
    classes = 1 + int(labels.max())
    if classes < 2:
        raise DataError(f"{path} holds only the label 0: a classifier needs at least 2 classes")
    return classes


def _check_labels(path: Path, labels: UInt8[np.ndarray, " examples"], classes: int) -> None:
    row = int(labels.argmax())
    if labels[row] >= classes:
        raise DataError(
            f"{path} row {row} has the label {labels[row]}, but the training labels end at "
            f"{classes - 1} ({classes} classes): use files that belong together"
        )


def _checksum(image_shape: tuple[int, int], *files: Split) -> int:
    """The CRC-32 of all labels and of the images: of a large file's, as many as are soon read."""
    found = zlib.crc32(repr(image_shape).encode())
    for each in files:
        found = zlib.crc32(each.labels.tobytes(), found)
        every = 1 if len(each) <= _WHOLLY_SUMMED else len(each) // _SUMMED
        rows = np.arange(0, len(each), every)
        count = 1 + _PIECE // each.images.shape[1]
        for first in range(0, len(rows), count):
            images = rows_of(each.images, rows[first : first + count])
            found = zlib.crc32(images.tobytes(), found)
    return found


def _split_rows(rows: int, config: DataConfig) -> tuple[slice, slice]:
    """The rows that are trained on and those held out."""
    if config.validation >= rows:
        raise ConfigError(
            f"data.validation is {config.validation}, but the training files hold {rows} rows: "
            f"use at most {rows - 1}"
        )
    left = rows - config.validation
    if config.limit is not None and config.limit > left:
        raise ConfigError(
            f"data.limit is {config.limit}, but data.validation leaves {left} of {rows} training "
            f"rows: use at most {left}"
        )
    return slice(0, config.limit or left), slice(left, rows)
