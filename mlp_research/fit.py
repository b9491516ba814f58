"""`fit(config)` and the only training loop, for one run and for many members of one program."""

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mlp_research.checkpoints.checkpoint import Checkpoints
from mlp_research.config import Config, Execution
from mlp_research.data.base import Arrays
from mlp_research.models import Model, summary
from mlp_research.objectives import Evaluation
from mlp_research.programs.base import Program
from mlp_research.programs.single import Experiment
from mlp_research.run import EpochClock, Run, mean_of
from mlp_research.step import StepMetrics, TrainState
from mlp_research.storage.metrics_log import step_lines
from mlp_research.storage.run_folder import RunFolder, default_run_dir, writing
from mlp_research.system import processes
from mlp_research.system.profiling import profiled
from mlp_research.system.stopping import Stopped, StopRequest
from mlp_research.terminal.report import Report


@dataclasses.dataclass(frozen=True)
class Result:
    """The trained model and what result.json says of it."""

    model: Model
    run_dir: Path
    summary: dict[str, Any]


def fit(
    config: Config,
    execution: Execution | None = None,
    *,
    data: Arrays | None = None,
    run_dir: Path | None = None,
    resume: bool = False,
    report: Report | None = None,
    profile: tuple[int, int] | None = None,
) -> Result:
    """Train by a config, leave a run folder, and return the final model with its test result.

    `data` are arrays in memory, (x, y, x_test, y_test), in place of the files that the config
    reads: features uint8 or float32 [examples, ...], labels integers [examples]. `profile` traces
    the steps after the first number up to the second. Raises a `Failure` for what cannot be run or
    ceases to be finite, and `Stopped` after a signal.
    """
    experiment = Experiment.of(config, execution or Execution(), arrays=data)
    path = run_dir or default_run_dir("run", config)
    report = report or Report(quiet=not processes.is_first())
    state, summaries = fit_program(experiment, path, resume, report, profile)
    return Result(experiment.evaluated(state), path, summaries[0])


def fit_program(
    program: Program,
    path: Path,
    resume: bool,
    report: Report,
    profile: tuple[int, int] | None = None,
    stop: StopRequest | None = None,
) -> tuple[TrainState, list[dict[str, Any]]]:
    """The final state of a program, and what result.json says of each of its members.

    `stop` is the request that the caller listens to; by default the program listens itself.
    """
    with (
        report,
        contextlib.nullcontext(stop) if stop else StopRequest() as stop,
        writing(path),
        RunFolder.open(path, program.document, resume=resume) as folder,
        Checkpoints(folder.checkpoints) as checkpoints,
        processes.ending_together(agreed=Stopped),
    ):
        parts = list(program.configs[0].parts.values())
        changed = folder.write_environment(program.execution, dict(program.mesh.shape), parts)
        if changed:
            report.say(f"what can change bits is not as when the run began: {'; '.join(changed)}")
        run = Run(program, folder, checkpoints, report, stop)
        state = run.restored_or_new()
        report.describe(program.facts(int(state.step.max())) | {"folder": path}, program.layers())
        clock = EpochClock(run, 0)
        state = program.compile(state)
        compile_seconds = clock.seconds()
        state = train(run, state, profile)
        return state, finish(run, state, compile_seconds)


def train(run: Run, state: TrainState, profile: tuple[int, int] | None) -> TrainState:
    """From the state's position to the end of the run: the loop."""
    program, position = run.program, int(state.step.max())
    plan, chunks = program.chunk_plan(position), program.chunks(position)
    if profile is not None:
        chunks = profiled(chunks, plan.spans(), profile, run.folder.path / "profile")
    clock = EpochClock(run, position)
    for chunk, (start, count) in zip(chunks, plan.spans(), strict=True):
        state, metrics = program.train_steps(state, program.recipe, chunk)
        record_steps(run, metrics, start, count)
        position = start + count
        run.report.progress(position, program.plan.total_steps, clock.images_per_second(position))
        stop = run.stop.asked()
        if position % program.plan.steps_per_epoch == 0:
            clock = end_epoch(run, state, position, clock)
        elif stop is not None:
            run.save(state, position, None)
        if stop is not None:
            run.checkpoints.wait()
            raise Stopped(stop, run.folder.path)
    return state


def record_steps(run: Run, metrics: StepMetrics, start: int, steps: int) -> None:
    """One line for each member and step, up to the first that is not finite."""
    plan = run.program.plan
    for index, tag, host in run.members(run.program.unstack(jax.device_get(metrics))):
        finite = np.isfinite(host.loss[:steps]) & np.isfinite(host.gradient_norm[:steps])
        good = steps if finite.all() else int(np.argmin(finite))
        lines = step_lines(host, good, start, plan.steps_per_epoch, plan.batch_size)
        run.folder.metrics.append([tag | line for line in lines])
        if good < steps:
            what = f"loss {host.loss[good]}, gradient norm {host.gradient_norm[good]}"
            run.leave_out(index, start + good + 1, what)


def end_epoch(run: Run, state: TrainState, position: int, clock: EpochClock) -> EpochClock:
    """Metrics lines, exact evaluation, checkpoint, one printed row; the next epoch's clock."""
    program, log = run.program, run.folder.metrics
    speed = {
        "images_per_second": clock.images_per_second(position),
        "train_seconds": clock.seconds(),
    }
    model = program.evaluated(state)
    evaluations = {
        name: program.evaluate_each(model, split)
        for name, split in program.evaluated_splits().items()
    }
    speed["evaluate_seconds"] = clock.seconds() - speed["train_seconds"]
    # What saving held the loop up since the last such line: this epoch's is not known yet.
    speed["checkpoint_seconds"] = clock.checkpoint_seconds
    probed = [finite_or_none(numbers) for numbers in program.probe_each(model)]
    where = {"step": position, "epoch": position // program.plan.steps_per_epoch}
    check_finite(run, evaluations, position)
    rows = []
    for index, tag, _ in run.members(program.tags):
        means = log.means(tag.get("member"))
        for name, each in evaluations.items():
            log.append([tag | {"split": name} | where | each[index].numbers()])
        probed[index] |= {name: means[name] for name in program.step_probes}
        if probed[index]:
            log.append([tag | {"split": "probes"} | where | probed[index]])
        log.append([tag | {"split": "epoch"} | where | means | speed])
        accuracies = {name: each[index].accuracy for name, each in evaluations.items()}
        rows.append(means | probed[index] | accuracies)
    saving = EpochClock(run, position)
    row = mean_of(rows)
    run.folder.write_scalars(where["epoch"], row)
    run.save(state, position, row.get("validation"))
    run.report.epoch(where | row | speed)
    return EpochClock(run, position, saving.seconds())


def finite_or_none(numbers: Mapping[str, Any]) -> dict[str, float | None]:
    """Return numbers on the host; one that is not finite, which no line can hold, is None."""
    values = {name: float(value) for name, value in numbers.items()}
    return {name: value if math.isfinite(value) else None for name, value in values.items()}


def check_finite(run: Run, evaluations: dict[str, list[Evaluation]], position: int) -> None:
    """Leave out each member with a loss that is not finite: no line can hold it."""
    for name, each in evaluations.items():
        for index, _, evaluation in run.members(each):
            if not math.isfinite(evaluation.loss):
                run.leave_out(index, position, f"{name} loss {evaluation.loss}")


def finish(run: Run, state: TrainState, compile_seconds: float) -> list[dict[str, Any]]:
    """The exact test result of the final state of each member, in result.json and printed."""
    program, data, log = run.program, run.program.data, run.folder.metrics
    run.checkpoints.wait()
    model = program.evaluated(state)
    results = {"test": program.evaluate_each(model, data.test)}
    if len(data.validation):
        results["validation"] = program.evaluate_each(model, data.validation)
    check_finite(run, results, int(state.step.max()))
    epochs = {line["epoch"]: line for line in log.epochs}.values()
    shared = {
        "parameters": summary.count(state.model) // state.step.size,
        "steps": int(state.step.max()),
        "train_seconds": sum(line["train_seconds"] for line in epochs),
        "compile_seconds": compile_seconds,
        "images_per_second": float(np.median([line["images_per_second"] for line in epochs])),
    }
    summaries = [
        tag
        | {"seed": program.configs[index].seed}
        | {name: each[index].numbers() for name, each in results.items()}
        | shared
        for index, tag, _ in run.members(program.tags)
    ]
    run.folder.write_result(summaries if len(program.tags) > 1 else summaries[0])
    first = next(index for index, _, _ in run.members(program.tags))
    accuracy = f"test accuracy {100 * results['test'][first].accuracy:.2f} %"
    clip_norm = program.configs[first].optimizer.clip_norm
    run.folder.draw_curves(program.tags[first], clip_norm, accuracy)
    run.report.result(summaries, run.folder.path)
    return summaries
