"""One run in progress: what it computes, where its traces go, what it leaves out."""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from mlp_research.checkpoints.checkpoint import CheckpointError, Checkpoints
from mlp_research.config import differences
from mlp_research.errors import Failure
from mlp_research.programs.base import Program
from mlp_research.step import TrainState
from mlp_research.storage.run_folder import RunFolder
from mlp_research.system import processes
from mlp_research.system.stopping import StopRequest
from mlp_research.terminal.report import Report


class NonFiniteError(Failure, ArithmeticError):
    """A loss or gradient that is not finite: at which step, and what is left."""


@dataclasses.dataclass(frozen=True)
class Run:
    """The parts of a run; `left_out` maps members that ceased to be finite to the step of it."""

    program: Program
    folder: RunFolder
    checkpoints: Checkpoints
    report: Report
    stop: StopRequest
    left_out: dict[int, int] = dataclasses.field(default_factory=dict)

    def members(self, values: Sequence[Any]) -> Iterator[tuple[int, dict[str, int], Any]]:
        """(index, tag in metrics.jsonl, value) of each member that is not left out."""
        for index, (tag, value) in enumerate(zip(self.program.tags, values, strict=True)):
            if index not in self.left_out:
                yield index, tag, value

    def restored_or_new(self) -> TrainState:
        """The state of the newest sound checkpoint, or the seed's where there is none."""
        if self.folder.left_behind:
            self.report.say(f"taken over from {self.folder.left_behind}, which is gone")
        program = self.program
        restored = self.checkpoints.restore_newest(program.saved_template())
        if restored is None:
            self.folder.metrics.rewind(None)
            return program.init()
        saved, notes, damage = restored
        state = saved.state
        for line in damage:
            self.report.say(f"{line}; the run goes on from step {int(state.step.max())}")
        if notes["config"] != program.document:
            edited = "; ".join(differences(notes["config"], program.document))
            raise CheckpointError(f"config.json was edited after the run began: {edited}")
        self.folder.metrics.rewind(notes["metrics"])
        self.left_out.update({int(index): step for index, step in notes["left_out"].items()})
        return state

    def save(self, state: TrainState, position: int, validation_accuracy: float | None) -> None:
        """The state with the position in metrics.jsonl and the config, as one checkpoint.

        Raises `NonFiniteError` rather than to save parameters that cannot be trained on.
        """
        parameters = eqx.filter(state.model, eqx.is_inexact_array)
        members = self.program.unstack(jax.tree.map(processes.on_host, parameters))
        for index, _, arrays in self.members(members):
            if not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(arrays)):
                self.leave_out(index, position, "the update makes parameters that are not finite")
        notes = {
            "metrics": self.folder.metrics.position(),
            "config": self.program.document,
            "left_out": {str(index): step for index, step in self.left_out.items()},
        }
        saved = self.program.saved(state)
        self.checkpoints.save(position, saved, notes, validation_accuracy)

    def leave_out(self, index: int, step: int, what: str) -> None:
        """Name a member that ceased to be finite. Raises `NonFiniteError` where none is left."""
        self.left_out[index] = step
        config = self.program.configs[index]
        advice = (
            f"{what} at step {step}: lower optimizer.learning_rate "
            f"({config.optimizer.learning_rate:g}) or set optimizer.clip_norm "
            f"({config.optimizer.clip_norm})"
        )
        if len(self.left_out) == len(self.program.tags):
            self.checkpoints.wait()
            saved = self.checkpoints.steps
            kept = f"the last good checkpoint is step {saved[-1]}" if saved else "none was saved"
            raise NonFiniteError(f"{advice}; {kept}")
        self.report.say(f"member {index} (seed {config.seed}) is left out: {advice}")


class EpochClock:
    """Seconds of one epoch, and where it was entered: after a resume perhaps in its middle."""

    def __init__(self, run: Run, position: int, checkpoint_seconds: float = 0.0):
        self._images_per_step = len(run.program.tags) * run.program.plan.batch_size
        self._position = position
        self._started = time.perf_counter()
        self.checkpoint_seconds = checkpoint_seconds

    def seconds(self) -> float:
        return time.perf_counter() - self._started

    def images_per_second(self, position: int) -> float:
        """Since the epoch was entered, over all members."""
        return (position - self._position) * self._images_per_step / self.seconds()


def mean_of(rows: Sequence[Mapping[str, float | None]]) -> dict[str, float]:
    """Return the mean over members of each named number, without those that no member has."""
    known = {name: [value for row in rows if (value := row[name]) is not None] for name in rows[0]}
    return {name: float(np.mean(values)) for name, values in known.items() if values}
