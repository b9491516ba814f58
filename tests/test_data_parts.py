"""Data of every kind are read exactly, or refused in one clear sentence before anything is done."""

import hashlib
import io
import os
import tempfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlp_research.config import FAMILIES, Config
from mlp_research.data import (
    ArraysConfig,
    DataConfig,
    DataError,
    IdxConfig,
    Rows,
    datasets,
    save_idx,
)
from mlp_research.data.datasets import DEFAULT_DIRECTORY, Splits, load
from mlp_research.data.loader import Plan, evaluation_batches, train_chunks
from mlp_research.errors import ConfigError
from tests import bad_data
from tests.bad_data import (
    ARRAYS,
    GIVEN,
    IDX,
    Arrays,
    GivenConfig,
    idx_bytes,
    in_order,
    made,
    packed,
    saved,
)

SPARE_BYTES = 5 * 2**20
"""Memory beside a multiple of the file, as in faults/test_data.py."""
SHAPES = [(5, 7), (4, 3, 3), (13,), (2, 2, 2, 2)]


def assert_holds(splits: Splits, arrays: Arrays, dtype: Any, groups: bool = True) -> None:
    """The splits hold exactly these arrays, the last two training rows held out."""
    ends = {"train": ("", slice(4)), "validation": ("", slice(4, 6)), "test": ("_test", slice(4))}
    for name, (end, rows) in ends.items():
        split, x = getattr(splits, name), arrays[f"x{end}"][rows]
        assert split.images.dtype == dtype and split.images.flags.c_contiguous
        np.testing.assert_array_equal(split.images.reshape(x.shape), x.astype(dtype))
        np.testing.assert_array_equal(split.labels, arrays[f"y{end}"][rows])
        assert split.labels.dtype == (np.uint8 if splits.classes <= 256 else np.int32)
        if groups:
            np.testing.assert_array_equal(split.groups, arrays[f"groups{end}"][rows])
        else:
            assert split.groups is None
    assert splits.image_shape == arrays["x"].shape[1:]
    assert splits.classes == 1 + arrays["y"].max()


@pytest.mark.parametrize("classes", [3, 256, 257, 1001])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_saved_as_idx_is_read_back_exactly(
    shape: tuple[int, ...], dtype: Any, classes: int, tmp_path: Path
):
    arrays = made(shape, dtype, classes)
    raw, bare = saved(tmp_path / "raw", arrays), saved(tmp_path / "bare", arrays, groups=False)
    found = load(raw, IDX)
    assert_holds(found, arrays, dtype)
    assert_holds(load(bare, IDX), arrays, dtype, groups=False)
    assert (dtype == np.uint8) == isinstance(found.train.images, np.memmap)
    again = load(packed(raw), IDX)
    assert_holds(again, arrays, dtype)
    assert again.crc32 == found.crc32 != load(bare, IDX).crc32
    assert all(name.startswith(("train-", "t10k-")) for name in os.listdir(bare))


@pytest.mark.parametrize("write", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float32, np.float64, ">f4", ">f8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_arrays_are_the_same_from_a_file_or_from_memory(
    shape: tuple[int, ...], dtype: Any, write: Callable, tmp_path: Path
):
    arrays = made(shape, dtype, classes=300)
    write(tmp_path / "set.npz", **arrays, another=np.array(["words"]))
    kept = np.uint8 if dtype == np.uint8 else np.float32
    found = load(tmp_path, ARRAYS)
    assert_holds(found, arrays, kept)
    assert load(tmp_path / "set.npz", ARRAYS).crc32 == found.crc32
    memory = load(tmp_path / "nowhere", ARRAYS, in_order(arrays))
    assert_holds(memory, arrays, kept)
    assert memory.crc32 == found.crc32 == load(saved(tmp_path / "idx", arrays), IDX).crc32
    assert_holds(load(tmp_path, IDX, in_order(arrays)[:4]), arrays, kept, groups=False)


def test_arrays_in_memory_are_neither_copied_nor_can_be_written(tmp_path: Path):
    arrays = made()
    splits = load(tmp_path, IDX, in_order(arrays))
    assert np.shares_memory(splits.train.images, arrays["x"]) and arrays["x"].flags.writeable
    with pytest.raises(ValueError, match="read-only"):
        splits.train.images[0] = 0
    for shape in ((3,), (4, 3)):
        turned: Arrays = {name: np.asfortranarray(array) for name, array in made(shape).items()}
        assert_holds(load(tmp_path, IDX, in_order(turned)), turned, np.float32)
        np.savez(tmp_path / "turned.npz", **turned)
        assert_holds(load(tmp_path, ARRAYS), turned, np.float32)


@pytest.mark.parametrize(
    ("word", "number", "dtype"),
    [("ubyte", 8, np.uint8), ("short", 11, np.int16), ("int", 12, np.int32)],
)
@pytest.mark.parametrize("noun", ["writers", "groups"])
def test_labels_and_groups_of_each_type_of_idx_are_read(
    noun: str, word: str, number: int, dtype: Any, tmp_path: Path
):
    arrays = made() | {"groups": np.arange(6) + 100, "groups_test": np.arange(4) + 7}
    folder = saved(tmp_path, arrays, groups=False)
    for part, end in (("train", ""), ("t10k", "_test")):
        (folder / f"{part}-labels-idx1-ubyte").unlink()
        for role, name in (("labels", "y"), (noun, "groups")):
            content = idx_bytes(arrays[name + end].astype(dtype), number)
            (folder / f"{part}-{role}-idx1-{word}").write_bytes(content)
    assert_holds(load(folder, IDX), arrays, np.float32)


def test_a_list_of_checksums_must_list_the_groups_too(tmp_path: Path):
    folder = saved(tmp_path, made())
    names = sorted(os.listdir(folder))
    lines = {name: f"{sha256(folder / name)}  {name}\n" for name in names}
    (folder / "SHA256SUMS").write_text("".join(lines.values()))
    load(folder, IDX)
    (folder / "SHA256SUMS").write_text("".join(lines[n] for n in names if "train-groups" not in n))
    with pytest.raises(DataError, match="does not list train-groups-idx1-int"):
        load(folder, IDX)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_the_checksum_is_of_labels_groups_and_features_alike(tmp_path: Path):
    found = [load(tmp_path, IDX, in_order(made())).crc32]
    for name in made():
        arrays = made()
        last = (-1,) * arrays[name].ndim
        arrays[name][last] = np.nextafter(arrays[name][last], 9) if name.startswith("x") else 1
        found.append(load(tmp_path, IDX, in_order(arrays)).crc32)
    assert len(set(found)) == 1 + len(made())
    with pytest.raises(DataError, match=f"the arrays are not .* data.crc32 is 7, .* {found[0]}"):
        load(tmp_path, IDX.model_copy(update={"crc32": 7}), in_order(made()))
    with pytest.raises(ConfigError, match="the training arrays hold 6 rows: use at most 5"):
        load(tmp_path, IdxConfig(), in_order(made()))


def test_the_checksum_of_mnist_is_what_it_was():
    assert load(DEFAULT_DIRECTORY, IdxConfig()).crc32 == 1080224662


def test_rows_of_floats_and_wide_labels_are_streamed_and_evaluated_as_they_are(tmp_path: Path):
    arrays = made((2, 3), classes=300)
    train = load(tmp_path, IDX, in_order(arrays)).train
    plan = Plan(seed=0, rows=4, batch_size=2, epochs=1)
    (chunk,) = train_chunks(plan.chunks(0, 2), train)
    rows = plan.indices(0, 2)
    np.testing.assert_array_equal(chunk.steps.images, arrays["x"].reshape(6, 6)[rows])
    np.testing.assert_array_equal(chunk.steps.labels, arrays["y"][rows])
    batches = list(evaluation_batches(train, 3))
    assert [batch.real.sum() for batch in batches] == [3, 1]
    assert all(batch.images.dtype == np.float32 for batch in batches)
    assert all(batch.labels.dtype == np.int32 for batch in batches)
    np.testing.assert_array_equal(train.rows(3).groups, arrays["groups"][:3])


@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
@pytest.mark.parametrize("width", [1, 8, 13, 24])
@pytest.mark.parametrize("mapped", [False, True])
def test_test_rows_that_are_training_rows_are_counted_and_none_else(
    mapped: bool, width: int, dtype: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    random = np.random.default_rng(0)
    x, x_test = random.integers(0, 9, (2, 300, width)).astype(dtype)
    x_test[:20] = x[280:]  # rows that are held out count too
    turned = np.roll(x[:20].view(np.uint8).reshape(20, -1), 8, axis=1)  # of the same sum of eights
    x_test[20:40] = turned.reshape(-1).view(dtype).reshape(20, width)
    y = np.arange(300) % 2
    known = {row.tobytes() for row in x}
    expected = sum(row.tobytes() in known for row in x_test)
    if mapped:
        save_idx(tmp_path, train=(x, y), test=(x_test, y))
        count = lambda: load(tmp_path, IDX).duplicates  # noqa: E731
    else:
        count = lambda: load(tmp_path, IDX, (x, y, x_test, y)).duplicates  # noqa: E731
    assert count() == expected >= 20
    monkeypatch.setattr(datasets, "_WHOLLY_SUMMED", 299)
    monkeypatch.setattr(datasets, "_SUMMED", 100)
    assert count() == (None if mapped and dtype == np.uint8 else expected)


def test_rows_of_equal_sums_are_not_taken_for_equal(tmp_path: Path):
    x = np.random.default_rng(0).integers(0, 256, (9, 16), np.uint8)
    y = np.arange(9) % 2
    assert load(tmp_path, IDX, (x, y, np.roll(x, 8, axis=1), y)).duplicates == 0


def test_mnist_has_no_test_row_among_its_training_rows():
    assert load(DEFAULT_DIRECTORY, IdxConfig()).duplicates == 0


def test_the_family_has_its_kinds_and_a_config_tells_its_own():
    assert FAMILIES["data"] is DataConfig
    assert {"idx", "arrays", "given"} <= set(DataConfig.kinds)
    config = Config(data=ArraysConfig(validation=7, normalize=True))
    assert config.to_json()["data"]["kind"] == "arrays"
    assert Config.from_values(config.to_json()) == config
    assert Config().data == IdxConfig()


def test_a_users_read_is_checked_split_and_told_apart(tmp_path: Path):
    arrays = made()
    GIVEN["sound"] = lambda: (
        Rows(arrays["x"], arrays["y"]),
        Rows(arrays["x_test"], arrays["y_test"]),
    )
    config = GivenConfig(validation=2, case="sound")
    found = load(tmp_path, config)
    assert_holds(found, arrays, np.float32, groups=False)
    assert found.crc32 == load(tmp_path, config, in_order(arrays)[:4]).crc32


def test_what_a_users_read_says_in_words_passes_as_it_is(tmp_path: Path):
    GIVEN["worded"] = bad_data.raising(DataError("there is no such set: name another"))
    with pytest.raises(DataError, match=r"\Athere is no such set: name another\Z"):
        load(tmp_path, GivenConfig(case="worded"))


def listed(folder: Path) -> dict[str, bytes]:
    """All files below a folder with their content."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else b""
        for path in folder.rglob("*")
    }


def peak_memory(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


TABLES = {
    "idx": bad_data.FROM_IDX,
    "npz": bad_data.FROM_NPZ,
    "arrays": bad_data.FROM_ARRAYS,
    "read": bad_data.FROM_READ,
    "save": bad_data.FROM_SAVE,
}
CASES = [(table, case) for table, cases in TABLES.items() for case in cases]


@pytest.mark.parametrize(("table", "case"), CASES, ids=[f"{one}: {other}" for one, other in CASES])
def test_bad_data_are_refused_in_words_with_nothing_written_and_little_read(
    table: str, case: str, tmp_path: Path
):
    make, words = TABLES[table][case]
    call = make(tmp_path)
    before = listed(tmp_path)

    def refused() -> None:
        with pytest.raises((DataError, ConfigError)) as caught:
            call()
        message = str(caught.value)
        assert "\n" not in message and len(message) < 1000
        for word in words:
            assert word in message, message

    refused()  # what is imported and cached at the first call is not the data's
    size = sum(map(len, before.values()))
    # Other threads of the process only add: the best of three counts.
    peak = min(peak_memory(refused) for _ in range(3))
    assert peak < SPARE_BYTES + 4 * size, f"{peak} bytes of memory for {size} in files"
    assert listed(tmp_path) == before


def test_the_table_of_bad_data_is_long():
    assert len(CASES) >= 50


class Killed(BaseException):
    """What no code expects."""


@pytest.mark.parametrize("cleaned", [True, False], ids=["interrupted", "killed"])
@pytest.mark.parametrize("step", range(12))
def test_a_save_that_ends_early_leaves_no_folder_that_reads_as_whole(
    step: int, cleaned: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Six files are each put on the disk, then renamed: it ends at any of these twelve steps."""
    calls = []

    def counted(function: Callable) -> Callable:
        def call(*arguments: Any) -> Any:
            calls.append(function)
            if len(calls) > step:
                raise Killed
            return function(*arguments)

        return call

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "fsync", counted(os.fsync))
        patch.setattr(Path, "rename", counted(Path.rename))
        if not cleaned:
            patch.setattr(Path, "unlink", lambda path: None)
        saved(tmp_path, made())
    if cleaned:
        assert listed(tmp_path) == {}
        assert_holds(load(saved(tmp_path, made()), IDX), made(), np.float32)
    else:
        with pytest.raises(DataError, match="lacks"):
            load(tmp_path, IDX)


EDIT = st.tuples(
    st.sampled_from(["flip", "cut", "drop", "add"]),
    st.integers(0),
    st.binary(min_size=1, max_size=4),
)


@settings(max_examples=300, derandomize=True, deadline=None)
@given(st.booleans(), st.lists(EDIT, min_size=1, max_size=3))
def test_a_damaged_npz_is_refused_or_read_exactly(
    deflated: bool, edits: list[tuple[str, int, bytes]]
):
    arrays = {name: array for name, array in made().items() if "groups" not in name}
    file = io.BytesIO()
    (np.savez_compressed if deflated else np.savez)(file, **arrays)
    content = file.getvalue()
    for kind, position, new in edits:
        at = position % len(content) if content else 0
        start, end = content[:at], content[at:]
        match kind:
            case "flip":
                content = start + new + end[len(new) :]
            case "cut":
                content = start if position % 2 else end
            case "drop":
                content = start + end[len(new) :]
            case _:
                content = start + new + end
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "set.npz"
        path.write_bytes(content)
        try:
            splits = load(path, ARRAYS)
        except (DataError, ConfigError) as error:
            assert "\n" not in str(error)
            return
    assert_holds(splits, arrays, np.float32, groups=False)
