"""Measure speed as ratios within one run: python scripts/benchmark.py WHAT [--repeats N].

epoch      an epoch through `fit`, the bare scan over chunks in memory, the lesson's loop
start      from process start to trained: preset `fast`, cold and warm compile cache, the lesson
members    eight seeds in one program and one seed alone, per step and member
contracts  shape contracts on and off: import, first call, steady epoch
models     each model of the table over as many seeds: accuracy, parameters, time an epoch
parity     one MLP in every framework: the losses of 100 equal steps, and what each looks like
"""

import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from mlp_research import command_line, results

SCRIPTS = Path(__file__).parent
Times = dict[str, list[float]]


@dataclasses.dataclass(frozen=True)
class Flags:
    """What is measured."""

    what: Annotated[
        Literal["epoch", "start", "members", "contracts", "models", "parity"],
        tyro.conf.Positional,
    ]
    """The comparison."""
    repeats: int = 5
    """Measurements of each; they alternate, and the medians are compared."""
    record: bool = False
    """Write the table into docs/results.md, and the figure of `parity` beside it."""
    figures: Path = Path("runs")
    """Folder for the figure of `parity` where it is not recorded."""


def main(argv: Sequence[str]) -> None:
    flags = tyro.cli(Flags, args=argv, description=__doc__)
    with tempfile.TemporaryDirectory() as folder:
        if flags.what == "models":
            title, lines = "The models", models(flags.repeats, Path(folder))
        elif flags.what == "parity":
            title, lines = "One MLP in every framework", every_framework(flags)
        else:
            measure, title, base = COMPARISONS[flags.what]
            lines = ratios(measure(flags.repeats, Path(folder)), base)
    print("\n".join(lines))
    if flags.record:
        command = f"python scripts/benchmark.py {flags.what}"
        command += f" --repeats {flags.repeats}" if flags.what != "parity" else ""
        results.record(results.DOCUMENT, f"benchmark {flags.what}", title, command, lines)


def ratios(times: Times, base: str) -> list[str]:
    """A table of medians and extremes, and each median's ratio to that of `base`."""
    return results.table(
        ("", "median s", "least s", "largest s", f"ratio to {base}"),
        [
            (name, *(f"{f(seconds):.3f}" for f in (statistics.median, min, max)), ratio)
            for name, seconds in times.items()
            for ratio in [f"{statistics.median(seconds) / statistics.median(times[base]):.3f}"]
        ],
    )


def models(seeds: int, folder: Path) -> list[str]:
    """Each model with its shipped config and one recipe: accuracy over seeds, time to the MLP's.

    The seeds begin at 1000: none of them was looked at when the configs were chosen.
    """
    recipe = ("--optimizer.learning-rate", "4e-3", "--schedule", "linear", "--seed", "1000")
    rows, plain = [], None
    for model in ("mlp", "residual", "mixer"):
        words = ("--model", model, *recipe, "--seeds", str(seeds), "--run-dir", folder / model)
        call(SCRIPTS / "sweep.py", *words, environment=dict(os.environ))
        (setting,) = json.loads((folder / model / "summary.json").read_text())["settings"]
        result = json.loads((folder / model / "programs" / "000" / "result.json").read_text())[0]
        plain = plain or result["train_seconds"]
        mean, spread = (100 * setting["test"][name] for name in ("mean", "standard_deviation"))
        relative = f"{result['train_seconds'] / plain:.2f}"
        rows.append((model, f"{result['parameters']:,}", f"{mean:.2f}", f"{spread:.2f}", relative))
    headings = ("model", "parameters", "test %", "standard deviation", "time an epoch to mlp's")
    return results.table(headings, rows)


def every_framework(flags: Flags) -> list[str]:
    """The table of the peers; their figure is linked where it is recorded, else named."""
    import jax

    if not os.environ.get("JAX_NUM_CPU_DEVICES"):
        jax.config.update("jax_num_cpu_devices", 4)  # so that the data-parallel ones have shares
    sys.path.insert(0, str(SCRIPTS / "peers"))
    import parity

    folder = results.DOCUMENT.parent if flags.record else flags.figures
    folder.mkdir(parents=True, exist_ok=True)
    lines = parity.measure(folder / "parity.png")
    if flags.record:
        return [*lines, "", "![Losses of every framework, and their differences](parity.png)"]
    return [*lines, "", f"figure: {folder / 'parity.png'}"]


def epoch(repeats: int, folder: Path) -> Times:
    """Seconds of one epoch of 60,000 images, warmed: evaluation and checkpoint are timed apart."""
    import jax
    import jax.random as jr

    from mlp_research.config import PRESETS, Execution, TrainConfig
    from mlp_research.experiment import Experiment
    from mlp_research.fit import fit
    from mlp_research.report import Report

    sys.path.insert(0, str(SCRIPTS / "peers"))
    import lesson

    config = PRESETS["lesson"].model_copy(update={"train": TrainConfig(epochs=3)})
    bare = Experiment.of(config, Execution(resident=False))
    state = bare.compile(bare.init())
    plan = bare.chunk_plan(0)
    first_epoch = plan.plan.steps_per_epoch
    spans = zip(bare.chunks(0), plan.spans(), strict=True)
    chunks = [chunk for chunk, (start, _) in spans if start < first_epoch]
    images, labels = lesson.on_device(bare.data.train.images, bare.data.train.labels)
    parameters = lesson.init(jr.key(0))
    optimizer_state = lesson.optimizer.init(parameters)
    times: Times = {"fit": [], "bare scan": [], "lesson's loop": []}
    for repeat in range(repeats + 1):  # the first warms up and is not counted
        run_dir = folder / str(repeat)
        fit(config, run_dir=run_dir, report=Report(quiet=True))
        lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        epochs = [line["train_seconds"] for line in lines if line["split"] == "epoch"]
        times["fit"].append(statistics.median(epochs))
        with timed(times["bare scan"]):
            for chunk in chunks:
                state, _ = bare.train_steps(state, bare.settings, chunk)
            jax.block_until_ready(state.step)
        with timed(times["lesson's loop"]):
            parameters, optimizer_state = lesson.train_epoch(
                parameters, optimizer_state, jr.key(repeat), images, labels
            )
    return {name: seconds[1:] for name, seconds in times.items()}


def start(repeats: int, folder: Path) -> Times:
    """Seconds from the start of a process to its end, the lesson's to its best test accuracy."""
    times: Times = {"lesson": [], "fast, cold cache": [], "fast, warm cache": []}
    for repeat in range(repeats):
        times["lesson"].append(lesson_to_its_best())
        caches = os.environ | {"XDG_CACHE_HOME": str(folder / f"cache-{repeat}")}
        for cache in ("cold", "warm"):
            words = ("fast", "--run-dir", str(folder / f"{cache}-{repeat}"))
            with timed(times[f"fast, {cache} cache"]):
                call(SCRIPTS / "train.py", *words, environment=caches)
    return times


def lesson_to_its_best() -> float:
    """Seconds until the lesson's program printed the epoch that is its best of ten."""
    began = time.perf_counter()
    command = [sys.executable, str(SCRIPTS / "peers" / "lesson.py")]
    reached = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            accuracy = float(line.partition("test")[2].split()[0])
            reached.append((accuracy, -(time.perf_counter() - began)))
    return -max(reached)[1]


def members(repeats: int, folder: Path) -> Times:
    """Seconds per 1000 steps and member of the default MLP, alone and eight in one program."""
    import jax

    jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    from mlp_research.config import Config, Execution
    from mlp_research.experiment import Experiment
    from mlp_research.members import Members

    execution = Execution(mesh_data=1)
    configs = [Config(seed=seed) for seed in range(8)]
    programs = {
        "single run": Experiment.of(configs[0], execution),
        "8 members, map": Members.of(configs, execution, "map"),
        "8 members, vmap": Members.of(configs, execution, "vmap"),
    }
    states = {name: program.compile(program.init()) for name, program in programs.items()}
    chunks = {
        name: list(itertools.islice(program.chunks(0), 6)) for name, program in programs.items()
    }
    times: Times = {name: [] for name in programs}
    for _ in range(repeats + 1):  # the first warms up and is not counted
        for name, program in programs.items():
            spent: list[float] = []
            with timed(spent):
                for chunk in chunks[name]:
                    states[name] = program.train_steps(states[name], program.settings, chunk)[0]
                jax.block_until_ready(states[name].step)
            steps = sum(int(chunk.count) for chunk in chunks[name]) * len(program.marks)
            times[name].append(1000 * spent[0] / steps)
    return {name: seconds[1:] for name, seconds in times.items()}


def contracts(repeats: int, folder: Path) -> Times:
    """Seconds with and without shape contracts; the compile cache is off."""
    times: Times = {}
    for repeat in range(repeats):
        for switch in ("off", "on") if repeat % 2 else ("on", "off"):
            environment = os.environ | {"MLP_RESEARCH_CONTRACTS": switch}
            with timed(times.setdefault(f"import, {switch}", [])):
                call("-c", "import mlp_research", environment=environment)
            run_dir = folder / f"{switch}-{repeat}"
            words = ("--no-compile-cache", "--train.epochs", "9", "--run-dir", str(run_dir))
            call(SCRIPTS / "train.py", *words, environment=environment)
            result = json.loads((run_dir / "result.json").read_text())
            lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
            epochs = [line["train_seconds"] for line in lines if line["split"] == "epoch"]
            times.setdefault(f"first calls, {switch}", []).append(result["compile_seconds"])
            times.setdefault(f"steady epoch, {switch}", []).extend(epochs[1:])
    return dict(sorted(times.items()))


def call(*words: object, environment: dict[str, str]) -> None:
    subprocess.run(
        [sys.executable, *map(str, words)],
        env=environment,
        check=True,
        stdout=subprocess.DEVNULL,
    )


@contextlib.contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - began)


COMPARISONS: dict[str, tuple[Callable[[int, Path], Times], str, str]] = {
    "epoch": (epoch, "An epoch through `fit`", "bare scan"),
    "start": (start, "From process start to trained", "lesson"),
    "members": (members, "Many members in one program", "single run"),
    "contracts": (contracts, "What shape contracts cost", "steady epoch, off"),
}

if __name__ == "__main__":
    command_line.run(main)
