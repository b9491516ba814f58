"""The exact numbers of a saved run: python scripts/evaluate.py RUN_DIR [--flag VALUE ...]."""

import dataclasses
import math
import operator
from collections.abc import Sequence
from typing import Annotated, Any

import equinox as eqx
import numpy as np
import tyro
from jaxtyping import Array

from mlp_research import figures
from mlp_research.analysis import predictions
from mlp_research.analysis.saved_run import (
    SavedRunFlags,
    SplitName,
    chosen_split,
    open_run,
    restore,
)
from mlp_research.base_config import json_value
from mlp_research.data.batches import MaskedBatch, Split
from mlp_research.models import Model
from mlp_research.objectives import Evaluation, Sums
from mlp_research.programs.single import Experiment
from mlp_research.step import Recipe, batch_logits, eval_step
from mlp_research.storage.run_folder import RunFolderError
from mlp_research.system import sharding
from mlp_research.terminal import command_line
from mlp_research.terminal.report import Report, aligned

WORST = 25
"""How many of the most confident mistakes are shown."""
WORST_LISTED, FEATURES_LISTED = 10, 6
"""How many are listed, and with how many of their features, where rows are no images."""


@dataclasses.dataclass(frozen=True)
class Flags(SavedRunFlags):
    """What is evaluated. Only two pictures are written into the run's folder."""

    split: SplitName = "test"
    """Rows that are evaluated."""
    batch_size: Annotated[int, tyro.conf.arg(name="evaluation.batch-size")] = 1000
    """Examples evaluated at once, over all devices."""


def main(argv: Sequence[str]) -> None:
    flags = tyro.cli(Flags, args=argv, description="Evaluate a saved run, example by example.")
    experiment = open_run(flags, flags.batch_size, other_data=True, only_evaluated=True)
    split = chosen_split(experiment, flags.split)
    saved = restore(experiment, flags)
    evaluation, logits = answers(experiment, saved.model, split)
    chances = predictions.probabilities(logits)
    counts = predictions.confusion_counts(split.labels, logits.argmax(axis=1), logits.shape[1])
    report, unit = Report(), experiment.config.objective.unit
    about = facts(experiment, flags, saved.step)
    report.facts(about | numbers(evaluation, chances, split.labels, unit))
    for line in class_table(counts):
        report.say(f"  {line}")
    if not figures.are_images(experiment.data.image_shape):
        for line in worst_rows(chances, split):
            report.say(f"  {line}")
    report.facts({"pictures": draw(experiment, flags, saved.step, counts, chances, split)})
    if has_other_data(experiment):
        record = "nothing to compare: the run was not trained on these data"
    else:
        record = agreement(flags, saved.step, evaluation)
    report.facts({"record": record})


def has_other_data(experiment: Experiment) -> bool:
    """Whether --data.dir names other data than the run's."""
    return experiment.config.data.crc32 != experiment.data.crc32


def answers(experiment: Experiment, model: Model, split: Split) -> tuple[Evaluation, np.ndarray]:
    """(the run's own evaluation, logits [examples, classes]) of a model, by one program."""
    kept = []

    @eqx.filter_jit
    def sums_and_logits(model: Model, recipe: Recipe, batch: MaskedBatch) -> tuple[Sums, Array]:
        sums = eval_step(model, recipe, batch)
        return sharding.replicate(experiment.mesh, (sums, batch_logits(model, recipe, batch)))

    def step(model: Model, recipe: Recipe, batch: MaskedBatch) -> Sums:
        sums, logits = sums_and_logits(model, recipe, batch)
        kept.append(np.asarray(logits))
        return sums

    evaluation = dataclasses.replace(experiment, eval_step=step).evaluate(model, split)
    return evaluation, np.concatenate(kept)[: len(split)]


def facts(experiment: Experiment, flags: Flags, step: int) -> dict[str, str]:
    """What the numbers are of."""
    total, length = experiment.plan.total_steps, experiment.plan.steps_per_epoch
    standing = f"step {step:,} of {total:,}"
    if step < total:
        standing += f", after {step / length:.4g} of {experiment.plan.epochs} epochs"
    return {
        "run": str(flags.run_dir),
        "state": f"{standing}, the {flags.checkpoint} that was saved",
        "data": f"{flags.split} rows of {experiment.execution.data_dir}",
    }


def numbers(
    evaluation: Evaluation, chances: np.ndarray, labels: np.ndarray, unit: str
) -> dict[str, str]:
    right = chances.argmax(axis=1) == labels
    calibration = predictions.calibration_error(chances.max(axis=1), right)
    further = {name: f"{mean:.6g}" for name, mean in evaluation.measured.items()}
    return {
        "accuracy": f"{100 * evaluation.accuracy:.2f} % "
        f"({evaluation.correct} of {evaluation.total})",
        "loss": f"{evaluation.loss:.9g} {unit}".rstrip(),
        "calibration error": f"{100 * calibration:.3f} % (expected, {predictions.BINS} bins)",
        "Brier score": f"{predictions.brier_score(chances, labels):.5f}",
    } | further


def class_table(counts: np.ndarray) -> list[str]:
    """One line for each class. A class's accuracy is its recall."""

    def percent(share: float) -> str:
        return "-" if math.isnan(share) else f"{100 * share:.2f} %"

    recall, precision = predictions.recall(counts), predictions.precision(counts)
    rows = [
        (
            *(str(index), f"{row.sum():,}", f"{row[index]:,}"),
            *(percent(recall[index]), percent(precision[index]), most_taken_for(row, index)),
        )
        for index, row in enumerate(counts)
    ]
    headings = ("class", "rows", "correct", "accuracy (recall)", "precision", "most taken for")
    return aligned(headings, rows)


def worst_rows(chances: np.ndarray, split: Split) -> list[str]:
    """Return one line for each of the most confident mistakes of rows that are no images."""
    rows = predictions.worst(chances, split.labels, WORST_LISTED)
    shown = min(split.images.shape[1], FEATURES_LISTED)
    lines = [
        (
            *(f"{row}", f"{split.labels[row]}", f"{chances[row].argmax()}"),
            *(probability(chances[row].max()), *(f"{x:.4g}" for x in split.images[row, :shown])),
        )
        for row in rows
    ]
    features = [f"feature {index}" for index in range(shown)]
    return aligned(("worst row", "label", "predicted", "probability", *features), lines)


def most_taken_for(row: np.ndarray, label: int) -> str:
    """The class that a label's rows are most often mistaken for, and how often."""
    mistakes = np.where(np.arange(len(row)) == label, 0, row)
    return f"{mistakes.argmax()} ({mistakes.max()})" if mistakes.any() else "-"


def draw(
    experiment: Experiment,
    flags: Flags,
    step: int,
    counts: np.ndarray,
    chances: np.ndarray,
    split: Split,
) -> str:
    """Write the confusion matrix and the worst mistakes into the run's folder; their names."""
    choices = [(flags.split, "test"), (flags.checkpoint, "last")]
    if has_other_data(experiment):
        choices.append((experiment.execution.data_dir.resolve().name, ""))
    ending = "".join(f"-{choice}" for choice, usual in choices if choice != usual)
    names = [f"confusion{ending}.png", f"worst{ending}.png"]
    about = f"{flags.split} rows, step {step:,} of run {flags.run_dir.resolve().name}"
    total, right = int(counts.sum()), int(counts.trace())
    shape = experiment.data.image_shape
    try:
        figures.confusion(
            flags.run_dir / names[0],
            counts,
            title=f"{right:,} of {total:,} right ({100 * right / total:.2f} %)\n{about}",
        )
        if not figures.are_images(shape):
            return names[0]
        rows = predictions.worst(chances, split.labels, WORST)
        captions = [
            f"label {split.labels[row]}, predicted {chances[row].argmax()}\n"
            f"{probability(chances[row].max())}, row {row}"
            for row in rows
        ]
        figures.images_sheet(
            flags.run_dir / names[1],
            split.images[rows].reshape(-1, *shape),
            captions,
            title=f"The most confident mistakes: {len(rows)} of {total - right:,}\n{about}",
        )
    except OSError as error:
        raise RunFolderError(
            f"the pictures cannot be written into {flags.run_dir}: {error.strerror or error}"
        ) from None
    return " ".join(names)


def probability(chance: float) -> str:
    """In percent; never 100 %, which a mistake does not have."""
    return f"{100 * chance:.2f} %" if chance < 0.99995 else "> 99.99 %"


def agreement(flags: Flags, step: int, evaluation: Evaluation) -> str:
    """What the run itself wrote of this split at this step, and whether it is equal.

    Raises `RunFolderError` where it is not.
    """
    record = recorded(flags, step)
    if record is None:
        return f"the run wrote nothing of its {flags.split} rows at step {step:,}"
    where, written = record
    counts_equal = all(written[name] == getattr(evaluation, name) for name in ("correct", "total"))
    difference = abs(written["loss"] - evaluation.loss) / max(abs(written["loss"]), 1e-30)
    if counts_equal and difference <= 1e-5:  # what other devices may round differently
        return f"equal to {where}: the counts exactly, the loss to {difference:.1g}"
    raise RunFolderError(
        f"{where} says {written['correct']} of {written['total']} and loss {written['loss']:.9g}, "
        f"not {evaluation.correct} of {evaluation.total} and {evaluation.loss:.9g}: "
        "the data or the folder are not those of the run"
    )


def recorded(flags: Flags, step: int) -> tuple[str, dict[str, Any]] | None:
    """(where it is written, the numbers) of the split at a step."""
    result, metrics = flags.run_dir / "result.json", flags.run_dir / "metrics.jsonl"
    try:
        if result.exists():
            summary = json_value(result.read_bytes())
            if summary["steps"] == step and summary.get(flags.split):
                return result.name, counted(summary[flags.split])
        # A running run may be in the middle of its last line.
        lines = metrics.read_bytes().split(b"\n")[:-1]
        for line in reversed(lines):
            values = json_value(line)
            if (values["split"], values["step"]) == (flags.split, step) and "total" in values:
                return metrics.name, counted(values)
    except (OSError, ValueError, LookupError, TypeError, OverflowError) as error:
        raise RunFolderError(
            f"{result.name} or {metrics.name} in {flags.run_dir} cannot be read: "
            f"{type(error).__name__}: {error}"
        ) from None
    return None


def counted(values: Any) -> dict[str, Any]:
    """The numbers of a split as a run writes them. Raises what a value that is no number raises."""
    counts = {name: operator.index(values[name]) for name in ("correct", "total")}
    return counts | {"loss": float(values["loss"])}


if __name__ == "__main__":
    command_line.run(main)
