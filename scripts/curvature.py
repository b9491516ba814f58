"""How curved the loss is, and where: python scripts/curvature.py RUN_DIR [--flag VALUE ...]."""

import dataclasses
import itertools
import json
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import tyro
from benchmarks import results_page

from mlp_research.analysis import curvature, curvature_figures, saved_run
from mlp_research.analysis.curvature import Curvature, Matrix, SpectralDensity
from mlp_research.analysis.curvature_figures import Panel
from mlp_research.analysis.saved_run import SavedModel, SavedRunFlags, SplitName
from mlp_research.config import Config
from mlp_research.data.batches import Batch
from mlp_research.errors import ConfigError
from mlp_research.models import Model
from mlp_research.optimizers import SGDConfig
from mlp_research.optimizers.schedules import ConstantConfig
from mlp_research.prng import stream_key
from mlp_research.programs.single import Experiment
from mlp_research.shapes import RandomKey
from mlp_research.storage.run_folder import RunFolderError, write_atomically
from mlp_research.sweep import tables
from mlp_research.terminal import command_line
from mlp_research.terminal.report import Report, aligned

MATRICES: dict[Matrix, str] = {"hessian": "Hessian", "gauss-newton": "Gauss-Newton"}
GRID_POINTS = 1600
WIDTH = 1 / 250
"""Standard deviation to which an eigenvalue is spread in the picture, in widths of the axis."""


@dataclasses.dataclass(frozen=True)
class Flags(SavedRunFlags):
    """Which curvature is measured, and how well."""

    split: SplitName = "train"
    """Rows whose mean loss is looked at."""
    examples: int = 5000
    """The first so many of them; all where there are fewer."""
    matrix: Matrix = "hessian"
    """Whose spectrum is drawn; the sharpness is that of both."""
    top: int = 5
    """Largest eigenvalues that are computed."""
    tolerance: float = 1e-4
    """Largest relative residual of an eigenvalue; its error is about the square of it."""
    trace_probes: int = 32
    """Random vectors of the trace, each one product."""
    probes: int = 4
    """Random vectors of the spectral density, each as many products as --depth."""
    depth: int = 64
    """Lanczos steps of the spectral density."""
    points: int = 6
    """States along the run at which the sharpness is measured, both ends among them."""
    microbatch: int | None = None
    """Examples in memory at once, a divisor of --examples; by default all."""
    record: bool = False
    """Write the tables into docs/results.md."""


def main(argv: Sequence[str]) -> None:
    flags = tyro.cli(Flags, args=argv, description="Measure how curved the loss of a run is.")
    experiment = saved_run.open_run(flags)
    batch = chosen_rows(experiment, flags)
    end = saved_run.restore(experiment, flags)
    report = Report()
    report.facts(facts(experiment, flags, end, batch))
    key = stream_key(experiment.config.seed, "curvature")
    spectra, sharpness = [], []
    for state in states(experiment, flags, end):
        model, step = on_one_device(state.model), state.step
        largest = {name: largest_of(model, batch, name, flags, key) for name in MATRICES}
        sharpness.append({"step": step, "loss": float(mean_loss(model, batch))} | largest)
        said = ", ".join(f"{largest[name]:.4g} ({MATRICES[name]})" for name in MATRICES)
        report.facts({f"step {step:,}": f"loss {sharpness[-1]['loss']:.4f}, largest {said}"})
        if step in (0, end.step):
            spectra.append({"step": step} | spectrum_of(model, batch, flags, key))
    for line in aligned(*spectra_table(spectra)):
        report.say(f"  {line}")
    numbers = {
        "split": flags.split,
        "examples": len(batch.labels),
        "matrix": flags.matrix,
        "parameters": curvature.count(curvature.partition(end.model)[0]),
        "sharpness": sharpness,
        "spectra": spectra,
    }
    report.facts({"written": " ".join(write(experiment, flags, numbers))})
    if flags.record:
        record(flags, argv, numbers)


def chosen_rows(experiment: Experiment, flags: Flags) -> Batch:
    """The rows whose mean loss is looked at, on one device."""
    for name, least in (("examples", 1), ("points", 2), ("top", 1)):
        if getattr(flags, name) < least:
            raise ConfigError(f"--{name} is {getattr(flags, name)}: use at least {least}")
    rows = saved_run.chosen_split(experiment, flags.split).rows(flags.examples)
    return jax.tree.map(jnp.asarray, saved_run.analysed(experiment, rows))


def facts(experiment: Experiment, flags: Flags, end: SavedModel, batch: Batch) -> dict[str, str]:
    """What the numbers are of."""
    return {
        "run": str(flags.run_dir),
        "state": f"step {end.step:,} of {experiment.plan.total_steps:,}, "
        f"the {flags.checkpoint} that was saved",
        "loss": f"mean cross-entropy of the first {len(batch.labels):,} {flags.split} rows, "
        "randomness off, without weight decay and label smoothing",
    }


def states(experiment: Experiment, flags: Flags, end: SavedModel) -> Iterator[SavedModel]:
    """The initialisation, ends of epochs evenly spread, the first among them, and the saved state.

    All but the last are trained anew from the run's seed.
    """
    last, length = end.step, experiment.plan.steps_per_epoch
    ends = [*range(length, last, length), last]
    picked = np.linspace(len(ends) - 1, 0, flags.points - 1).round().astype(int)
    steps = sorted({0, *(ends[index] for index in picked)} - {last})
    return itertools.chain(saved_run.models_along(experiment, steps), [end])


def on_one_device(model: Model) -> Model:
    """The model for programs that are not spread over a mesh."""
    arrays, static = eqx.partition(model, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, jax.local_devices()[0]), static)


@eqx.filter_jit
def mean_loss(model: Model, batch: Batch) -> jax.Array:
    return curvature.mean_loss(*curvature.partition(model), batch)


def largest_of(model: Model, batch: Batch, matrix: Matrix, flags: Flags, key: RandomKey) -> float:
    product = Curvature(model, batch, matrix, flags.microbatch)
    pairs = curvature.top_eigenvalues(
        product, product.parameters, 1, key=key, tolerance=flags.tolerance
    )
    return float(pairs.values[0])


def spectrum_of(model: Model, batch: Batch, flags: Flags, key: RandomKey) -> dict[str, Any]:
    """The chosen matrix's largest eigenvalues, trace and density, as plain numbers."""
    product = Curvature(model, batch, flags.matrix, flags.microbatch)
    like, (start, signs, probes) = product.parameters, jr.split(key, 3)
    pairs = curvature.top_eigenvalues(
        product, like, flags.top, key=start, tolerance=flags.tolerance
    )
    trace = curvature.trace(product, like, key=signs, probes=flags.trace_probes)
    density = curvature.spectral_density(
        product, like, key=probes, probes=flags.probes, depth=flags.depth
    )
    return {
        "loss": float(mean_loss(model, batch)),
        "eigenvalues": pairs.values.tolist(),
        "residuals": pairs.residuals.tolist(),
        "lanczos_steps": pairs.depth,
        "trace": float(trace.mean),
        "trace_standard_error": float(trace.standard_error),
        "nodes": density.nodes.tolist(),
        "weights": density.weights.tolist(),
    }


def spectra_table(spectra: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """(headings, rows), a column for each state."""
    rows = [
        ["mean cross-entropy (nats)", *(f"{each['loss']:.4f}" for each in spectra)],
        *(
            [f"eigenvalue {index + 1} (residual)"]
            + [
                f"{each['eigenvalues'][index]:.5g} ({each['residuals'][index]:.0e})"
                for each in spectra
            ]
            for index in range(len(spectra[0]["eigenvalues"]))
        ),
        ["Lanczos steps", *(str(each["lanczos_steps"]) for each in spectra)],
        ["smallest, at most", *(f"{np.min(each['nodes']):.3g}" for each in spectra)],
        ["trace (standard error)"]
        + [f"{each['trace']:.4g} ({each['trace_standard_error']:.2g})" for each in spectra],
    ]
    return ["", *map(name_of, spectra)], rows


def name_of(spectrum: dict[str, Any]) -> str:
    return f"step {spectrum['step']:,}" if spectrum["step"] else "initialisation"


def write(experiment: Experiment, flags: Flags, numbers: dict[str, Any]) -> list[str]:
    """Both pictures and the numbers into the run's folder; their names."""
    choices = (*((flags.split, "train"), (flags.checkpoint, "last"), (flags.matrix, "hessian")),)
    ending = "".join(f"-{choice}" for choice, usual in choices if choice != usual)
    names = [f"spectrum{ending}.png", f"sharpness{ending}.png", f"curvature{ending}.json"]
    spectrum, sharpness, document = (flags.run_dir / name for name in names)
    about = f"first {numbers['examples']:,} {flags.split} rows, run {flags.run_dir.resolve().name}"
    try:
        draw_spectrum(spectrum, numbers, about)
        points = numbers["sharpness"]
        curvature_figures.sharpness(
            sharpness,
            [point["step"] for point in points],
            {MATRICES[name]: [point[name] for point in points] for name in MATRICES},
            threshold(experiment.config),
            title=f"Sharpness of the mean loss\n{about}",
        )
        write_atomically(document, json.dumps(numbers, indent=2) + "\n")
    except OSError as error:
        raise RunFolderError(
            f"the results cannot be written into {flags.run_dir}: {error.strerror or error}"
        ) from None
    return names


def draw_spectrum(path: Path, numbers: dict[str, Any], about: str) -> None:
    spectra = numbers["spectra"]
    ends = [f(each["nodes"]) for each in spectra for f in (np.min, np.max)]
    margin = 0.03 * (max(ends) - min(ends))
    low, high = min(ends) - margin, max(ends) + margin
    grid, width = np.linspace(low, high, GRID_POINTS), WIDTH * (high - low)
    panels = []
    for each in spectra:
        density = SpectralDensity(jnp.asarray(each["nodes"]), jnp.asarray(each["weights"]))
        shares = np.asarray(density.smoothed(jnp.asarray(grid), width))
        trace = f"trace {each['trace']:.3g} ± {each['trace_standard_error']:.2g}"
        caption = f"{name_of(each)}: loss {each['loss']:.3g}, {trace}"
        largest = np.array(each["eigenvalues"])
        panels.append(Panel(caption, numbers["parameters"] * shares, largest))
    matrix = MATRICES[numbers["matrix"]]
    title = f"The {numbers['parameters']:,} eigenvalues of the {matrix}\n{about}"
    curvature_figures.spectrum(path, grid, width, panels, title=title)


def threshold(config: Config) -> float | None:
    """2 / learning rate where the run is plain gradient descent with a constant rate."""
    rule, schedule = config.optimizer, config.schedule
    plain = (
        isinstance(rule, SGDConfig)
        and isinstance(schedule, ConstantConfig)
        and not (rule.momentum or rule.weight_decay or rule.clip_norm)
    )
    return 2 / rule.learning_rate if plain else None


def record(flags: Flags, argv: Sequence[str], numbers: dict[str, Any]) -> None:
    """The tables into docs/results.md."""
    words = ["RUN_DIR" if word == str(flags.run_dir) else word for word in argv]
    points = [
        [f"{point['step']:,}", f"{point['loss']:.4f}", *(f"{point[name]:.4g}" for name in MATRICES)]
        for point in numbers["sharpness"]
    ]
    about = (
        f"{MATRICES[flags.matrix]} of the mean loss of the first {numbers['examples']:,} "
        f"{flags.split} rows, {numbers['parameters']:,} parameters."
    )
    headings = ("step", "mean cross-entropy", *(f"largest, {MATRICES[name]}" for name in MATRICES))
    body = [about, "", *tables.table(*spectra_table(numbers["spectra"])), ""]
    body += tables.table(headings, points)
    command = shlex.join(["python", "scripts/curvature.py", *words])
    results_page.record(results_page.DOCUMENT, "curvature", "Curvature", command, body)


if __name__ == "__main__":
    command_line.run(main)
