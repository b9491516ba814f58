"""What JAX's transforms cost and gain: python scripts/transforms.py [--repeats N] [--record].

On the default MLP and MNIST: jit and its first call, vmap against a Python loop, many steps a call,
the compile cache, and derivatives of derivatives. Times are medians of warmed calls that are taken
in turn, each until its result is there.
"""

import dataclasses
import os
import shlex
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import tyro
from benchmarks import derivatives, results_page, timing, timing_figures
from benchmarks.derivatives import Row
from benchmarks.timing import HEADINGS, Measured, Times, in_turn, medians, readable
from jaxtyping import PyTree

from mlp_research.config import Config, Execution, TrainConfig
from mlp_research.data import IdxConfig
from mlp_research.data.batches import Batch, Chunk
from mlp_research.data.datasets import DEFAULT_DIRECTORY
from mlp_research.data.inputs import scaled
from mlp_research.errors import Failure
from mlp_research.models import MLPConfig, Model
from mlp_research.prng import stream_key
from mlp_research.programs.single import Experiment
from mlp_research.step import TrainState, compile_train_steps, train_step
from mlp_research.sweep import tables
from mlp_research.terminal import command_line
from mlp_research.terminal.report import Report, aligned

PICTURE = "transforms.png"
ORDER_HEADINGS = ("tanh, grad of grad", "value", "known", "relative error", "operations")


@dataclasses.dataclass(frozen=True)
class Flags:
    """How much is measured."""

    repeats: int = 5
    """Measurements of each call; one more warms up and is not counted."""
    steps: int = 100
    """Training steps in one measurement."""
    batch_size: int = 128
    """Examples of a step."""
    data_dir: Annotated[Path, tyro.conf.arg(name="data.dir", metavar="PATH")] = DEFAULT_DIRECTORY
    """Folder of the data."""
    output: Path | None = None
    """The picture; by default transforms.png, with --record docs/transforms.png."""
    record: bool = False
    """Write the tables into docs/results.md."""


@dataclasses.dataclass(frozen=True)
class Setting:
    """What all measurements share: the default model, a state, and batches on the host."""

    experiment: Experiment
    state: TrainState
    batches: list[Batch]

    @classmethod
    def of(cls, flags: Flags) -> "Setting":
        config = Config(
            data=IdxConfig(validation=0), train=TrainConfig(batch_size=flags.batch_size)
        )
        execution = Execution(data_dir=flags.data_dir, mesh_data=1, resident=False)
        experiment = Experiment.of(config, execution)
        rows = experiment.data.train
        order = np.resize(np.arange(len(rows)), (flags.steps, flags.batch_size))
        batches = [Batch(rows.images[row], rows.labels[row]) for row in order]
        return cls(experiment, experiment.init(), batches)


def smooth_model(setting: Setting) -> Model:
    """The default model with tanh, whose second derivatives are not zero."""
    data = setting.experiment.data
    config = MLPConfig(activation="tanh")
    return config.build(data.image_shape, data.classes, key=stream_key(0, "init"))


def main(argv: Sequence[str]) -> None:
    flags = tyro.cli(Flags, args=argv, description=__doc__)
    setting = Setting.of(flags)
    orders, scalar = derivatives.scalar(flags.repeats)
    model, image = setting.state.model, scaled(setting.batches[0].images[0])
    measured = [
        *jit(setting, flags.repeats),
        cached(setting, flags.repeats),
        mapped(setting, flags.repeats),
        chunked(setting, flags.repeats),
        scalar,
        derivatives.jacobian(model, image, flags.repeats),
        derivatives.hessian(model, smooth_model(setting), image, flags.repeats),
    ]
    say(measured, orders)
    default = results_page.DOCUMENT.parent / PICTURE if flags.record else Path(PICTURE)
    picture = flags.output or default
    title = f"JAX's transforms on the default MLP, batch {flags.batch_size}"
    try:
        timing_figures.medians(picture, {each.title: each.times for each in measured}, title=title)
    except OSError as error:
        raise Failure(f"{picture} cannot be written: {error.strerror or error}") from None
    Report().facts({"picture": picture})
    if flags.record:
        command = shlex.join(["python", "scripts/transforms.py", *argv])
        body = section(measured, orders, os.path.relpath(picture, results_page.DOCUMENT.parent))
        results_page.record(
            results_page.DOCUMENT, "transforms", "The transforms, timed", command, body
        )


def say(measured: Sequence[Measured], orders: Sequence[Row]) -> None:
    """Print the tables, and a sentence for each measurement."""
    report = Report()
    times = aligned(HEADINGS, [row for each in measured for row in each.rows()], left=2)
    for line in [*times, "", *aligned(ORDER_HEADINGS, orders), ""]:
        report.say(line)
    for each in measured:
        report.say(each.says)


def section(measured: Sequence[Measured], orders: Sequence[Row], picture: str) -> list[str]:
    """The same as Markdown, with the picture."""
    times = tables.table(HEADINGS, [row for each in measured for row in each.rows()])
    sentences = [f"- {each.says}" for each in measured]
    values = tables.table(ORDER_HEADINGS, orders)
    return [*times, "", *sentences, "", *values, "", f"![Times of the transforms]({picture})"]


def pure_step(setting: Setting) -> tuple[Callable[[PyTree], PyTree], PyTree]:
    """(a new function of arrays alone that takes one training step, its arrays)."""
    inputs = (setting.state, setting.experiment.recipe, setting.batches[0])
    arrays, static = eqx.partition(inputs, eqx.is_array)

    def step(arrays: PyTree) -> PyTree:
        return eqx.filter(train_step(*eqx.combine(arrays, static)), eqx.is_array)

    return step, arrays


def jit(setting: Setting, repeats: int) -> list[Measured]:
    """Many steps with and without jit, the first call in its parts, and when jit has paid."""
    # Half as many: without jit, a first step takes longest of all that is measured here.
    first = timing.first_calls(lambda: pure_step(setting), (repeats + 1) // 2)
    steps = many_steps(setting, repeats)
    count = len(setting.batches)
    with_jit, without = (seconds / count for seconds in medians(steps))
    trace, lower, compiling, _, unpaid = medians(first)
    cost = trace + lower + compiling
    calls = timing.calls_until_paid(cost, without, with_jit)
    paid = "jit never pays" if calls is None else f"jit has paid after {calls} calls"
    return [
        Measured(
            f"{count} training steps",
            steps,
            "jit",
            f"A training step takes {readable(with_jit)} with jit and {readable(without)} without, "
            f"{without / with_jit:.3g} times as long. It costs {readable(cost)} to trace, lower "
            f"and compile it: {paid}.",
        ),
        Measured(
            "first training step",
            first,
            "compile",
            f"The first call with jit spends {100 * trace / cost:.0f} % of its overhead on "
            f"tracing, {100 * lower / cost:.0f} % on lowering, {100 * compiling / cost:.0f} % on "
            f"compiling. The first step without jit takes {readable(unpaid)}, "
            f"{unpaid / cost:.3g} times as long as these: it compiles each operation by itself.",
        ),
    ]


def many_steps(setting: Setting, repeats: int) -> Times:
    """Steps one after the other, each of them one call from Python."""

    def train(step: Callable) -> TrainState:
        state = setting.state
        for batch in setting.batches:
            state, _ = step(state, setting.experiment.recipe, batch)
        return state

    steps = {"jit": eqx.filter_jit(train_step), "no jit": train_step}
    return in_turn({name: lambda step=step: train(step) for name, step in steps.items()}, repeats)


def cached(setting: Setting, repeats: int) -> Measured:
    """Compiling a training step with and without a compile cache."""
    times = timing.compile_times(lambda: pure_step(setting), repeats)
    none, empty, kept = medians(times)
    return Measured(
        "compile a training step",
        times,
        "no cache",
        f"From a compile cache the step is there in {readable(kept)} in place of {readable(none)} "
        f"({none / kept:.3g} times as quick); filling the cache takes {readable(empty)}.",
    )


def mapped(setting: Setting, repeats: int) -> Measured:
    """The logits of a batch by `vmap` and by a loop over its examples, with and without jit."""
    model, images = setting.state.model, scaled(setting.batches[0].images)
    examples = list(images)

    def one(image: jax.Array) -> jax.Array:
        return model(image)

    compiled_one, compiled_all = jax.jit(one), jax.jit(jax.vmap(one))
    times = in_turn(
        {
            "jit of vmap": lambda: compiled_all(images),
            "vmap, no jit": lambda: jax.vmap(one)(images),
            "loop over jit": lambda: [compiled_one(image) for image in examples],
            "loop, no jit": lambda: [one(image) for image in examples],
        },
        repeats,
    )
    fast, eager, loop, slow = medians(times)
    return Measured(
        f"logits of {len(examples)} images",
        times,
        "jit of vmap",
        f"vmap does the work of a loop over {len(examples)} images in {readable(fast)} in place of "
        f"{readable(loop)} ({loop / fast:.3g} times as long) with jit, and in {readable(eager)} "
        f"in place of {readable(slow)} ({slow / eager:.3g} times) without.",
    )


def chunked(setting: Setting, repeats: int) -> Measured:
    """The same training steps with one, 39 and all of them in a call; seconds a step."""
    experiment, total = setting.experiment, len(setting.batches)
    candidates: dict[str, Callable[[], Any]] = {}
    for room in sorted({1, min(39, total), total}):
        compiled = compile_train_steps(experiment.mesh)
        chunks = [full_chunk(setting.batches[start:], room) for start in range(0, total, room)]
        # The state is donated to the call: each candidate goes on from its own.
        states = [jax.tree.map(jnp.copy, eqx.filter(setting.state, eqx.is_array))]

        def train(compiled: Any = compiled, chunks: Any = chunks, states: Any = states) -> Any:
            for chunk in chunks:
                whole = eqx.combine(states.pop(), setting.state)
                states.append(compiled(whole, experiment.recipe, chunk)[0])
            return states[0].step

        candidates[f"{room} a call"] = train
    times = {
        name: [value / total for value in seconds]
        for name, seconds in in_turn(candidates, repeats).items()
    }
    one, *_, most = medians(times)
    return Measured(
        "one training step",
        times,
        "1 a call",
        f"A step takes {readable(one)} with one a call and {readable(most)} with {total} a call: "
        f"{readable(abs(one - most))} {'less' if most < one else 'more'}, "
        f"{100 * abs(one - most) / one:.0f} %.",
    )


def full_chunk(batches: Sequence[Batch], room: int) -> Chunk:
    """The first batches as a chunk with room for so many; the room that is left is not used."""
    real = list(batches[:room])
    filled = real + [real[0]] * (room - len(real))
    steps = jax.tree.map(lambda *leaves: np.stack(leaves), *filled)
    return Chunk(steps, np.asarray(np.int32(len(real))))


if __name__ == "__main__":
    command_line.run(main)
