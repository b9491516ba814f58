"""One IDX file to a read-only array; rows of a file that is larger than memory.

IDX is the format of MNIST: a big-endian header (0x00, 0x00, the type, the number of dimensions,
then each dimension in 32 bits) and the values, big-endian too. A file is gzipped (.gz) or raw; a
raw one of bytes is memory-mapped. Source of the format: the page of the MNIST database,
yann.lecun.com/exdb/mnist.
"""

import contextlib
import gzip
import hashlib
import io
import math
import mmap
import os
import struct
import sys
import weakref
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int16, Int32, Integer, UInt8

from mlp_research.data.base import DataError

CHECKSUMS = "SHA256SUMS"
"""The file beside it that lists the SHA-256 of its unpacked content."""
TYPES: dict[str, tuple[int, np.dtype]] = {
    "ubyte": (0x08, np.dtype(np.uint8)),
    "short": (0x0B, np.dtype(np.int16)),
    "int": (0x0C, np.dtype(np.int32)),
    "float": (0x0D, np.dtype(np.float32)),
}
"""The types of IDX that are read, by the words at the end of a file's name: their number, ours."""

DEFLATE = 1032
"""No deflated byte unfolds to more (Mark Adler, zlib's technical details)."""

Values = (
    UInt8[np.ndarray, "..."]
    | Int16[np.ndarray, "..."]
    | Int32[np.ndarray, "..."]
    | Float32[np.ndarray, "..."]
)
FeatureRows = UInt8[np.ndarray, "examples pixels"] | Float32[np.ndarray, "examples pixels"]
_PIECE = 2**20  # Bytes unpacked at a time: what a hostile header can cost.
_FILES: weakref.WeakKeyDictionary[mmap.mmap, int] = weakref.WeakKeyDictionary()
"""The open file of each mapping: it stays the same file, whatever is done to its name."""


class _Header(NamedTuple):
    """What the first bytes of a file say."""

    content: bytes
    shape: tuple[int, ...]
    dtype: np.dtype
    promised: int
    """How many bytes the whole content must then have."""


def read_idx(path: Path, dimensions: int, sha256: str | None = None, kind: str = "ubyte") -> Values:
    """Return the read-only array of one IDX file; a raw file of bytes is memory-mapped.

    `kind` is one of `TYPES`. `sha256` is the checksum (hexadecimal, lower case) that the unpacked
    content must have. Memory grows with the bytes that are there, never with what a header
    promises. Raises `DataError`.
    """
    with opened(path) as file:
        if path.suffix == ".gz":
            return _unpack(path, file, dimensions, sha256, kind)
        return _map(path, file, dimensions, sha256, kind)


def rows_of(
    array: FeatureRows, rows: Integer[np.ndarray, "*shape"]
) -> UInt8[np.ndarray, "*shape pixels"] | Float32[np.ndarray, "*shape pixels"]:
    """Return some rows of an array. Of a memory-mapped file they are read, not touched in place.

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


def let_go(array: np.ndarray) -> None:
    """Let the pages of a memory-mapped file that were read cease to count as this process's memory.

    They stay in the system's cache, as long as it has room for them.
    """
    mapped = _mapping(array)
    advice = getattr(mmap, "MADV_DONTNEED", None)  # not every system has it
    if mapped is not None and advice is not None:
        mapped.madvise(advice)


def is_mapped(array: np.ndarray) -> bool:
    """Return whether an array's pages are read from a file as they are wanted."""
    return _mapping(array) is not None


def _mapping(array: np.ndarray) -> mmap.mmap | None:
    holder: Any = array
    while isinstance(holder, np.ndarray):
        holder = holder.base
    return holder if isinstance(holder, mmap.mmap) else None


@contextlib.contextmanager
def opened(path: Path) -> Iterator[io.BufferedReader]:
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


def _unpack(
    path: Path, file: io.BufferedReader, dimensions: int, sha256: str | None, kind: str
) -> Values:
    with gzip.GzipFile(fileobj=file) as stream:
        header = _read_header(path, stream, dimensions, kind)
        content, length = bytearray(header.content), len(header.content)
        possible = header.promised <= DEFLATE * os.fstat(file.fileno()).st_size
        # The last read finds the end, where gzip compares its own checksum, or one byte too many.
        while piece := stream.read(min(_PIECE, header.promised + 1 - length)):
            length += len(piece)
            if possible:  # what lies is only measured
                content += piece
    if length != header.promised:
        raise _wrong_length(path, "more" if length > header.promised else f"{length} bytes", header)
    return _in_memory(path, header, content, sha256)


def _map(
    path: Path, file: io.BufferedReader, dimensions: int, sha256: str | None, kind: str
) -> Values:
    header = _read_header(path, file, dimensions, kind)
    held = file.seek(0, io.SEEK_END)
    if held != header.promised:
        raise _wrong_length(path, f"{held} bytes", header)
    file.seek(0)
    if header.dtype.itemsize > 1:  # in another order than this machine's: it cannot be mapped
        content = bytearray(held)
        if file.readinto(content) != held:
            raise DataError(f"{path} was cut while it was read: put it back")
        return _in_memory(path, header, content, sha256)
    if sha256 is not None:
        _compare(path, hashlib.file_digest(file, "sha256").hexdigest(), sha256)
    array = np.memmap(file, np.uint8, "r", len(header.content), header.shape)
    mapped = _mapping(array)
    assert mapped is not None
    _FILES[mapped] = os.dup(file.fileno())
    weakref.finalize(mapped, os.close, _FILES[mapped])
    return array


def _in_memory(path: Path, header: _Header, content: bytearray, sha256: str | None) -> Values:
    """Return the array of a whole content, whose bytes are turned around in place."""
    if sha256 is not None:
        _compare(path, hashlib.sha256(content).hexdigest(), sha256)
    array = np.frombuffer(content, header.dtype, offset=len(header.content))
    if sys.byteorder == "little" and header.dtype.itemsize > 1:
        array.byteswap(inplace=True)
    array = array.reshape(header.shape)
    array.flags.writeable = False
    return array


def _read_header(
    path: Path, stream: io.BufferedReader | gzip.GzipFile, dimensions: int, kind: str
) -> _Header:
    size = 4 + 4 * dimensions
    content = stream.read(size)
    if len(content) < size:
        raise DataError(
            f"{path} holds {len(content)} bytes, but an IDX header of {dimensions} dimensions alone"
            f" has {size}: fetch or write it again"
        )
    number, dtype = TYPES[kind]
    magic, *shape = struct.unpack(f">{1 + dimensions}I", content)
    wanted = (number << 8) + dimensions
    if magic != wanted:
        raise DataError(
            f"{path} begins with 0x{magic:08x}, but an IDX file of {kind} in {dimensions} "
            f"dimensions with 0x{wanted:08x}: fetch it again, or name it .gz if it is packed"
        )
    if 0 in shape:
        raise DataError(f"{path} is empty: its header says {by(shape)}. Use a file with examples")
    return _Header(content, tuple(shape), dtype, size + math.prod(shape) * dtype.itemsize)


def _wrong_length(path: Path, held: str, header: _Header) -> DataError:
    return DataError(
        f"{path} holds {held}, but its header ({by(header.shape)}) promises {header.promised} "
        "bytes: fetch or write it again"
    )


def _compare(path: Path, digest: str, expected: str) -> None:
    if digest != expected:
        raise DataError(
            f"{path} has the SHA-256 {digest} (of its unpacked content), but {expected} is "
            f"expected: fetch it again, or correct {CHECKSUMS}"
        )


def by(shape: tuple[int, ...] | list[int]) -> str:
    """Sizes in words: 28 x 28."""
    return " x ".join(str(size) for size in shape)
