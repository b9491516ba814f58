"""A program: what `fit` trains. It is one run, or many runs of one compiled program."""

import abc
import functools
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.sharding import Mesh

from mlp_research.config import Config, Execution
from mlp_research.data.batches import AnyChunk, Batch, Split
from mlp_research.data.datasets import Splits
from mlp_research.data.inputs import Inputs
from mlp_research.data.loader import ChunkPlan, Plan
from mlp_research.models import Model, summary, without_state
from mlp_research.objectives import Evaluation
from mlp_research.optimizers import OptimizerConfig
from mlp_research.prng import StepKeys, stream_key
from mlp_research.probes import Probe
from mlp_research.shapes import RandomKey
from mlp_research.step import Recipe, StepMetrics, TrainState


class Saved(eqx.Module):
    """The content of a checkpoint."""

    state: TrainState
    evaluated: Model | None
    """The result so far, where it is not the very model that is trained."""


class Program(abc.ABC):
    """The interface that `fit` drives: of one run, or of many that share a compiled program.

    Where there are many, each array has a leading axis of slots.
    """

    configs: tuple[Config, ...]
    """The config of each run; they differ in seeds, streams and traced numbers alone."""
    execution: Execution
    mesh: Mesh
    data: Splits
    plan: Plan
    """The first run's order of batches; all have as many epochs, steps and rows."""
    recipe: Recipe
    train_steps: Callable[[TrainState, Recipe, AnyChunk], tuple[TrainState, StepMetrics]]

    @property
    @abc.abstractmethod
    def tags(self) -> tuple[dict[str, int], ...]:
        """For each run, the fields that mark its lines in metrics.jsonl."""

    @property
    @abc.abstractmethod
    def document(self) -> Any:
        """The JSON value of config.json."""

    @abc.abstractmethod
    def init(self) -> TrainState:
        """Return the state before the first step, from the seeds alone."""

    @abc.abstractmethod
    def template(self) -> TrainState:
        """Return the state by shapes alone, each with the sharding of its array."""

    @abc.abstractmethod
    def chunks(self, position: int) -> Iterator[AnyChunk]:
        """Stream the rest of the run after `position` steps, each chunk placed on the mesh."""

    @abc.abstractmethod
    def evaluate_each(self, model: Model, split: Split) -> list[Evaluation]:
        """Return each run's exact numbers over every row of a split."""

    @abc.abstractmethod
    def probe_each(self, model: Model) -> list[dict[str, Any]]:
        """Return what the probe measures of each run's model after an epoch."""

    @abc.abstractmethod
    def evaluated(self, state: TrainState) -> Model:
        """Return the model that is validated, tested and saved as the result."""

    @abc.abstractmethod
    def unstack(self, tree: Any) -> list[Any]:
        """Return each run's part of a tree."""

    @abc.abstractmethod
    def facts(self, step: int) -> dict[str, str]:
        """Return what the program says of itself, by heading, before it starts at `step`."""

    @abc.abstractmethod
    def layers(self) -> list[summary.Layer]:
        """Return the layers of one run's model."""

    def chunk_plan(self, position: int) -> ChunkPlan:
        """Return the spans of the chunks after `position` steps."""
        return self.plan.chunks(position, self.execution.steps_per_call)

    def compile(self, state: TrainState) -> TrainState:
        """Compile by calls that train on no step and count no row."""
        state, _ = self.train_steps(state, self.recipe, without_steps(next(self.chunks(0))))
        model = self.evaluated(state)
        self.evaluate_each(model, self.data.test.rows(1))
        self.probe_each(model)
        return state

    @functools.cached_property
    def step_probes(self) -> tuple[str, ...]:
        """Names of what the probe measures in each step."""
        if type(self.recipe.probes).measure_step is Probe.measure_step:
            return ()
        model = without_state(self.template().model)
        parameters = self.recipe.optimizer.trained(model)
        found = eqx.filter_eval_shape(self.recipe.probes.measure_step, parameters, parameters)
        return tuple(found)

    def probed_rows(self) -> Batch:
        """Return the training rows that the probe looks at."""
        rows = self.data.train.rows(self.configs[0].probes.rows)
        return Batch(rows.images, rows.labels)

    def evaluated_splits(self) -> dict[str, Split]:
        """Return what is evaluated after every epoch, by name."""
        evaluation, data = self.configs[0].evaluation, self.data
        rows = evaluation.train_rows
        splits = {
            "train_rows": data.train.rows(rows) if rows else None,
            "validation": data.validation if len(data.validation) else None,
            "test": data.test if evaluation.test else None,
        }
        return {name: split for name, split in splits.items() if split is not None}

    def saved(self, state: TrainState) -> Saved:
        """Return what a checkpoint holds of a state."""
        return Saved(state, None if self.evaluates_what_it_trains else self.evaluated(state))

    def saved_template(self) -> Saved:
        """Return what a checkpoint holds, by shapes alone."""
        template = self.template()
        return Saved(template, None if self.evaluates_what_it_trains else template.model)

    @property
    def evaluates_what_it_trains(self) -> bool:
        """True where the optimizer's result is the very model that it trains."""
        return type(self.recipe.optimizer).evaluated is OptimizerConfig.evaluated


def recipe_of(config: Config, total_steps: int, inputs: Inputs) -> Recipe:
    """Return the traced parts of a config's steps."""
    return Recipe(
        inputs=inputs,
        augmentation=config.augmentation.traced(),
        model=config.model.traced(),
        start=config.start.traced(),
        objective=config.objective.traced(),
        optimizer=config.optimizer.traced(),
        schedule=config.schedule.traced(),
        probes=config.probes.traced(),
        total_steps=total_steps,
    )


class Keys(eqx.Module):
    """The keys of a run's streams, but for the data order, which numpy shuffles."""

    model: RandomKey
    """Of the stream "init", for the model as its config builds it."""
    start: RandomKey
    """Of the stream "init", for what the start draws."""
    steps: StepKeys


def stream_keys(config: Config) -> Keys:
    """Return the keys of a run's streams."""
    init, dropout, augmentation = (
        config.stream_seed(name) for name in ("init", "dropout", "augmentation")
    )
    return Keys(
        model=stream_key(init, "init"),
        start=stream_key(init, "start"),
        steps=StepKeys(stream_key(dropout, "dropout"), stream_key(augmentation, "augmentation")),
    )


def without_steps(chunk: AnyChunk) -> AnyChunk:
    """Return the chunk with no real step: it compiles the program and trains nothing."""
    return eqx.tree_at(lambda chunk: chunk.count, chunk, jnp.zeros_like(chunk.count))
