"""Which images have the largest gradients, and why? python scripts/per_example_gradients.py RUN_DIR

At initialisation, after one epoch and at the end. Two pictures are left in the run's folder.
"""

import dataclasses
import shutil
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np
import optax
import tyro
from benchmarks import results_page
from jax.sharding import SingleDeviceSharding
from jaxtyping import Array

from mlp_research.analysis import per_example_figures, predictions
from mlp_research.analysis.per_example import (
    NoiseScale,
    factored_norms,
    gradient_noise_scale,
    mean_gradient,
)
from mlp_research.analysis.saved_run import (
    SavedModel,
    SavedRunFlags,
    analysed,
    models_along,
    open_run,
    restore,
)
from mlp_research.data.batches import Batch
from mlp_research.data.inputs import scaled
from mlp_research.errors import ConfigError
from mlp_research.figures import are_images
from mlp_research.models import Model
from mlp_research.programs.single import Experiment
from mlp_research.storage.run_folder import RunFolderError
from mlp_research.sweep import tables
from mlp_research.system import sharding
from mlp_research.terminal import command_line
from mlp_research.terminal.report import Report, aligned

SHEET, NORMS = "largest_gradients.png", "gradient_norms.png"
WEAK = 0.3
"""Below this size a rank correlation is called none."""


@dataclasses.dataclass(frozen=True)
class Flags(SavedRunFlags):
    """What is looked at."""

    examples: int = 32
    """Images on the sheet: those of the test rows with the largest gradients at the end."""
    rows: int = 4096
    """First training rows, from which noise scale and clipping are measured."""
    microbatch: int = 1000
    """Examples whose gradients are worked on at once."""
    record: bool = False
    """Write the table into docs/results.md, and the pictures beside it."""


@dataclasses.dataclass(frozen=True)
class Moment:
    """The model at one time of its run, example by example; all on the host."""

    name: str
    step: int
    norms: np.ndarray
    """Gradient norm of each test row."""
    chances: np.ndarray
    """Probability of each class, for each test row."""
    losses: np.ndarray
    """Cross-entropy of each test row, in nats."""
    wrong: np.ndarray
    """Whether each test row is misclassified."""
    training_norms: np.ndarray
    """Gradient norm of each of the first training rows."""
    noise: NoiseScale


def main(argv: Sequence[str]) -> None:
    flags = tyro.cli(Flags, args=argv, description=__doc__)
    if flags.examples < 1:
        raise ConfigError(f"--examples is {flags.examples}: a sheet shows at least one image")
    experiment = open_run(flags)
    moments = measured(experiment, flags)
    bound, source = clipping_bound(experiment, moments)
    headings, rows = table(experiment, moments, bound)
    sentences = answer(experiment, moments)
    report = Report()
    report.facts(
        {
            "run": str(flags.run_dir),
            "data": f"{len(experiment.data.test):,} test rows; noise scale and clipping: the first "
            f"{len(moments[0].training_norms):,} training rows",
            "bound": f"{bound:.4g}, {source}",
        }
    )
    for line in aligned(headings, rows):
        report.say(f"  {line}")
    for sentence in sentences:
        report.say(sentence)
    draw(experiment, flags, moments)
    sheet = f"{SHEET} " if are_images(experiment.data.image_shape) else ""
    report.facts({"pictures": f"{sheet}{NORMS}"})
    if flags.record:
        note = f"Clipped: the share of gradients longer than {bound:.4g}, {source}."
        record(flags, [*tables.table(headings, rows), "", *sentences, note])


def measured(experiment: Experiment, flags: Flags) -> list[Moment]:
    """The three moments: initialisation, after one epoch, the checkpoint."""
    training = experiment.data.train.rows(flags.rows)

    @eqx.filter_jit
    def norms_and_logits(model: Model, batch: Batch) -> tuple[Array, Array]:
        evaluated = eqx.nn.inference_mode(model)
        logits = jax.lax.map(
            lambda image: evaluated(scaled(image)), batch.images, batch_size=flags.microbatch
        )
        return factored_norms(model, batch, microbatch=flags.microbatch), logits

    @eqx.filter_jit
    def norms_and_mean(model: Model, batch: Batch) -> tuple[Array, Array]:
        gradient = mean_gradient(model, batch, microbatch=flags.microbatch)
        norms = factored_norms(model, batch, microbatch=flags.microbatch)
        return norms, optax.tree.norm(gradient)

    def moment(name: str, state: SavedModel) -> Moment:
        model = sharding.place(state.model, SingleDeviceSharding(jax.devices()[0]))
        test = experiment.data.test
        norms, logits = map(np.asarray, norms_and_logits(model, analysed(experiment, test)))
        training_norms, norm_of_mean = norms_and_mean(model, analysed(experiment, training))
        training_norms = np.asarray(training_norms)
        return Moment(
            name=name,
            step=state.step,
            norms=norms,
            chances=predictions.probabilities(logits),
            losses=losses(logits, test.labels),
            wrong=logits.argmax(axis=1) != test.labels,
            training_norms=training_norms,
            noise=gradient_noise_scale(training_norms, norm_of_mean),
        )

    plan, end = experiment.plan, restore(experiment, flags)
    names = ("initialisation", "after one epoch")
    states = models_along(experiment, (0, plan.steps_per_epoch))
    moments = [moment(name, state) for name, state in zip(names, states, strict=True)]
    name = "the end" if end.step == plan.total_steps else f"the {flags.checkpoint} saved"
    return [*moments, moment(name, end)]


def losses(logits: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Cross-entropies in float64, exact also where a probability rounds to one."""
    from scipy.special import logsumexp

    rows = np.arange(len(labels))
    above = logits.astype(np.float64)
    above -= above[rows, labels][:, None]
    above[rows, labels] = -np.inf
    return np.logaddexp(0, logsumexp(above, axis=1))


def clipping_bound(experiment: Experiment, moments: list[Moment]) -> tuple[float, str]:
    """(the norm at which gradients are clipped, where it comes from)."""
    clip_norm = experiment.config.optimizer.clip_norm
    if clip_norm is not None:
        return clip_norm, "the run's own clip norm"
    median = float(np.median([moment.training_norms for moment in moments]))
    return median, "the median of all three times, as Abadi et al. 2016 advise"


def table(
    experiment: Experiment, moments: list[Moment], bound: float
) -> tuple[list[str], list[list[str]]]:
    """(headings, a row for each moment)."""
    sizes = image_sizes(experiment)
    headings = ["time", "step", "median norm", "largest", "norm ~ loss", "norm ~ image"]
    headings += ["wrong of top 1 %", "wrong of all", "noise scale", f"over {bound:.3g}"]
    rows = [
        [
            moment.name,
            f"{moment.step:,}",
            f"{np.median(moment.norms):.3g}",
            f"{moment.norms.max():.3g}",
            f"{rank_correlation(moment.norms, moment.losses):.3f}",
            f"{rank_correlation(moment.norms, sizes):.3f}",
            f"{100 * moment.wrong[largest(moment.norms)].mean():.1f} %",
            f"{100 * moment.wrong.mean():.2f} %",
            f"{moment.noise.scale:,.0f}",
            f"{100 * (moment.training_norms > bound).mean():.1f} %",
        ]
        for moment in moments
    ]
    return headings, rows


def image_sizes(experiment: Experiment) -> np.ndarray:
    """Return the norm of each test image; of pixels in [0, 1], how much ink it has."""
    return np.linalg.norm(np.asarray(scaled(experiment.data.test.images), np.float64), axis=1)


def rank_correlation(one: np.ndarray, other: np.ndarray) -> float:
    """Spearman's."""
    from scipy.stats import spearmanr

    result: Any = spearmanr(one, other)
    return float(result.statistic)


def largest(norms: np.ndarray, count: int | None = None) -> np.ndarray:
    """The rows with the largest norms, the largest first; by default 1 % of all."""
    count = max(1, round(len(norms) / 100)) if count is None else count
    return np.argsort(-norms, kind="stable")[:count]


def answer(experiment: Experiment, moments: list[Moment]) -> list[str]:
    """Which images have the largest gradients, and what their norms go with."""
    start, end = moments[0], moments[-1]
    top = largest(end.norms)
    wrong, all_wrong = int(end.wrong[top].sum()), end.wrong.mean()
    chance = float(np.median(end.chances[top, experiment.data.test.labels[top]]))
    which = (
        f"Which: of the {len(top)} test images with the largest gradients at step {end.step:,}, "
        f"{wrong} are misclassified ({100 * wrong / len(top):.1f} %, of all {100 * all_wrong:.2f} "
        f"%), and their median probability of the true class is {100 * chance:.2g} %."
    )
    sizes = image_sizes(experiment)
    why = (
        f"Why: at step {start.step:,} the norm goes with {partner(start, sizes)}, "
        f"at step {end.step:,} with {partner(end, sizes)}."
    )
    return [which, why]


def partner(moment: Moment, sizes: np.ndarray) -> str:
    """What the norms are correlated with, and how strongly."""
    found = {
        "the loss": rank_correlation(moment.norms, moment.losses),
        "the size of the image": rank_correlation(moment.norms, sizes),
    }
    told = [f"{name} (rank correlation {value:.2f})" for name, value in found.items()]
    strong = [text for text, value in zip(told, found.values(), strict=True) if abs(value) >= WEAK]
    return " and ".join(strong) if strong else f"neither {' nor '.join(told)}"


def draw(experiment: Experiment, flags: Flags, moments: list[Moment]) -> None:
    """Write both pictures into the run's folder."""
    end, test, shape = moments[-1], experiment.data.test, experiment.data.image_shape
    rows = largest(end.norms, flags.examples)
    captions = [
        f"label {label}, predicted {end.chances[row].argmax()}\n"
        f"{probability(end.chances[row, label])}, norm {end.norms[row]:#.3g}"
        for row in rows
        for label in [int(test.labels[row])]
    ]
    run = f"run {flags.run_dir.resolve().name}"
    points = [
        per_example_figures.Points(
            f"{moment.name}, step {moment.step:,}\n"
            f"rank correlation {rank_correlation(moment.norms, moment.losses):.3f}, "
            f"{100 * moment.wrong.mean():.1f} % misclassified",
            moment.losses,
            moment.norms,
            moment.wrong,
        )
        for moment in moments
    ]
    try:
        if are_images(shape):
            per_example_figures.largest_gradients(
                flags.run_dir / SHEET,
                test.images[rows].reshape(-1, *shape),
                captions,
                title=f"The largest gradients of {len(test):,} test rows, step {end.step:,} of "
                f"{run}\nunder label and prediction: the probability of the label, the norm of the "
                "gradient",
            )
        per_example_figures.gradient_norms(
            flags.run_dir / NORMS, points, title=f"{len(test):,} test rows, {run}"
        )
    except OSError as error:
        raise RunFolderError(
            f"the pictures cannot be written into {flags.run_dir}: {error.strerror or error}"
        ) from None


def probability(chance: float) -> str:
    return f"{100 * chance:.2f} %" if chance >= 0.00005 else "< 0.01 %"


def record(flags: Flags, lines: list[str]) -> None:
    """The section of docs/results.md, with copies of the pictures beside it."""
    for name in (SHEET, NORMS):
        shutil.copyfile(flags.run_dir / name, results_page.DOCUMENT.parent / name)
    pictures = [
        f"![The images with the largest gradients]({SHEET})",
        f"![Gradient norm against loss]({NORMS})",
    ]
    command = f"python scripts/per_example_gradients.py {flags.run_dir}"
    title = "Which images have the largest gradients"
    results_page.record(
        results_page.DOCUMENT, "per-example", title, command, [*lines, "", *pictures]
    )


if __name__ == "__main__":
    command_line.run(main)
