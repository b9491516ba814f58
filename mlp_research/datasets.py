"""IDX files to uint8 arrays: checked, read-only, split in a fixed way.

IDX is the format of MNIST: a big-endian header (0x000008 and the number of dimensions, then each
dimension in 32 bits) and the bytes. A folder holds four files, gzipped (.gz) or raw; raw ones are
memory-mapped. Source of the format: the page of the MNIST database, yann.lecun.com/exdb/mnist.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import io
import math
import mmap
import os
import re
import struct
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Integer, UInt8
from pydantic import NonNegativeInt, PositiveInt

from mlp_research.frozen import ConfigError, Failure, Frozen
from mlp_research.shapes import Split

DEFAULT_DIRECTORY = Path(__file__).parent.parent / "data" / "mnist"
CHECKSUMS = "SHA256SUMS"
ENDINGS = (
    ("train-images-idx3-ubyte",),
    ("train-labels-idx1-ubyte",),
    ("t10k-images-idx3-ubyte", "test-images-idx3-ubyte"),
    ("t10k-labels-idx1-ubyte", "test-labels-idx1-ubyte"),
)
"""How the names of the four files end; .gz may follow. EMNIST puts words before, and says test."""

Bytes = UInt8[np.ndarray, "..."]
_PIECE = 2**20  # Bytes unpacked at a time: what a hostile header can cost.
_DEFLATE = 1032  # No deflated byte unfolds to more (Mark Adler, zlib's technical details).


_FILES: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
"""The open file of each mapping: it stays the same file, whatever is done to its name."""


class DataError(Failure, ValueError):
    """A data folder that cannot be used: which file, the numbers, and what to do."""


class DataConfig(Frozen, frozen=True):
    """Which rows of the training files are trained on."""

    validation: NonNegativeInt = 5000
    """Rows held out for validation: the last ones of the training files, never trained on."""
    limit: PositiveInt | None = None
    """Train only on the first N rows, to overfit a few examples; by default all that are left."""


@dataclasses.dataclass(frozen=True)
class Splits:
    """A data set: its three parts, the height and width of an image, and how many classes."""

    train: Split
    validation: Split
    """May have no rows."""
    test: Split
    image_shape: tuple[int, int]
    classes: int


def load(directory: Path, config: DataConfig) -> Splits:
    """The data set in a folder of four IDX files.

    A file is known by the end of its name (`ENDINGS`). Of a raw file and its gzipped twin the raw
    one is read. Where the folder holds SHA256SUMS, it must list all four files, by the checksum of
    the unpacked content. There are 1 + the largest label of the whole training file classes.

    Raises `DataError` for files that cannot be used, `ConfigError` for more rows than they hold.
    """
    files = _find(directory)
    checksums = _read_checksums(directory, files)
    images_path, labels_path, test_images_path, test_labels_path = files
    images, labels = _read_pair(images_path, labels_path, checksums)
    test_images, test_labels = _read_pair(test_images_path, test_labels_path, checksums)
    if images.shape[1:] != test_images.shape[1:]:
        raise DataError(
            f"{test_images_path} holds images of {_by(test_images.shape[1:])} pixels, but "
            f"{images_path.name} of {_by(images.shape[1:])}: use files of one data set"
        )
    classes = _count_classes(labels_path, labels)
    _check_labels(test_labels_path, test_labels, classes)
    flat = images.reshape(len(images), -1)
    trained, held_out = _split_rows(len(images), config)
    return Splits(
        train=Split(flat[trained], labels[trained]),
        validation=Split(flat[held_out], labels[held_out]),
        test=Split(test_images.reshape(len(test_images), -1), test_labels),
        image_shape=(images.shape[1], images.shape[2]),
        classes=classes,
    )


def read_idx(path: Path, dimensions: int, sha256: str | None = None) -> Bytes:
    """The read-only array of one IDX file of unsigned bytes; a raw file is memory-mapped.

    `sha256` is the checksum (hexadecimal, lower case) that the unpacked content must have. Memory
    grows with the bytes that are there, never with what a header promises. Raises `DataError`.
    """
    with _open(path) as file:
        if path.suffix == ".gz":
            return _unpack(path, file, dimensions, sha256)
        return _map(path, file, dimensions, sha256)


def rows_of(
    array: UInt8[np.ndarray, "examples pixels"], rows: Integer[np.ndarray, "*shape"]
) -> UInt8[np.ndarray, "*shape pixels"]:
    """Some rows of an array. Of a memory-mapped file they are read, not touched in place.

    Linux counts all that it maps around a touched byte, up to 2 MiB, as the process's memory: a few
    thousand rows would make it the whole file. Raises `DataError` where the file was cut meanwhile.
    """
    mapped = _mapping(array)
    if mapped is None or mapped not in _FILES or not hasattr(os, "pread"):
        return array[rows]  # in memory, or mapped by someone else
    file, width = _FILES[mapped], array.shape[1]
    first = array.ctypes.data - np.frombuffer(mapped, np.uint8).ctypes.data
    places = (first + width * rows.astype(np.int64)).ravel().tolist()
    content = b"".join([os.pread(file, width, place) for place in places])
    if len(content) != width * rows.size:
        raise DataError(
            "the file of images that is being read was cut after the run began: put it back, and "
            "go on by --resume"
        )
    return np.frombuffer(content, np.uint8).reshape(*rows.shape, width)


def let_go(array: Bytes) -> None:
    """Let the pages of a memory-mapped file that were read cease to count as this process's memory.

    They stay in the system's cache, as long as it has room for them.
    """
    mapped = _mapping(array)
    advice = getattr(mmap, "MADV_DONTNEED", None)  # not every system has it
    if mapped is not None and advice is not None:
        mapped.madvise(advice)


def is_mapped(array: Bytes) -> bool:
    """Whether an array's pages are read from a file as they are wanted."""
    return _mapping(array) is not None


def _mapping(array: Bytes) -> mmap.mmap | None:
    holder: Any = array
    while isinstance(holder, np.ndarray):
        holder = holder.base
    return holder if isinstance(holder, mmap.mmap) else None


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
    with _open(path) as file:
        lines = file.read(_PIECE).decode(errors="replace").splitlines()
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


@contextlib.contextmanager
def _open(path: Path) -> Iterator[io.BufferedReader]:
    """The file, for reading; what goes wrong while it is open becomes a `DataError`."""
    try:
        if not path.is_file():
            raise DataError(f"{path} is not a file: put the file itself there")
        with path.open("rb") as file:
            yield file
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path} is not a sound gzip file ({error}): pack it again") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except MemoryError:
        raise DataError(f"{path} does not fit in memory: unpack it, to be mapped") from None


def _unpack(path: Path, file: io.BufferedReader, dimensions: int, sha256: str | None) -> Bytes:
    with gzip.GzipFile(fileobj=file) as stream:
        header, shape, promised = _read_header(path, stream, dimensions)
        content, length = bytearray(header), len(header)
        possible = promised <= _DEFLATE * os.fstat(file.fileno()).st_size
        # The last read finds the end, where gzip compares its own checksum, or one byte too many.
        while piece := stream.read(min(_PIECE, promised + 1 - length)):
            length += len(piece)
            if possible:  # what lies is only measured
                content += piece
    if length != promised:
        held = "more" if length > promised else f"{length} bytes"
        raise _wrong_length(path, held, shape, promised)
    if sha256 is not None:
        _compare(path, hashlib.sha256(content).hexdigest(), sha256)
    array = np.frombuffer(content, np.uint8, offset=len(header)).reshape(shape)
    array.flags.writeable = False
    return array


def _map(path: Path, file: io.BufferedReader, dimensions: int, sha256: str | None) -> Bytes:
    header, shape, promised = _read_header(path, file, dimensions)
    held = file.seek(0, io.SEEK_END)
    if held != promised:
        raise _wrong_length(path, f"{held} bytes", shape, promised)
    if sha256 is not None:
        file.seek(0)
        _compare(path, hashlib.file_digest(file, "sha256").hexdigest(), sha256)
    array = np.memmap(file, np.uint8, "r", len(header), shape)
    mapped = _mapping(array)
    assert mapped is not None
    _FILES[mapped] = os.dup(file.fileno())
    weakref.finalize(mapped, os.close, _FILES[mapped])
    return array


def _read_header(
    path: Path, stream: io.BufferedReader | gzip.GzipFile, dimensions: int
) -> tuple[bytes, tuple[int, ...], int]:
    """The header's bytes, the shape it says, and how long the whole content must then be."""
    size = 4 + 4 * dimensions
    header = stream.read(size)
    if len(header) < size:
        raise DataError(
            f"{path} holds {len(header)} bytes, but an IDX header of {dimensions} dimensions alone "
            f"has {size}: fetch or write it again"
        )
    magic, *shape = struct.unpack(f">{1 + dimensions}I", header)
    if magic != 0x0800 + dimensions:
        raise DataError(
            f"{path} begins with 0x{magic:08x}, but an IDX file of bytes in {dimensions} dimensions"
            f" with 0x{0x0800 + dimensions:08x}: fetch it again, or name it .gz if it is packed"
        )
    if 0 in shape:
        raise DataError(f"{path} is empty: its header says {_by(shape)}. Use a file with examples")
    return header, tuple(shape), size + math.prod(shape)


def _wrong_length(path: Path, held: str, shape: tuple[int, ...], promised: int) -> DataError:
    return DataError(
        f"{path} holds {held}, but its header ({_by(shape)}) promises {promised} bytes: "
        "fetch or write it again"
    )


def _compare(path: Path, digest: str, expected: str) -> None:
    if digest != expected:
        raise DataError(
            f"{path} has the SHA-256 {digest} (of its unpacked content), but {expected} is "
            f"expected: fetch it again, or correct {CHECKSUMS}"
        )


def _by(shape: tuple[int, ...] | list[int]) -> str:
    return " x ".join(str(size) for size in shape)
