"""Hostile data folders: refused in words, or read exactly; in bounded time and memory."""

import contextlib
import gzip
import io
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlp_research.data import IdxConfig
from mlp_research.data.datasets import Splits, load
from mlp_research.data.idx import DataError, read_idx
from mlp_research.errors import ConfigError

TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS = NAMES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CONFIG = IdxConfig(validation=2)
SECONDS = 5.0
"""What one small file may take at most: a hang is more."""
SPARE_BYTES = 5 * 2**20
"""Memory beside a multiple of the file: one unpacked piece, and what Python itself needs."""
Edit = tuple[str, int, int]
Contents = dict[str, bytes]


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape) + array.tobytes()


def sound_contents() -> Contents:
    """Three classes of 3 x 4 images, 8 to train on and 5 to test on."""
    pixels = np.random.default_rng(0).integers(0, 256, (13, 3, 4), np.uint8)
    labels = (np.arange(13) % 3).astype(np.uint8)
    arrays = (pixels[:8], labels[:8], pixels[8:], labels[8:])
    return {name: idx(array) for name, array in zip(NAMES, arrays, strict=True)}


FIELDS = (0, 1, 2, 5, 8, 9, 255, 256, 0x0801, 0x0803, 0x1F8B0800, 2**31 - 1, 2**31, 2**32 - 1)
"""What may be written over a header's field of 32 bits."""
KINDS = ("flip", "flip", "byte", "insert", "delete", "cut", "field", "twice", "zeros", "member")
EDITS = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 400), st.integers(0, 255)), max_size=3
)


def edited(content: bytes, edits: list[Edit]) -> bytes:
    """A file's bytes after some edits; every edit is legal at every length."""
    for kind, position, value in edits:
        at = position % (len(content) + 1)
        start, end = content[:at], content[at:]
        match kind:
            case "flip":
                content = start + bytes([end[0] ^ (1 << value % 8)]) + end[1:] if end else content
            case "byte":
                content = start + bytes([value]) + end[1:]
            case "insert":
                content = start + bytes([value]) * (1 + value % 9) + end
            case "delete":
                content = start + end[1 + value % 9 :]
            case "cut":
                content = start
            case "field":
                field = struct.pack(">I", FIELDS[value % len(FIELDS)])
                at = 4 * (position % 4)
                content = content[:at] + field + content[at + 4 :]
            case "twice":
                content = content + content
            case "zeros":
                content = content + bytes(2 ** (value % 22))
            case _:
                content = content + gzip.compress(bytes(value), mtime=0)
    return content


def parsed(content: bytes, dimensions: int) -> np.ndarray | None:
    """What an IDX file holds, read in the plainest way; None where it is not sound."""
    fields = struct.unpack_from(f">{1 + dimensions}I", content.ljust(16, b"\0"))
    shape, size = fields[1:], 4 + 4 * dimensions
    promised = size + int(np.prod([int(length) for length in shape], dtype=object))
    if fields[0] != 0x0800 + dimensions or 0 in shape or len(content) != promised:
        return None
    return np.frombuffer(content, np.uint8, offset=size).reshape(shape)


def unpacked(content: bytes, packed: bool) -> bytes:
    """The content of a file by the standard library alone; nothing where it is not sound."""
    try:
        return gzip.decompress(content) if packed else content
    except Exception:
        return b""


def unfolded(content: bytes) -> int:
    """How many bytes come out of a gzip file, sound or not, before it ends or fails."""
    length = 0
    with contextlib.suppress(EOFError, OSError, zlib.error), gzip.open(io.BytesIO(content)) as file:
        while piece := file.read(2**16):
            length += len(piece)
    return length


def right(contents: Contents, packed: bool) -> list[np.ndarray] | None:
    """The four arrays that a folder's files hold; None where they must be refused."""
    found = [parsed(unpacked(contents[name], packed), 3 if "images" in name else 1)
             for name in NAMES]  # fmt: skip
    arrays = [array for array in found if array is not None]
    if len(arrays) < len(NAMES):
        return None
    images, labels, test_images, test_labels = arrays
    fits = (
        images.shape[1:] == test_images.shape[1:]
        and len(images) == len(labels) > CONFIG.validation
        and len(test_images) == len(test_labels)
        and 1 <= labels.max() >= test_labels.max()
    )
    return arrays if fits else None


def assert_exact(splits: Splits, arrays: list[np.ndarray]) -> None:
    """The splits hold the four arrays' rows, each in its place."""
    left = len(arrays[0]) - CONFIG.validation
    for array, parts in zip(
        arrays,
        (
            (splits.train.images, splits.validation.images),
            (splits.train.labels, splits.validation.labels),
            (splits.test.images,),
            (splits.test.labels,),
        ),
        strict=True,
    ):
        assert len(parts[0]) == (left if len(parts) == 2 else len(array))
        assert b"".join(part.tobytes() for part in parts) == array.tobytes()
    assert splits.classes == 1 + int(arrays[1].max())


def bounded(size: int, read: Callable[[], Splits]) -> Splits | None:
    """What reading `size` bytes gave, or None where they were refused, in the bounds.

    Other threads of the process and other processes only add: the best of three readings counts.
    """
    memory, seconds = 0, 0.0
    for _ in range(3):
        result, memory, seconds = measured(read)
        if memory < SPARE_BYTES + 4 * size and seconds < SECONDS:
            return result
    raise AssertionError(f"{memory} bytes of memory and {seconds} s for {size} in files")


def measured(read: Callable[[], Splits]) -> tuple[Splits | None, int, float]:
    """(what was read or None, the most memory in bytes, seconds)."""
    began = time.perf_counter()
    tracemalloc.start()
    try:
        result = read()
    except (DataError, ConfigError) as error:
        assert str(error) and "\n" not in str(error)
        result = None
    finally:
        memory = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return result, memory, time.perf_counter() - began


@pytest.mark.parametrize("cases", [400, pytest.param(50_000, marks=pytest.mark.long)])
def test_mutated_files_are_refused_in_words_or_read_exactly(
    cases: int, tmp_path: Path, tally: Callable[[str, int, int, str], None]
):
    seen = {"refused": 0, "read": 0}

    @settings(
        max_examples=cases,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(st.sampled_from(NAMES), st.booleans(), EDITS, EDITS)
    def mutate(name: str, packed: bool, inner: list[Edit], outer: list[Edit]) -> None:
        contents = sound_contents()
        contents[name] = edited(contents[name], inner)
        size = sum(map(len, contents.values()))  # what they unfold to
        if packed:
            contents = {n: gzip.compress(c, 1, mtime=0) for n, c in contents.items()}
        contents[name] = edited(contents[name], outer)
        folder = tmp_path / f"{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        for each, content in contents.items():
            (folder / (f"{each}.gz" if packed else each)).write_bytes(content)
        size = max(size, sum(map(len, contents.values())))
        if packed:
            size = max(size, unfolded(contents[name]))
        splits, arrays = bounded(size, lambda: load(folder, CONFIG)), right(contents, packed)
        assert (splits is None) == (arrays is None), "refused though sound, or read though not"
        if splits is not None and arrays is not None:
            assert_exact(splits, arrays)
        seen["refused" if splits is None else "read"] += 1
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()

    mutate()
    tried = sum(seen.values())
    assert tried >= cases and min(seen.values()) > cases // 50
    tally(
        "IDX or gzip bytes mutated",
        tried,
        tried,
        f"{seen['refused']:,} refused in a sentence with the file's name, {seen['read']:,} still "
        "sound and read exactly",
    )


def header(*shape: int) -> bytes:
    return struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)


MIB = 2**20
BOMBS = {
    "promises billions": lambda: gzip.compress(header(2**32 - 1, 28, 28) + bytes(1000)),
    "promises all": lambda: gzip.compress(header(*(2**32 - 1,) * 3)),
    "unfolds to more": lambda: gzip.compress(header(8, 3, 4) + bytes(64 * MIB)),
    "unfolds and lies": lambda: gzip.compress(header(2**31, 2**10, 2**10) + bytes(16 * MIB)),
    "many members": lambda: gzip.compress(b"") * 20_000,
    "many full members": lambda: gzip.compress(header(8, 3, 4)) + gzip.compress(bytes(MIB)) * 40,
    "a name without end": lambda: b"\x1f\x8b\x08\x08" + bytes(6) + b"x" * MIB,
    "a field without end": lambda: b"\x1f\x8b\x08\x04" + bytes(6) + b"\xff\xff" + bytes(70_000),
    "gzip within gzip": lambda: gzip.compress(gzip.compress(header(8, 3, 4) + bytes(MIB))),
}


@pytest.mark.parametrize(
    "thorough", [pytest.param(False, id="short"), pytest.param(True, marks=pytest.mark.long)]
)
def test_bombs_are_refused_in_the_memory_that_a_sound_file_takes(
    thorough: bool, tmp_path: Path, tally: Callable[[str, int, int, str], None]
):
    targets = NAMES if thorough else (TRAIN_IMAGES,)
    for target in targets:
        for number, make in enumerate(BOMBS.values()):
            folder = tmp_path / f"{target}-{number}"
            folder.mkdir()
            for name, content in sound_contents().items():
                (folder / f"{name}.gz").write_bytes(gzip.compress(content))
            bomb = make()
            (folder / f"{target}.gz").write_bytes(bomb)
            assert bounded(min(len(bomb), MIB), lambda path=folder: load(path, CONFIG)) is None
    tried = len(targets) * len(BOMBS)
    tally("gzip bombs", tried, tried, "refused; at most 5 MiB of memory beside the file's size")


def test_a_header_that_promises_more_than_the_packed_file_can_hold_is_refused_unread(
    tmp_path: Path,
):
    path = tmp_path / f"{TRAIN_IMAGES}.gz"
    path.write_bytes(gzip.compress(header(2**20, 2**10, 2**10) + bytes(32 * MIB)))
    began = bounded(path.stat().st_size, lambda: read_idx(path, 3))  # pyright: ignore
    assert began is None
