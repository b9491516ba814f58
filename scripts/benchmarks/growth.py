"""How time and memory grow: wider and deeper models, larger data sets, more devices."""

import shutil
from pathlib import Path

import numpy as np
from benchmarks.measurement import SCRIPTS, Measurement, call, draw_times, epoch_lines
from benchmarks.timing import Spread, Times, readable

from mlp_research.data import IdxConfig
from mlp_research.data.datasets import DEFAULT_DIRECTORY, load
from mlp_research.sweep import tables

BATCH = 128
LARGE = (60_000, 600_000, 6_000_000)
"""Training rows of the made sets."""


def growth(repeats: int, folder: Path) -> Measurement:
    """Seconds an image of the real loop, in a process of its own for each, and its memory."""
    cases = [*widths(), *depths(), *devices(), *sets(folder)]
    times: dict[str, Times] = {}
    memory: dict[tuple[str, str], list[int]] = {}
    for repeat in range(repeats):
        for group, name, words, environment in cases:
            run_dir = folder / "run"
            shutil.rmtree(run_dir, ignore_errors=True)
            held = call(
                *(SCRIPTS / "train.py", *words, "--run-dir", run_dir),
                environment={"JAX_NUM_CPU_DEVICES": "1"} | environment,
            )
            # The first epoch of several also warms up.
            lines = epoch_lines(run_dir)
            rates = [line["images_per_second"] for line in lines[1:] or lines]
            times.setdefault(group, {}).setdefault(name, []).extend(1 / rate for rate in rates)
            memory.setdefault((group, name), []).append(held)
            print(f"{repeat + 1} of {repeats}: {group}, {name}", flush=True)
    return _measurement(times, memory)


Case = tuple[str, str, tuple[object, ...], dict[str, str]]
"""Group, name, flags, environment."""


def widths() -> list[Case]:
    """Two hidden layers; wide ones see fewer images."""
    return [
        ("width", str(width), ("--model.widths", width, width, *_few(images)), {})
        for width, images in (
            *((256, 25_600), (512, 25_600), (1024, 12_800)),
            *((2048, 6_400), (4096, 2_560)),
        )
    ]


def depths() -> list[Case]:
    """Hidden layers of 256 units."""
    return [
        ("depth", str(depth), ("--model.widths", *([256] * depth), *_few(25_600)), {})
        for depth in (2, 4, 8, 16)
    ]


def devices() -> list[Case]:
    """The default run over so many CPU devices, which share the cores."""
    return [
        (
            "devices",
            str(count),
            ("--mesh.data", count, *_few(25_600)),
            {"JAX_NUM_CPU_DEVICES": str(count)},
        )
        for count in (1, 2, 4, 8)
    ]


def _few(images: int) -> tuple[object, ...]:
    return ("--train.epochs", 3, "--data.limit", images, "--train.batch-size", BATCH)


def sets(folder: Path) -> list[Case]:
    """Made sets of raw files; none but the smallest, once, lies on the device."""
    cases: list[Case] = []
    for rows in LARGE:
        directory = write_set(folder / f"{rows}-rows", rows)
        words = ("--data.dir", directory, "--data.validation", 0, "--train.batch-size", BATCH)
        epochs = ("--train.epochs", 1 if rows > 1_000_000 else 3)
        mapped = (*words, *epochs, "--data.resident", False)
        cases.append(("rows, mapped", f"{rows:,}", mapped, {}))
        if rows == LARGE[0]:
            cases.append(("rows, on the device", f"{rows:,}", (*words, *epochs), {}))
    return cases


def write_set(directory: Path, rows: int) -> Path:
    """MNIST's training images over and over, as raw IDX files; the test files as they are."""
    directory.mkdir(parents=True)
    train = load(DEFAULT_DIRECTORY, IdxConfig(validation=0)).train
    images = directory / "train-images-idx3-ubyte"
    labels = directory / "train-labels-idx1-ubyte"
    with images.open("wb") as image_file, labels.open("wb") as label_file:
        image_file.write(np.array([0x803, rows, 28, 28], ">u4").tobytes())
        label_file.write(np.array([0x801, rows], ">u4").tobytes())
        for start in range(0, rows, len(train)):
            count = min(len(train), rows - start)
            image_file.write(train.images[:count].tobytes())
            label_file.write(train.labels[:count].tobytes())
    for name in ("t10k-images-idx3-ubyte.gz", "t10k-labels-idx1-ubyte.gz"):
        shutil.copy(DEFAULT_DIRECTORY / name, directory / name)
    return directory


def _measurement(times: dict[str, Times], memory: dict[tuple[str, str], list[int]]) -> Measurement:
    rows, values = [], []
    for group, candidates in times.items():
        first = Spread.of(next(iter(candidates.values()))).median
        for name, seconds in candidates.items():
            spread, held = Spread.of(seconds), max(memory[group, name])
            shown = map(readable, (spread.median, spread.least, spread.largest))
            ratio = f"{spread.median / first:.2f}"
            rows.append((group, name, str(spread.n), *shown, ratio, f"{held / 1e6:,.0f}"))
            values.append({"group": group, "name": name, "seconds": seconds, "peak_bytes": held})
    headings = ("", "", "n", "an image", "least", "largest", "to the first", "peak MB")
    lines = tables.table(headings, rows)
    return Measurement("Growth", lines, values, lambda path: draw_times(path, times, "Growth"))
