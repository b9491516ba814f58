"""A program: what `fit` trains. It is one run, or many runs of one compiled program."""

import abc
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax.numpy as jnp
from jax.sharding import Mesh

from mlp_research.config import Config, Execution
from mlp_research.data.batches import AnyChunk, Split
from mlp_research.data.datasets import Splits
from mlp_research.data.loader import ChunkPlan, Plan
from mlp_research.models import Model, summary
from mlp_research.objectives import Evaluation
from mlp_research.optimizers import OptimizerConfig
from mlp_research.prng import stream_key
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
        self.evaluate_each(self.evaluated(state), self.data.test.rows(1))
        return state

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


def recipe_of(config: Config, total_steps: int) -> Recipe:
    """Return the traced parts of a config's steps."""
    return Recipe(
        model=config.model.traced(),
        objective=config.objective.traced(),
        optimizer=config.optimizer.traced(),
        schedule=config.schedule.traced(),
        total_steps=total_steps,
    )


def stream_keys(config: Config) -> tuple[RandomKey, RandomKey]:
    """Return the keys of the streams "init" and "dropout", of which the second is the steps'."""
    init, dropout = (stream_key(config.stream_seed(name), name) for name in ("init", "dropout"))
    return init, dropout


def without_steps(chunk: AnyChunk) -> AnyChunk:
    """Return the chunk with no real step: it compiles the program and trains nothing."""
    return eqx.tree_at(lambda chunk: chunk.count, chunk, jnp.zeros_like(chunk.count))
