"""A data folder is read exactly, or refused in one sentence; nothing else can come of it."""

import contextlib
import gzip
import hashlib
import re
import struct
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlp_research.data import DataConfig, IdxConfig, datasets
from mlp_research.data.datasets import DEFAULT_DIRECTORY, Splits, load
from mlp_research.data.idx import DataError, read_idx
from mlp_research.errors import ConfigError

TRAIN_IMAGES = "train-images-idx3-ubyte"
TRAIN_LABELS = "train-labels-idx1-ubyte"
TEST_IMAGES = "t10k-images-idx3-ubyte"
TEST_LABELS = "t10k-labels-idx1-ubyte"
NAMES = (TRAIN_IMAGES, TRAIN_LABELS, TEST_IMAGES, TEST_LABELS)
SUMS = "SHA256SUMS"
PUBLISHED = {
    TRAIN_IMAGES: "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    TRAIN_LABELS: "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    TEST_IMAGES: "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    TEST_LABELS: "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
README = DEFAULT_DIRECTORY.parent / "README.md"
SMALL = IdxConfig(validation=2)
Contents = dict[str, bytes]


def idx(array: np.ndarray) -> bytes:
    return header(*array.shape) + array.tobytes()


def header(*shape: int) -> bytes:
    return struct.pack(f">{1 + len(shape)}I", 0x0800 + len(shape), *shape)


def small_contents() -> Contents:
    """Two classes of 5 x 7 images, 6 to train on and 4 to test on."""
    pixels = np.random.default_rng(0).integers(0, 256, (10, 5, 7), np.uint8)
    labels = np.arange(10, dtype=np.uint8) % 2
    arrays = (pixels[:6], labels[:6], pixels[6:], labels[6:])
    return {name: idx(array) for name, array in zip(NAMES, arrays, strict=True)}


def write(directory: Path, contents: Contents, packed: bool) -> Path:
    directory.mkdir(exist_ok=True)
    for name, content in contents.items():
        if packed:
            (directory / f"{name}.gz").write_bytes(gzip.compress(content, mtime=0))
        else:
            (directory / name).write_bytes(content)
    return directory


def checksum_lines(contents: Contents) -> str:
    return "".join(f"{hashlib.sha256(b).hexdigest()}  {name}\n" for name, b in contents.items())


def arrays_of(splits: Splits) -> list[np.ndarray]:
    parts = (splits.train, splits.validation, splits.test)
    return [array for part in parts for array in (part.images, part.labels)]


def assert_same(left: Splits, right: Splits) -> None:
    for one, other in zip(arrays_of(left), arrays_of(right), strict=True):
        np.testing.assert_array_equal(one, other)
    assert (left.image_shape, left.classes) == (right.image_shape, right.classes)


@contextlib.contextmanager
def memory_below(limit: int) -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < limit, f"{peak} bytes were taken"


def refusal(directory: Path, config: DataConfig = SMALL) -> str:
    with pytest.raises((DataError, ConfigError)) as caught:
        load(directory, config)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.fixture(scope="module")
def mnist() -> Splits:
    return load(DEFAULT_DIRECTORY, IdxConfig())


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return write(tmp_path / "small", small_contents(), packed=True)


def test_mnist_has_its_counts_shapes_classes_and_first_labels(mnist: Splits):
    assert mnist.train.images.shape == (55000, 784)
    assert mnist.validation.images.shape == (5000, 784)
    assert mnist.test.images.shape == (10000, 784)
    assert [len(mnist.train), len(mnist.validation), len(mnist.test)] == [55000, 5000, 10000]
    assert (mnist.image_shape, mnist.classes) == ((28, 28), 10)
    assert mnist.train.labels[:5].tolist() == [5, 0, 4, 1, 9]
    assert all(array.dtype == np.uint8 for array in arrays_of(mnist))


def test_mnist_is_listed_and_described_with_the_published_checksums():
    lines = (DEFAULT_DIRECTORY / SUMS).read_text().splitlines()
    assert {line[66:]: line[:64] for line in lines} == PUBLISHED
    table = re.findall(r"^\| (\S+) \| \d+ \| ([0-9a-f]{64}) \|$", README.read_text(), re.MULTILINE)
    assert dict(table) == PUBLISHED


def test_validation_rows_are_the_last_training_rows_and_no_others(mnist: Splits):
    everything = load(DEFAULT_DIRECTORY, IdxConfig(validation=0))
    assert everything.validation.images.shape == (0, 784)
    for whole, trained, held_out in (
        (everything.train.images, mnist.train.images, mnist.validation.images),
        (everything.train.labels, mnist.train.labels, mnist.validation.labels),
    ):
        assert len(whole) == 60000
        np.testing.assert_array_equal(trained, whole[:55000])
        np.testing.assert_array_equal(held_out, whole[55000:])
        assert not np.shares_memory(trained, held_out)


def test_two_classes_of_5_by_7_images_are_read_as_they_were_written(small: Path):
    splits, contents = load(small, SMALL), small_contents()
    assert (splits.image_shape, splits.classes) == ((5, 7), 2)
    assert splits.train.images.tobytes() == contents[TRAIN_IMAGES][16 : 16 + 4 * 35]
    assert splits.validation.images.tobytes() == contents[TRAIN_IMAGES][16 + 4 * 35 :]
    assert splits.train.labels.tobytes() == contents[TRAIN_LABELS][8:12]
    assert splits.validation.labels.tobytes() == contents[TRAIN_LABELS][12:]
    assert splits.test.images.tobytes() == contents[TEST_IMAGES][16:]
    assert splits.test.labels.tobytes() == contents[TEST_LABELS][8:]


def test_the_checksum_is_that_of_the_content_and_of_all_of_it(tmp_path: Path):
    """Packed or raw, whatever rows are used; any label, pixel or size that differs changes it."""
    contents = small_contents()
    found = load(write(tmp_path / "packed", contents, packed=True), SMALL).crc32
    limited = IdxConfig(validation=0, limit=1, crc32=found)
    assert load(write(tmp_path / "raw", contents, packed=False), limited).crc32 == found
    changed = [found]
    for name, size in zip(NAMES, (16, 8, 16, 8), strict=True):
        for place in (size, len(contents[name]) - 1):
            content = bytearray(contents[name])
            content[place] ^= 1
            folder = write(
                tmp_path / f"{name}-{place}", contents | {name: bytes(content)}, packed=False
            )
            changed.append(load(folder, SMALL).crc32)
    turned = {
        name: header(len(contents[name][16:]) // 35, 7, 5) + contents[name][16:]
        for name in (TRAIN_IMAGES, TEST_IMAGES)
    }
    changed.append(load(write(tmp_path / "turned", contents | turned, False), SMALL).crc32)
    assert len(set(changed)) == len(changed) == 10
    assert "data.crc32 is 7, that of these files" in refusal(
        tmp_path / "raw", IdxConfig(validation=2, crc32=7)
    )


def test_of_a_large_file_some_images_and_all_labels_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(datasets, "_WHOLLY_SUMMED", 5)
    monkeypatch.setattr(datasets, "_SUMMED", 2)  # of 6 images those at 0 and 3
    contents = small_contents()
    found = load(write(tmp_path / "as it was", contents, packed=False), SMALL).crc32
    same = {}
    for name, size, width in ((TRAIN_IMAGES, 16, 35), (TRAIN_LABELS, 8, 1)):
        for row in range(6):
            content = bytearray(contents[name])
            content[size + width * row] ^= 1
            folder = write(
                tmp_path / f"{name}-{row}", contents | {name: bytes(content)}, packed=False
            )
            same[name, row] = load(folder, SMALL).crc32 == found
    assert [key for key, unchanged in same.items() if unchanged] == [
        (TRAIN_IMAGES, row) for row in (1, 2, 4, 5)
    ]


def test_limit_keeps_the_first_rows_and_changes_neither_validation_nor_classes(tmp_path: Path):
    contents = small_contents() | {TRAIN_LABELS: idx(np.array([0, 1, 0, 1, 0, 9], np.uint8))}
    write(tmp_path, contents, packed=True)
    whole, limited = load(tmp_path, SMALL), load(tmp_path, IdxConfig(validation=2, limit=3))
    np.testing.assert_array_equal(limited.train.images, whole.train.images[:3])
    np.testing.assert_array_equal(limited.train.labels, [0, 1, 0])
    np.testing.assert_array_equal(limited.validation.labels, [0, 9])
    assert limited.classes == whole.classes == 10


def test_raw_and_gzipped_files_give_equal_read_only_contiguous_arrays(small: Path, tmp_path: Path):
    raw = write(tmp_path / "raw", small_contents(), packed=False)
    assert_same(load(small, SMALL), load(raw, SMALL))
    for array in arrays_of(load(small, SMALL)) + arrays_of(load(raw, SMALL)):
        assert array.flags.c_contiguous
        with pytest.raises(ValueError, match="read-only"):
            array[:1] = 0


def test_raw_files_are_memory_mapped_and_take_no_memory_even_to_check(tmp_path: Path):
    images = np.arange(2**23, dtype=np.uint8).reshape(8192, 32, 32)
    labels = np.arange(8192, dtype=np.uint8)
    arrays = (images, labels, images[:9], labels[:9])
    contents = {name: idx(array) for name, array in zip(NAMES, arrays, strict=True)}
    write(tmp_path, contents, packed=False)
    (tmp_path / SUMS).write_text(checksum_lines(contents))
    with memory_below(2**21):
        splits = load(tmp_path, IdxConfig())
    assert all(isinstance(array, np.memmap) for array in arrays_of(splits))
    np.testing.assert_array_equal(splits.train.images, images[:3192].reshape(3192, 1024))


def test_of_a_raw_file_and_its_gzipped_twin_the_raw_one_is_read(small: Path):
    brighter = idx(np.full((6, 5, 7), 255, np.uint8))
    write(small, {TRAIN_IMAGES: brighter}, packed=False)
    splits = load(small, SMALL)
    assert isinstance(splits.train.images, np.memmap)
    assert splits.train.images.min() == 255


def test_the_names_of_emnist_are_known_and_hidden_files_are_not_looked_at(tmp_path: Path):
    contents = small_contents()
    renamed = {f"emnist-balanced-{k.replace('t10k', 'test')}": v for k, v in contents.items()}
    write(tmp_path, renamed, packed=True)
    write(tmp_path, {f"._{TRAIN_IMAGES}": b"left by another system"}, packed=False)
    (tmp_path / SUMS).write_text(checksum_lines(renamed))
    assert_same(load(tmp_path, SMALL), load(write(tmp_path / "classic", contents, True), SMALL))


def test_checksums_are_of_the_unpacked_content_however_it_was_packed(small: Path):
    lines = checksum_lines(small_contents()).replace("  t10k", " *t10k").upper()
    lines = re.sub(r"[A-Z0-9-]+UBYTE", lambda name: name[0].lower(), lines)
    (small / SUMS).write_text(f"{lines}{'0' * 64}  another-file\n")
    content = small_contents()[TRAIN_IMAGES]
    two_members = gzip.compress(content[:30], 1) + gzip.compress(content[30:], 9)
    (small / f"{TRAIN_IMAGES}.gz").write_bytes(two_members)
    assert load(small, SMALL).train.images.tobytes() == content[16 : 16 + 4 * 35]


# How a file's content is broken, the file that the message must name, and what else it must say.
CONTENT_FAULTS: dict[str, tuple[str, Callable[[bytes], bytes], list[str]]] = {
    "truncated": (TRAIN_IMAGES, lambda b: b[:-1], ["225", "226", "6 x 5 x 7"]),
    "truncated labels": (TEST_LABELS, lambda b: b[:-2], ["10 bytes", "12 bytes"]),
    "over-long": (TRAIN_IMAGES, lambda b: b + b"\0", ["226 bytes", "6 x 5 x 7"]),
    "no header": (TEST_IMAGES, lambda b: b[:5], ["5 bytes", "16"]),
    "nothing": (TRAIN_LABELS, lambda b: b"", ["0 bytes", "8"]),
    "magic": (TRAIN_IMAGES, lambda b: b"\0\0\x08\1" + b[4:], ["0x00000801", "0x00000803"]),
    "little-endian": (TEST_LABELS, lambda b: b"\1\x08\0\0" + b[4:], ["0x01080000", "0x00000801"]),
    "no examples": (TRAIN_IMAGES, lambda b: header(0, 5, 7), ["empty", "0 x 5 x 7"]),
    "no pixels": (TEST_IMAGES, lambda b: header(4, 5, 0), ["empty", "4 x 5 x 0"]),
    "fewer labels": (TRAIN_LABELS, lambda b: header(5) + b[8:13], ["6 images", "5 labels"]),
    "fewer tests": (TEST_IMAGES, lambda b: header(3, 5, 7) + b[16:121], ["3 images", "4 labels"]),
    "other shape": (TEST_IMAGES, lambda b: header(4, 7, 5) + b[16:], ["7 x 5", "5 x 7"]),
    "foreign label": (TEST_LABELS, lambda b: b[:-1] + b"\x07", ["row 3", "label 7", "2 classes"]),
    "one class": (TRAIN_LABELS, lambda b: header(6) + bytes(6), ["label 0", "2 classes"]),
}


@pytest.mark.parametrize("packed", [True, False], ids=["gzipped", "raw"])
@pytest.mark.parametrize("fault", CONTENT_FAULTS)
def test_unusable_content_is_refused_with_its_file_and_numbers(
    fault: str, packed: bool, tmp_path: Path
):
    name, change, words = CONTENT_FAULTS[fault]
    contents = small_contents()
    contents[name] = change(contents[name])
    message = refusal(write(tmp_path, contents, packed))
    for word in [name, *words]:
        assert word in message


def change_file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def rename(name: str, new: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).rename(folder / new)


def flipped(content: bytes, position: int) -> bytes:
    changed = bytearray(content)
    changed[position] ^= 1
    return bytes(changed)


def folder_instead(folder: Path) -> None:
    (folder / f"{TEST_LABELS}.gz").unlink()
    (folder / f"{TEST_LABELS}.gz").mkdir()


def list_instead(text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / SUMS).write_text(text)


SUM_LINES = checksum_lines(small_contents())
GZ = f"{TRAIN_IMAGES}.gz"
FOLDER_FAULTS: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "gzip magic": (change_file(GZ, lambda b: b"no" + b[2:]), [GZ, "gzip"]),
    "gzip body": (change_file(GZ, lambda b: b[:12] + b"\xff" * 9 + b[21:]), [GZ, "gzip"]),
    "gzip checksum": (change_file(GZ, lambda b: flipped(b, -8)), [GZ, "gzip", "CRC"]),
    "gzip length": (change_file(GZ, lambda b: flipped(b, -4)), [GZ, "gzip"]),
    "gzip truncated": (change_file(GZ, lambda b: b[:-9]), [GZ, "gzip", "end"]),
    "gzip empty file": (change_file(GZ, lambda b: b""), [GZ, "0 bytes"]),
    "gzip then garbage": (change_file(GZ, lambda b: b + b"more"), [GZ, "gzip"]),
    "gzip without .gz": (rename(GZ, TRAIN_IMAGES), [TRAIN_IMAGES, "0x1f8b", "name it .gz"]),
    "missing": (rename(GZ, "pictures"), [TRAIN_IMAGES, "pictures", f"{TEST_LABELS}.gz"]),
    "two sets": (
        lambda folder: write(folder, {f"emnist-{TRAIN_LABELS}": b""}, packed=True),
        ["2 files", f"emnist-{TRAIN_LABELS}", f", {TRAIN_LABELS}"],
    ),
    "two names of the test set": (
        lambda folder: write(folder, {"test-images-idx3-ubyte": b""}, packed=False),
        ["2 files", TEST_IMAGES, "test-images-idx3-ubyte"],
    ),
    "a folder for a file": (folder_instead, [f"{TEST_LABELS}.gz", "not a file"]),
    "a folder for the list": (lambda folder: (folder / SUMS).mkdir(), [SUMS, "not a file"]),
    "a dangling link for the list": (
        lambda folder: (folder / SUMS).symlink_to(folder / "nowhere"),
        [SUMS, "not a file"],
    ),
    "a list of another set": (
        list_instead(SUM_LINES.replace(SUM_LINES[:64], "ab" * 32)),
        [GZ, SUM_LINES[:64], "ab" * 32],
    ),
    "a list that lacks one": (list_instead(SUM_LINES[:-90]), [SUMS, "not list", TEST_LABELS]),
    "a list of packed files": (
        list_instead(SUM_LINES.replace("ubyte", "ubyte.gz")),
        [SUMS, "not list", TRAIN_IMAGES, "unpacked"],
    ),
    "a torn list": (list_instead(SUM_LINES[10:]), [SUMS, "line 1", SUM_LINES[10:64]]),
    "a list of two minds": (
        list_instead(f"{SUM_LINES}{'0' * 64}  {TEST_LABELS}"),
        [SUMS, "line 5", TEST_LABELS],
    ),
}


@pytest.mark.parametrize("fault", FOLDER_FAULTS)
def test_an_unusable_folder_is_refused_with_what_is_wrong_in_it(fault: str, small: Path):
    spoil, words = FOLDER_FAULTS[fault]
    spoil(small)
    message = refusal(small)
    for word in words:
        assert word in message


@pytest.mark.parametrize("packed", [True, False], ids=["gzipped", "raw"])
@pytest.mark.parametrize("name", NAMES)
def test_one_bit_that_differs_from_the_listed_checksum_is_refused(
    name: str, packed: bool, tmp_path: Path
):
    contents = small_contents()
    contents[name] = flipped(contents[name], -1)
    write(tmp_path, contents, packed)
    load(tmp_path, SMALL)
    (tmp_path / SUMS).write_text(SUM_LINES)
    message = refusal(tmp_path)
    for word in (name, hashlib.sha256(contents[name]).hexdigest(), "SHA-256"):
        assert word in message


def test_a_folder_that_is_none_is_refused_by_name(tmp_path: Path):
    assert f"{tmp_path / 'nowhere'} " in refusal(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    assert f"{tmp_path / 'file'} " in refusal(tmp_path / "file")
    assert "holds nothing" in refusal(write(tmp_path / "empty", {}, packed=True))


@pytest.mark.parametrize(
    ("error", "word"),
    [(PermissionError(13, "Permission denied"), "Permission denied"), (MemoryError(), "memory")],
)
def test_a_file_that_the_system_denies_is_refused_by_name(
    error: Exception, word: str, small: Path, monkeypatch: pytest.MonkeyPatch
):
    def deny(path: Path, mode: str):
        raise error

    monkeypatch.setattr(Path, "open", deny)
    message = refusal(small)
    assert GZ in message
    assert word in message


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            IdxConfig(validation=6),
            "data.validation is 6, but the training files hold 6 rows: use at most 5",
        ),
        (IdxConfig(), "data.validation is 5000, but the training files hold 6 rows"),
        (IdxConfig(validation=2, limit=5), "data.limit is 5, but data.validation leaves 4 of 6"),
    ],
)
def test_more_rows_than_there_are_is_a_fault_of_the_config(
    config: DataConfig, message: str, small: Path
):
    with pytest.raises(ConfigError, match=message):
        load(small, config)


@pytest.mark.parametrize("packed", [True, False], ids=["gzipped", "raw"])
@pytest.mark.parametrize("shape", [(2**32 - 1, 28, 28), (2**32 - 1,) * 3, (2**31, 1, 1)])
def test_a_header_that_promises_billions_costs_no_memory(
    shape: tuple[int, ...], packed: bool, tmp_path: Path
):
    contents = small_contents() | {TRAIN_IMAGES: header(*shape) + bytes(1000)}
    write(tmp_path, contents, packed)
    with memory_below(5 * 2**20):
        message = refusal(tmp_path)
    assert "1016 bytes" in message
    assert " x ".join(str(size) for size in shape) in message


def test_a_gzip_bomb_is_refused_before_it_unfolds(tmp_path: Path):
    contents = small_contents()
    contents[TRAIN_IMAGES] += bytes(2**26)
    write(tmp_path, contents, packed=True)
    assert (tmp_path / GZ).stat().st_size < 2**17
    with memory_below(5 * 2**20):
        message = refusal(tmp_path)
    assert "more" in message
    assert "226 bytes" in message


def test_read_idx_reads_any_number_of_dimensions(tmp_path: Path):
    array = np.arange(120, dtype=np.uint8).reshape(2, 3, 4, 5)
    (tmp_path / "cube").write_bytes(idx(array))
    np.testing.assert_array_equal(read_idx(tmp_path / "cube", 4), array)


Edit = tuple[str, int, bytes]
EDITS = st.lists(
    st.tuples(
        st.sampled_from(["replace", "replace", "insert", "delete", "cut"]),
        st.integers(0, 299),
        st.binary(min_size=1, max_size=4),
    ),
    min_size=1,
    max_size=3,
)


def edited(content: bytes, edits: list[Edit]) -> bytes:
    for kind, position, new in edits:
        at = position % (len(content) + 1)
        start, end = content[:at], content[at:]
        match kind:
            case "replace":
                content = start + new[: len(end)] + end[len(new) :]
            case "insert":
                content = start + new + end
            case "delete":
                content = start + end[len(new) :]
            case _:
                content = start
    return content


@settings(max_examples=200, derandomize=True, deadline=None)
@given(st.sampled_from([*NAMES, SUMS]), st.booleans(), st.booleans(), EDITS)
def test_damaged_bytes_are_refused_or_harmless(
    name: str, packed: bool, listed: bool, edits: list[Edit]
):
    with tempfile.TemporaryDirectory() as temporary:
        folder = write(Path(temporary), small_contents(), packed)
        original = load(folder, SMALL)
        target = folder / (f"{name}.gz" if packed and name != SUMS else name)
        if listed or name == SUMS:
            (folder / SUMS).write_text(SUM_LINES)
        # Unlinked first: the original's arrays may be mapped from the file.
        content = target.read_bytes()
        target.unlink()
        target.write_bytes(edited(content, edits))
        try:
            damaged = load(folder, SMALL)
        except (DataError, ConfigError):
            return
        if listed:
            assert_same(original, damaged)


def test_the_examples_in_the_readme_work(tmp_path: Path):
    text = README.read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)
    splits = load(tmp_path / "brightness", IdxConfig(validation=100))
    assert (len(splits.train), len(splits.test), splits.image_shape) == (900, 200, (8, 8))
    assert splits.train.images[splits.train.labels == 1].min() == 127
    (commands,) = re.findall(r"```sh\n(.*?)```", text, re.DOTALL)
    root = README.parent.parent
    check = subprocess.run(["sh", "-c", commands], cwd=root, capture_output=True, text=True)
    assert check.stdout == "all four are right\n"
