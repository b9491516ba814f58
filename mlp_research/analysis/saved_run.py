"""A run that was saved, opened to be looked at: nothing in its folder is locked or changed."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import tyro

from mlp_research.checkpoints.checkpoint import CheckpointError, Checkpoints
from mlp_research.config import Config, Execution, differences, read_config
from mlp_research.data.batches import Batch, Split
from mlp_research.errors import ConfigError
from mlp_research.models import Model
from mlp_research.programs.single import Experiment
from mlp_research.step import TrainState
from mlp_research.storage.environment import trained_on
from mlp_research.storage.run_folder import RunFolderError, check_links, read_json
from mlp_research.system import compile_cache
from mlp_research.terminal import command_line

EVALUATED = ("data", "model", "objective")
"""The families that an evaluation needs."""
SplitName = Literal["test", "validation", "train"]


@dataclasses.dataclass(frozen=True)
class SavedRunFlags:
    """Which saved run, and which state of it."""

    run_dir: Annotated[Path, tyro.conf.arg(metavar="RUN_DIR"), tyro.conf.Positional]
    """Folder of the run; it may still be running."""
    checkpoint: Literal["last", "best"] = "last"
    """The newest state that was saved, or the best by validation accuracy."""
    model: Annotated[str | None, tyro.conf.arg(metavar="FILE:NAME")] = None
    """path.py:ConfigName of a model from outside: a run folder runs no code by itself."""
    part_files: command_line.PartFiles = ()
    """Python file that defines parts of the run; repeat it for several files."""
    data_dir: Annotated[Path | None, tyro.conf.arg(name="data.dir", metavar="PATH")] = None
    """Folder of the data; by default the one that the run was trained on."""
    mesh_data: Annotated[int | None, tyro.conf.arg(name="mesh.data", metavar="INT")] = None
    """Devices over which each batch is spread; by default all."""
    compile_cache: bool = True
    """Keep compiled programs in the user's cache, so that the next start is quicker."""


def open_run(
    flags: SavedRunFlags,
    evaluation_batch_size: int = 1000,
    *,
    other_data: bool = False,
    only_evaluated: bool = False,
) -> Experiment:
    """Return the experiment of a run folder. Switches the compile cache on, if it is wanted.

    With `only_evaluated`, the files of parts that evaluation does not need can be missing.
    `other_data` lets `flags.data_dir` hold other data than the run's.
    """
    if flags.compile_cache:
        compile_cache.enable()
    command_line.bring(flags.part_files)
    if flags.model is not None:
        command_line.kind_in_file(flags.model)
    _refuse_many_runs(flags.run_dir)
    check_links(flags.run_dir)
    config = read_config(flags.run_dir, EVALUATED if only_evaluated else None)
    execution = Execution(
        data_dir=flags.data_dir or trained_on(flags.run_dir),
        evaluation_batch_size=evaluation_batch_size,
        mesh_data=flags.mesh_data,
        resident=False,  # the training rows are seldom needed on the device
    )
    if not (other_data and flags.data_dir):
        return Experiment.of(config, execution, only_evaluated=only_evaluated)
    experiment = Experiment.of(config.on(None), execution, only_evaluated=only_evaluated)
    recipe = experiment.recipe
    if config.data.normalize:  # by the rows that the run was trained on, wherever others come from
        own = execution.model_copy(update={"data_dir": trained_on(flags.run_dir)})
        trained = Experiment.of(config, own, only_evaluated=only_evaluated)
        recipe = dataclasses.replace(recipe, inputs=trained.recipe.inputs)
    return dataclasses.replace(experiment, configs=(config,), recipe=recipe)


def _refuse_many_runs(run_dir: Path) -> None:
    document = read_json(run_dir / "config.json")
    if isinstance(document, dict) and "members" in document:
        held, numbers = "members of one program", "result.json"
    elif (run_dir / "plan.json").exists():
        held, numbers = "a sweep", "summary.json"
    else:
        return
    raise RunFolderError(
        f"{run_dir} holds {held}, not one run: the numbers are in its {numbers}. To look at one of "
        "its runs, train that alone, with its seed and settings: it will be the same to the bit"
    )


def chosen_split(experiment: Experiment, name: SplitName) -> Split:
    """The rows of a split. Raises `ConfigError` where the run holds out none."""
    data = experiment.data
    split = {"test": data.test, "validation": data.validation, "train": data.train}[name]
    if not len(split):
        raise ConfigError(
            "the run holds out no validation rows (data.validation is 0): use --split test or train"
        )
    return split


def analysed(experiment: Experiment, split: Split) -> Batch:
    """Return rows as the functions of `analysis` take them: standardised, where the run's were."""
    if experiment.recipe.inputs.mean is None:
        return Batch(split.images, split.labels)
    return Batch(experiment.recipe.inputs(split.images), split.labels)


class SavedModel(eqx.Module):
    """A model of a run, as it is evaluated, and the steps that it was trained for."""

    model: Model
    step: int = eqx.field(static=True)


def restore(experiment: Experiment, flags: SavedRunFlags) -> SavedModel:
    """Return the chosen checkpoint's model. Raises `CheckpointError` where it is damaged.

    No other checkpoint is taken in its place.
    """
    directory = flags.run_dir / "checkpoints"
    if not directory.is_dir():
        raise CheckpointError(f"{flags.run_dir} holds no checkpoint yet")
    with Checkpoints(directory, reading=True) as checkpoints:
        step = _chosen_step(checkpoints, flags, experiment.config)
        apart = any(path.startswith(".evaluated") for path in checkpoints.paths(step))
        below = ".evaluated" if apart else ".state.model"
        model, notes = checkpoints.restore(step, experiment.model_template(), below=below)
    if notes["config"] != experiment.document:
        edited = "; ".join(differences(notes["config"], experiment.document))
        raise CheckpointError(f"config.json was edited after the run began: {edited}")
    return SavedModel(model, step)


def _chosen_step(checkpoints: Checkpoints, flags: SavedRunFlags, config: Config) -> int:
    if not checkpoints.steps:
        raise CheckpointError(f"{flags.run_dir} holds no checkpoint yet")
    if flags.checkpoint == "last":
        return checkpoints.steps[-1]
    if config.data.validation == 0:
        raise ConfigError(
            "no checkpoint is the best, for the run holds out no validation rows "
            "(data.validation is 0): use --checkpoint last"
        )
    if checkpoints.best_step is None:
        raise CheckpointError("no epoch has ended yet: use --checkpoint last")
    return checkpoints.best_step


def models_along(experiment: Experiment, steps: Sequence[int]) -> Iterator[SavedModel]:
    """Return the models after so many steps, in rising order, 0 being the initialisation.

    The run is trained again from its seed: on the same machine, with the same versions and number
    of devices, to the bits that it had, so that no run needs to keep more than its last states.
    """
    state = experiment.init()
    position = 0
    for step in steps:
        if not position <= step <= experiment.plan.total_steps:
            raise ValueError(
                f"steps {list(steps)} must rise from 0 to at most {experiment.plan.total_steps}"
            )
        state = _trained(experiment, state, position, step)
        position = step
        # The state is donated to the next step; what is given away is a copy of its model.
        arrays, static = eqx.partition(experiment.evaluated(state), eqx.is_array)
        yield SavedModel(eqx.combine(jax.tree.map(jnp.copy, arrays), static), step)


def _trained(experiment: Experiment, state: TrainState, position: int, end: int) -> TrainState:
    """The state at step `end`, from the one at step `position`."""
    chunks = experiment.chunks(position)
    while position < end:
        chunk = next(chunks)
        count = min(int(chunk.count), end - position)
        chunk = eqx.tree_at(lambda chunk: chunk.count, chunk, jnp.full_like(chunk.count, count))
        state, _ = experiment.train_steps(state, experiment.recipe, chunk)
        position += count
    return state
