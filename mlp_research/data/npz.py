"""One .npz file to arrays, in memory that grows with the bytes that are there.

An .npz is a zip of .npy files; `numpy.load` makes room for what a header promises before it reads.
Here every size is compared first: header, list of members, and what a byte can unfold to.
"""

import contextlib
import errno
import io
import math
import struct
import warnings
import zipfile
import zlib
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mlp_research.data.base import DataError
from mlp_research.data.idx import DEFLATE, by

_PIECE = 2**18  # Bytes that are read or unpacked at a time, and of the longest list of members.
_LONGEST_HEADER = 2**14  # Bytes of an .npy in which its header must end; NumPy itself takes 10,000.
_METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # What np.savez and np.savez_compressed use.


class _Header(NamedTuple):
    """What the first bytes of an .npy say."""

    size: int
    shape: tuple[int, ...]
    dtype: np.dtype
    is_fortran: bool

    @property
    def promised(self) -> int:
        """How many bytes the whole member must then have."""
        return self.size + math.prod(self.shape) * self.dtype.itemsize


class _InPieces(io.BufferedReader):
    """A file of which nobody reads much at once: `zipfile` reads the list of members in one go."""

    def read(self, size: int | None = -1) -> bytes:
        if size is not None and size > _PIECE:
            raise zipfile.BadZipFile(f"its list of members has {size} bytes, over {_PIECE}")
        return super().read(size)


def read_npz(
    path: Path, wanted: Collection[str], optional: Collection[str]
) -> dict[str, np.ndarray]:
    """Return the arrays of these names in one .npz file; other arrays are not read.

    Raises `DataError` for a file that is not sound, lacks a name or holds Python objects.
    """
    with _opened(path) as archive:
        members = archive.infolist()
        names = [member.filename.removesuffix(".npy") for member in members]
        missing = [name for name in wanted if name not in names]
        if missing:
            shown = ", ".join(map(_legible, names[:12])) + (", ..." if len(names) > 12 else "")
            raise DataError(
                f"{path} lacks {', '.join(missing)}: it holds {shown or 'nothing'}. Write it by "
                "np.savez(file, x=..., y=..., x_test=..., y_test=...)"
            )
        chosen = {
            name: member
            for name, member in zip(names, members, strict=True)
            if name in wanted or name in optional
        }
        if len(chosen) < sum(name in chosen for name in names):
            raise DataError(f"{path} holds two arrays of one name: write it again")
        if sum(member.compress_size for member in chosen.values()) > path.stat().st_size:
            raise DataError(f"{path} is not sound: its arrays lie over one another. Write it again")
        return {name: _read(f"{name} in {path}", archive, chosen[name]) for name in chosen}


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[zipfile.ZipFile]:
    """The archive, for reading; what goes wrong while it is open becomes a `DataError`."""
    try:
        if not path.is_file():
            raise DataError(f"{path} is not a file: put the file itself there")
        with _InPieces(io.FileIO(path)) as file, zipfile.ZipFile(file) as archive:
            yield archive
    except DataError:
        raise
    except MemoryError:
        raise DataError(f"{path} does not fit in memory: use IDX files, which are mapped") from None
    except OSError as error:
        if error.errno == errno.EINVAL:  # a place before the file's beginning
            raise _unsound(path, "a place in it lies outside") from None
        raise DataError(f"{path} cannot be read: {error.strerror or error}") from None
    except (
        *(zipfile.BadZipFile, zlib.error, EOFError, struct.error),
        *(NotImplementedError, RuntimeError, ValueError, OverflowError),  # all of zipfile's
    ) as error:
        raise _unsound(path, error) from None


def _unsound(path: Path, reason: object) -> DataError:
    return DataError(f"{path} is not a sound .npz file ({_legible(reason)}): write it again")


def _read(name: str, archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> np.ndarray:
    if member.compress_type not in _METHODS or member.flag_bits & 1:
        raise DataError(
            f"{name} is packed as np.savez_compressed never does: write it again by NumPy"
        )
    with archive.open(member) as stream:
        content = bytearray(stream.read(_LONGEST_HEADER))
        header = _read_header(name, bytes(content))
        length = len(content)
        possible = header.promised <= DEFLATE * member.compress_size + _LONGEST_HEADER
        # The last read finds the end, where zip compares its checksum, or one byte too many.
        while piece := stream.read(min(_PIECE, max(header.promised + 1 - length, 0))):
            length += len(piece)
            if possible:  # what lies is only measured
                content += piece
    if length != header.promised:
        held = "more" if length > header.promised else f"{length} bytes"
        raise DataError(
            f"{name} holds {held}, but its header ({by(header.shape)}) promises {header.promised} "
            "bytes: write it again"
        )
    array = np.frombuffer(content, header.dtype, offset=header.size)
    return array.reshape(header.shape, order="F" if header.is_fortran else "C")


def _read_header(name: str, content: bytes) -> _Header:
    stream = io.BytesIO(content)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of headers that Python 2 wrote
            version = np.lib.format.read_magic(stream)
            if version == (1, 0):
                shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(stream)
            elif version == (2, 0):
                shape, is_fortran, dtype = np.lib.format.read_array_header_2_0(stream)
            else:
                raise ValueError(f"version {version}")
    except Exception as error:  # a header is an expression in Python: it may raise anything
        raise DataError(f"{name} is not a sound .npy ({_legible(error)}): write it again") from None
    if dtype.hasobject:
        raise DataError(
            f"{name} holds Python objects, which could run code when they are read: write numbers"
        )
    if dtype.kind not in "iufb" or dtype.itemsize > 8 or min(shape, default=0) < 0:
        raise DataError(f"{name} is {dtype.str} of {by(shape)}: write integers or floats")
    return _Header(stream.tell(), tuple(int(size) for size in shape), dtype, is_fortran)


def _legible(words: object) -> str:
    """Return a text that anyone may have written, on one line, short and without control codes."""
    return "".join(c if c.isprintable() else "?" for c in " ".join(str(words).split())[:100])
