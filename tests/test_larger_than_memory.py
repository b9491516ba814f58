"""A set that is larger than memory: mapped, read as it is wanted, and let go of."""

import gc
import os
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

from mlp_research.data import IdxConfig, datasets, idx, loader
from mlp_research.data.loader import Plan, evaluation_batches, train_chunks
from tests.made import write_idx

ROWS, PIXELS = 20_000, 28 * 28


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A raw training set of 16 MB."""
    path = tmp_path_factory.mktemp("mapped")
    random = np.random.default_rng(0)
    for part, rows in (("train", ROWS), ("t10k", 10)):
        images = random.integers(0, 256, (rows, 28, 28)).astype(np.uint8)
        write_idx(path / f"{part}-images-idx3-ubyte", images)
        write_idx(path / f"{part}-labels-idx1-ubyte", np.arange(rows).astype(np.uint8) % 10)
    return path


def resident_bytes(path: Path) -> int:
    """How much of a mapped file counts as this process's memory."""
    parts = re.split(r"^[0-9a-f]+-[0-9a-f]+ ", Path("/proc/self/smaps").read_text(), flags=re.M)
    sizes = [re.search(r"^Rss: +(\d+) kB", part, re.M) for part in parts if str(path) in part]
    return sum(1024 * int(size[1]) for size in sizes if size)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells it on Linux alone")
def test_rows_that_are_trained_on_are_never_resident(directory: Path):
    images = directory / "train-images-idx3-ubyte"
    train = datasets.load(directory, IdxConfig(validation=2000)).train
    expected = np.fromfile(images, np.uint8, offset=16).reshape(ROWS, PIXELS)
    plan = Plan(seed=0, rows=len(train), batch_size=100, epochs=1)
    for index, chunk in enumerate(train_chunks(plan.chunks(0, 20), train)):
        assert resident_bytes(images) == 0
        rows = plan.indices(20 * index, 20)
        assert np.array_equal(chunk.steps.images, expected[: len(train)][rows])
    assert train.images[::5].any() and resident_bytes(images) > ROWS * PIXELS / 2, (
        "it would be seen"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells it on Linux alone")
def test_rows_that_were_evaluated_are_let_go_of(directory: Path):
    images = directory / "train-images-idx3-ubyte"
    train = datasets.load(directory, IdxConfig(validation=0)).train
    for batch in evaluation_batches(train, 1000):
        assert batch.images.any() and resident_bytes(images) == 0


def test_the_rows_are_those_of_the_file_that_was_opened(directory: Path, tmp_path: Path):
    folder = shutil.copytree(directory, tmp_path / "data")
    images, rows = folder / "train-images-idx3-ubyte", np.array([[5, 0], [ROWS - 1, 5]])
    train = datasets.load(folder, IdxConfig(validation=0)).train
    expected = train.images[rows]
    images.rename(folder / "away")
    images.write_bytes(bytes(100))
    assert np.array_equal(idx.rows_of(train.images, rows), expected)
    os.truncate(folder / "away", 16 + 10 * PIXELS)
    assert np.array_equal(idx.rows_of(train.images, rows[:1]), expected[:1])
    with pytest.raises(idx.DataError, match="was cut after the run began"):
        idx.rows_of(train.images, rows)


def test_rows_of_an_array_that_someone_else_mapped_are_its_rows(directory: Path):
    images = directory / "train-images-idx3-ubyte"
    array, rows = np.memmap(images, np.uint8, "r", 16, (ROWS, PIXELS)), np.array([7, 0, 7])
    assert np.array_equal(idx.rows_of(array, rows), array[rows])


def test_the_open_file_goes_with_the_last_array(directory: Path):
    gc.collect()
    before = len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0
    train = datasets.load(directory, IdxConfig(validation=5)).train
    assert idx.is_mapped(train.images) and len(idx._FILES) > 0
    kept = train.images[3:9]
    del train
    gc.collect()
    assert idx.rows_of(kept, np.array([0])).shape == (1, PIXELS)
    del kept
    gc.collect()
    assert (len(os.listdir("/proc/self/fd")) if sys.platform == "linux" else 0) == before


def test_what_is_not_mapped_stays(directory: Path):
    array = np.arange(12, dtype=np.uint8).reshape(3, 4)
    idx.let_go(array)
    assert array.sum() == 66


def test_the_next_epoch_is_shuffled_during_this_one(monkeypatch: pytest.MonkeyPatch):
    plain, ahead = (Plan(seed=3, rows=100, batch_size=10, epochs=4) for _ in range(2))
    expected = [plain.permutation(epoch) for epoch in range(4)]
    monkeypatch.setattr(loader, "SHUFFLED_AHEAD", 100)
    for epoch in range(4):
        ready = ahead._orders.get(epoch)
        assert (ready is not None) == (epoch > 0), "it was not begun before it was asked for"
        assert np.array_equal(ahead.permutation(epoch), expected[epoch])
    assert 4 not in ahead._orders, "there is no fifth epoch"


def test_epochs_asked_for_in_any_turn_have_their_order():
    plan = Plan(seed=3, rows=100, batch_size=10, epochs=9)
    first = [plan.permutation(epoch) for epoch in range(9)]
    assert len(plan._orders) <= 3, "orders are kept for ever"
    for epoch in (0, 8, 3, 3, 1):
        assert np.array_equal(plan.permutation(epoch), first[epoch])
