"""How fast one run and many members train, against peers and against the machine's own limit."""

import itertools
import os
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
from benchmarks.measurement import Measurement, compared, epoch_lines, import_peers, timed
from benchmarks.timing import Times, in_turn

from mlp_research.config import Config, Execution, TrainConfig
from mlp_research.data import IdxConfig
from mlp_research.data.loader import row_chunks, train_chunks
from mlp_research.fit import fit_program
from mlp_research.models import MLPConfig, summary
from mlp_research.programs.members import Members
from mlp_research.programs.single import Experiment
from mlp_research.terminal.report import Report

FLOOR = "floor"
"""The matrix products of a step at the rate of a large one: what no program can go below."""
SCAN = "its scan alone"
"""The compiled steps over chunks in memory: this package without loader, metrics and progress."""
PRODUCT = 2048
"""Size of the large product."""
TORCH = ("PyTorch eager", "PyTorch compiled")


def product_operations(config: MLPConfig, batch_size: int, inputs: int, classes: int) -> float:
    """Floating-point operations of a step's matrix products.

    Forward and by the weights for each layer, and by the inputs for each layer but the first.
    """
    layers = [a * b for a, b in pairwise((inputs, *config.widths, classes))]
    return 2.0 * batch_size * (3 * sum(layers) - layers[0])


def floor(experiment: Experiment, steps: int) -> float:
    """Seconds that the matrix products of so many steps take at the rate measured now."""
    config, data = experiment.config.model, experiment.data
    assert isinstance(config, MLPConfig)
    pixels = data.train.images.shape[1]
    operations = product_operations(config, experiment.plan.batch_size, pixels, data.classes)
    return steps * operations / summary.largest_rate(PRODUCT)


def of_batch(batch_size: int) -> Experiment:
    """The lesson's model on all 60,000 rows: two epochs."""
    config = Config(
        data=IdxConfig(validation=0), train=TrainConfig(epochs=2, batch_size=batch_size)
    )
    return Experiment.of(config, Execution(mesh_data=1))


def epochs_of_fit(experiment: Experiment, folder: Path) -> Callable[[], float]:
    """Seconds of an epoch through the real loop: loader, metrics lines, progress."""
    numbers = itertools.count()

    def seconds() -> float:
        run_dir = folder / f"{experiment.plan.batch_size}-{next(numbers)}"
        fit_program(experiment, run_dir, False, Report(quiet=True))
        return epoch_lines(run_dir)[-1]["train_seconds"]

    return seconds


def frameworks(repeats: int, folder: Path) -> Measurement:
    """An epoch of this package's real loop, of the peers, and the machine's floor."""
    import_peers()
    groups: dict[str, Times] = {}
    for batch_size in (128, 512):
        experiment = of_batch(batch_size)
        steps = experiment.plan.steps_per_epoch
        alone = _steps_of(of_batch(batch_size), steps)
        programs: dict[str, Callable[[], float]] = {
            "this package": epochs_of_fit(experiment, folder),
            SCAN: lambda alone=alone, steps=steps: steps * alone(),
        }
        for name in ("raw JAX", "Flax nnx", *TORCH):
            peer_step = _steps_of_peer(name, experiment, steps)
            programs[name] = lambda step=peer_step, steps=steps: steps * step()
        programs[FLOOR] = lambda run=experiment, steps=steps: floor(run, steps)
        groups[f"an epoch, batch {batch_size}"] = _alternating(programs, repeats)
    return compared(
        "One run against other frameworks",
        groups,
        SCAN,
        FLOOR,
        say=[_against_the_fastest(groups), _images(groups)],
    )


def _alternating(programs: dict[str, Callable[[], float]], repeats: int) -> Times:
    """What each program says of itself, in turn; the first round warms up and is not counted."""
    times: Times = {name: [] for name in programs}
    for number in range(repeats + 1):
        for name, seconds in programs.items():
            value = seconds()
            if number:
                times[name].append(value)
    return times


def _against_the_fastest(groups: dict[str, Times]) -> str:
    said = []
    for group, times in groups.items():
        medians = {name: float(np.median(seconds)) for name, seconds in times.items()}
        mine, least, _ = (medians.pop(name) for name in ("this package", FLOOR, SCAN))
        fastest = min(medians, key=medians.__getitem__)
        said.append(
            f"{group}: {mine / medians[fastest]:.2f} of the time of {fastest}, the fastest peer, "
            f"and {mine / least:.2f} times the floor"
        )
    return "This package takes, for " + "; for ".join(said) + "."


def _images(groups: dict[str, Times]) -> str:
    rates = ", ".join(
        f"{60_000 / float(np.median(times['this package'])):,.0f} ({group})"
        for group, times in groups.items()
    )
    return f"Images per second of this package: {rates}."


def members(repeats: int, folder: Path) -> Measurement:
    """Seconds a step and member: as many seeds in one program, a single run, PyTorch."""
    jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    import_peers()
    counts = (1, 2, 4, 8, 16) if jax.default_backend() == "cpu" else (1, 8, 64, 256, 1024)
    execution = Execution(mesh_data=1)
    alone = Experiment.of(Config(), execution)
    steps = 6 * execution.steps_per_call
    programs = {"single run": _steps_of(alone, steps)}
    for count in counts:
        configs = [Config(seed=seed) for seed in range(count)]
        programs[f"{count} members"] = _steps_of(Members.of(configs, execution), steps)
    for name in TORCH:
        programs[name] = _steps_of_peer(name, alone, steps)
    programs[FLOOR] = lambda: floor(alone, 1)
    groups = {"a step of one member": _alternating(programs, repeats)}
    return compared("Many members in one program", groups, "single run", TORCH[1], FLOOR)


def _steps_of(program: Experiment | Members, steps: int) -> Callable[[], float]:
    """Seconds a step and member of a program that goes on and on."""
    states = [program.compile(program.init())]
    chunks = list(itertools.islice(program.chunks(0), steps // program.execution.steps_per_call))

    def seconds() -> float:
        spent: list[float] = []
        with timed(spent):
            for chunk in chunks:
                states.append(program.train_steps(states.pop(), program.recipe, chunk)[0])
            jax.block_until_ready(states[0].step)
        return spent[0] / steps / len(program.tags)

    return seconds


def _steps_of_peer(name: str, experiment: Experiment, steps: int) -> Callable[[], float]:
    """Seconds a step of a peer, in its framework's own loop, on data that are in place."""
    import peer

    program = peer.start(name, peer.he_weights(0))
    train, plan = experiment.data.train, experiment.plan
    images, labels = program.place(train.images, train.labels)
    order = plan.indices(0, steps)

    def seconds() -> float:
        spent: list[float] = []
        with timed(spent):
            program.train_epoch(images, labels, order)
        return spent[0] / steps

    return seconds


def loader(repeats: int, folder: Path) -> Measurement:
    """The loader alone against a bare numpy gather of the same rows, and against an epoch."""
    experiment = of_batch(128)
    plan, train = experiment.plan.chunks(0, 39), experiment.data.train
    epoch = len(plan) // experiment.plan.epochs
    rows = experiment.resident_rows
    assert rows is not None

    def consume(chunks: Iterator) -> None:
        for _ in itertools.islice(chunks, epoch):
            pass

    def gather() -> None:
        for index in range(epoch):
            wanted = plan.rows(index)[0]
            _ = train.images[wanted], train.labels[wanted]

    times = in_turn(
        {
            "numpy gather": gather,
            "loader, pixels": lambda: consume(train_chunks(plan, train)),
            "loader, rows": lambda: consume(row_chunks(plan, rows)),
        },
        repeats,
    )
    seconds = epochs_of_fit(experiment, folder)
    times["an epoch of training"] = [seconds() for _ in range(repeats + 1)][1:]
    groups = {"an epoch": times}
    return compared("The loader", groups, "numpy gather", "an epoch of training")
