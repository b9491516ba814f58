"""fit(config): the only training loop."""

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np

from mlp_research import sharding
from mlp_research.checkpoint import CheckpointError, Checkpoints
from mlp_research.config import Config, Execution, differences
from mlp_research.experiment import Experiment, parameter_table
from mlp_research.frozen import Failure
from mlp_research.models import Model
from mlp_research.report import Report
from mlp_research.run_folder import RunFolder, default_run_dir, step_lines
from mlp_research.step import StepMetrics, TrainState
from mlp_research.stopping import Stopped, StopRequest


class NonFiniteError(Failure, ArithmeticError):
    """A loss or gradient that is not finite: at which step, and what is left."""


@dataclasses.dataclass(frozen=True)
class Result:
    """The trained model and what result.json says of it."""

    model: Model
    run_dir: Path
    summary: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Run:
    """One run in progress: what it computes with, and where its traces go."""

    experiment: Experiment
    folder: RunFolder
    checkpoints: Checkpoints
    report: Report
    stop: StopRequest


def fit(
    config: Config,
    execution: Execution | None = None,
    *,
    run_dir: Path | None = None,
    resume: bool = False,
    report: Report | None = None,
) -> Result:
    """Train by a config, leave a run folder, and return the final model with its exact test result.

    Raises `ConfigError`, `DataError`, `RunFolderError` or `CheckpointError` for what cannot be run,
    `NonFiniteError` where the numbers leave the finite, `Stopped` after a signal.
    """
    report = report or Report()
    experiment = Experiment.of(config, execution or Execution())
    path = run_dir or default_run_dir("run", config)
    with StopRequest() as stop, RunFolder.open(path, config, resume=resume) as folder:
        folder.write_environment(experiment.execution, dict(experiment.mesh.shape))
        with Checkpoints(folder.checkpoints) as checkpoints:
            run = Run(experiment, folder, checkpoints, report, stop)
            state = restored_or_new(run)
            report.describe(
                experiment.facts(int(state.step)) | {"folder": str(path)},
                parameter_table(state.model),
            )
            started = time.perf_counter()
            state = experiment.compile(state)
            compile_seconds = time.perf_counter() - started
            state = train(run, state)
            return finish(run, state, compile_seconds)


def restored_or_new(run: Run) -> TrainState:
    """The state of the newest sound checkpoint, or the seed's where there is none."""
    experiment, config = run.experiment, json.loads(run.experiment.config.to_json())
    sharding_ = sharding.replicated(experiment.mesh)
    template = eqx.filter_eval_shape(experiment.init)
    restored = run.checkpoints.restore_newest(template, sharding_)
    if restored is None:
        run.folder.rewind(None)
        return eqx.filter_jit(experiment.init)()
    state, notes, damage = restored
    for line in damage:
        run.report.say(f"{line}; an older one is used")
    if notes["config"] != config:
        edited = "; ".join(differences(notes["config"], config))
        raise CheckpointError(f"config.json was edited after the run began: {edited}")
    run.folder.rewind(notes["metrics"])
    return state


def train(run: Run, state: TrainState) -> TrainState:
    """From the state's position to the end of the run: the loop."""
    experiment = run.experiment
    position = int(state.step)
    plan = experiment.chunk_plan(position)
    epoch = EpochClock(position)
    for index, chunk in enumerate(experiment.chunks(position)):
        state, metrics = experiment.train_steps(state, experiment.settings, chunk)
        record_steps(run, metrics, *plan.span(index))
        position = sum(plan.span(index))
        if position % experiment.plan.steps_per_epoch == 0:
            epoch = end_epoch(run, state, position, epoch)
        elif run.stop.signal is not None:
            save(run, state, position, None)
        if run.stop.signal is not None:
            run.checkpoints.wait()
            raise Stopped(run.stop.signal, run.folder.path)
    return state


def record_steps(run: Run, metrics: StepMetrics, start: int, steps: int) -> None:
    """One line for each step. Raises `NonFiniteError` at the first that is not finite."""
    experiment = run.experiment
    host = jax.tree.map(lambda values: np.asarray(values)[:steps], metrics)
    finite = np.isfinite(host.loss) & np.isfinite(host.gradient_norm)
    good = steps if finite.all() else int(np.argmin(finite))
    plan = experiment.plan
    run.folder.append(step_lines(host, good, start, plan.steps_per_epoch, plan.batch_size))
    if good < steps:
        run.checkpoints.wait()
        saved = run.checkpoints.steps
        left = f"the last good checkpoint is step {saved[-1]}" if saved else "nothing was saved yet"
        optimizer = experiment.config.optimizer
        raise NonFiniteError(
            f"loss {host.loss[good]} and gradient norm {host.gradient_norm[good]} at step "
            f"{start + good + 1}; {left}. Lower optimizer.learning_rate "
            f"({optimizer.learning_rate:g}) or set optimizer.clip_norm ({optimizer.clip_norm})."
        )


class EpochClock:
    """Seconds of one epoch, and where it was entered: after a resume perhaps in its middle."""

    def __init__(self, position: int, checkpoint_seconds: float = 0.0):
        self.position = position
        self.checkpoint_seconds = checkpoint_seconds
        self.started = time.perf_counter()


def end_epoch(run: Run, state: TrainState, position: int, clock: EpochClock) -> EpochClock:
    """Metrics lines, exact evaluation, checkpoint, one printed row; the next epoch's clock."""
    experiment = run.experiment
    train_seconds = time.perf_counter() - clock.started
    where = {"step": position, "epoch": position // experiment.plan.steps_per_epoch}
    evaluations = {
        name: experiment.evaluate(state.model, split)
        for name, split in experiment.evaluated_splits().items()
    }
    images = (position - clock.position) * experiment.config.train.batch_size
    speed = {
        "images_per_second": images / train_seconds,
        "train_seconds": train_seconds,
        "evaluate_seconds": time.perf_counter() - clock.started - train_seconds,
        # What saving held the loop up since the last such line: this epoch's is not known yet.
        "checkpoint_seconds": clock.checkpoint_seconds,
    }
    means = run.folder.means()
    run.folder.append(
        [
            {"split": name, **where, **dataclasses.asdict(evaluation)}
            for name, evaluation in evaluations.items()
        ]
        + [{"split": "epoch", **where, **means, **speed}]
    )
    started = time.perf_counter()
    validation = evaluations.get("validation")
    save(run, state, position, validation.accuracy if validation else None)
    run.report.epoch(where | means | speed, evaluations)
    return EpochClock(position, time.perf_counter() - started)


def save(run: Run, state: TrainState, position: int, validation_accuracy: float | None) -> None:
    """State, position in metrics.jsonl, and config, as one checkpoint."""
    config = json.loads(run.experiment.config.to_json())
    notes = {"metrics": run.folder.position(), "config": config}
    run.checkpoints.save(position, state, notes, validation_accuracy)


def finish(run: Run, state: TrainState, compile_seconds: float) -> Result:
    """The exact test result of the final state, in result.json and printed."""
    experiment, data = run.experiment, run.experiment.data
    run.checkpoints.wait()
    epochs = run.folder.epochs
    summary = {
        "seed": experiment.config.seed,
        "parameters": sum(count for *_, count in parameter_table(state.model)),
        "steps": int(state.step),
        "test": dataclasses.asdict(experiment.evaluate(state.model, data.test)),
        "validation": None,
        "train_seconds": sum(line["train_seconds"] for line in epochs),
        "compile_seconds": compile_seconds,
        "images_per_second": float(np.median([line["images_per_second"] for line in epochs])),
    }
    if len(data.validation):
        summary["validation"] = dataclasses.asdict(
            experiment.evaluate(state.model, data.validation)
        )
    run.folder.write_result(summary)
    run.report.result(summary, run.folder.path)
    return Result(state.model, run.folder.path, summary)
