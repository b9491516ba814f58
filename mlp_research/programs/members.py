"""Many members, one program: `train_steps` lifted over seeds and traced numbers.

A member is exactly the single run with its config: the same initial weights, data order and masks,
to the bit where members are computed one after the other on each device (`jax.lax.map`).
"""

import dataclasses
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Integer, PyTree

from mlp_research.config import Config, Execution
from mlp_research.data.batches import AnyChunk, Batch, MaskedBatch, RowChunk, Split
from mlp_research.data.datasets import Splits
from mlp_research.data.loader import Plan, evaluation_batches, member_chunks
from mlp_research.errors import ConfigError
from mlp_research.models import Model, summary
from mlp_research.objectives import Evaluation, Measured, Sums
from mlp_research.programs.base import Program, recipe_of, stream_keys
from mlp_research.programs.single import Experiment
from mlp_research.shapes import is_shape
from mlp_research.step import (
    Recipe,
    StepMetrics,
    TrainState,
    TrainSteps,
    eval_step,
    evaluated_model,
    predict_step,
    probe_step,
    train_steps,
)
from mlp_research.system import sharding

Lift = Literal["map", "vmap"]
"""How the members of one device are computed: one after the other, or batched."""


def program_key(config: Config) -> Hashable:
    """Return what is equal for configs that one compiled program serves.

    They differ in the seed, the streams and traced numbers alone.
    """
    parts = [jax.tree.structure(part.traced()) for part in config.parts.values()]
    rest = config.model_dump(mode="json", exclude={"seed", "streams", *config.parts})
    return (*parts, repr(rest))


@dataclasses.dataclass(frozen=True)
class Members(Program):
    """Many runs of one compiled program; each is, to the bit, the single run with its config."""

    experiment: Experiment
    """The first member's: its data, and the static parts that all share."""
    configs: tuple[Config, ...]
    execution: Execution
    mesh: Mesh
    data: Splits
    plans: tuple[Plan, ...]
    recipe: Recipe
    """With a leading axis: the traced numbers of each lane."""
    lift: Lift
    train_steps: TrainSteps
    eval_step: Callable[[Model, Recipe, MaskedBatch], Sums]
    predict_step: Callable[[Model, Recipe, MaskedBatch], Array]
    probe_step: Callable[[Model, Recipe, Batch], Measured]
    evaluated_model: Callable[[TrainState, Recipe], Model]

    @classmethod
    def of(
        cls, configs: Sequence[Config], execution: Execution, lift: Lift | None = None
    ) -> "Members":
        """Return members on an axis `member` of all devices.

        `lift` is by default the device's faster one. Raises `ConfigError` where one program cannot
        serve all.
        """
        if len({program_key(config) for config in configs}) != 1:
            raise ConfigError("these configs need more than one program")
        experiment = Experiment.of(
            configs[0], execution.model_copy(update={"mesh_data": 1, "mesh_model": 1})
        )
        mesh = sharding.member_mesh()
        chosen = lift or ("map" if jax.default_backend() == "cpu" else "vmap")
        each = _lifted(mesh, chosen)
        base, data = experiment.plan, experiment.data
        inputs = experiment.recipe.inputs
        same = {repr(configs[0].start): experiment.config.start}
        identified = [
            config.on(data).model_copy(
                update={"start": same.get(repr(config.start)) or config.start.identified()}
            )
            for config in configs
        ]
        rows = experiment.resident_rows or Batch(data.train.images, data.train.labels)
        recipes = [recipe_of(config, base.total_steps, inputs) for config in configs]
        members = cls(
            experiment=dataclasses.replace(
                experiment, resident_rows=sharding.place(rows, sharding.replicated(mesh))
            ),
            configs=tuple(identified),
            execution=experiment.execution,
            mesh=mesh,
            data=data,
            plans=tuple(dataclasses.replace(base, seed=c.stream_seed("order")) for c in configs),
            recipe=recipes[0],
            lift=chosen,
            train_steps=_compile_train_steps(each),
            eval_step=_compile_each(each, eval_step),
            predict_step=_compile_each(each, predict_step),
            probe_step=_compile_each(each, probe_step),
            evaluated_model=_compile_evaluated_model(each),
        )
        return dataclasses.replace(members, recipe=members._stack(recipes))

    @property
    def plan(self) -> Plan:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.plans[0]

    @property
    def tags(self) -> tuple[dict[str, int], ...]:
        return tuple({"member": index} for index in range(len(self.configs)))

    @property
    def document(self) -> Any:
        return {"members": [config.to_json() for config in self.configs]}

    @property
    def lanes(self) -> list[int]:
        """The member of each lane; surplus lanes, which even out the devices, repeat the last."""
        size = self.mesh.size
        members = list(range(len(self.configs)))
        return members + [members[-1]] * (-len(members) % size)

    def init(self) -> TrainState:
        """Return the members' states before the first step, each by the single run's program."""
        recipes = [
            recipe_of(config, self.plan.total_steps, self.experiment.recipe.inputs)
            for config in self.configs
        ]
        states = [
            self.experiment.initial_state(recipe, stream_keys(config))
            for recipe, config in zip(recipes, self.configs, strict=True)
        ]
        return self._stack(states)

    def template(self) -> TrainState:
        lanes, layout = len(self.lanes), sharding.over_members(self.mesh)

        def widen(leaf: Any) -> Any:
            if is_shape(leaf):
                return jax.ShapeDtypeStruct((lanes, *leaf.shape), leaf.dtype, sharding=layout)
            return leaf

        return jax.tree.map(widen, self.experiment.template())

    def chunks(self, position: int) -> Iterator[RowChunk]:
        """Stream the rows of each lane, placed on the mesh."""
        rows = self.experiment.resident_rows
        assert rows is not None
        each = [plan.chunks(position, self.execution.steps_per_call) for plan in self.plans]
        lanes = [each[member] for member in self.lanes]
        for chunk in member_chunks(lanes, rows):
            yield sharding.place_member_chunk(self.mesh, chunk)

    def evaluate_each(self, model: Model, split: Split) -> list[Evaluation]:
        """Return the evaluation of each member, exactly as a single run's."""
        sums = [
            self.unstack(jax.device_get(each)) for each in self._each(self.eval_step, model, split)
        ]
        return [Evaluation.of([each[index] for each in sums]) for index in self._members]

    def predictions(self, model: Model, split: Split) -> Integer[np.ndarray, "members examples"]:
        """Return the class that each member predicts for each row."""
        batches = [np.asarray(each) for each in self._each(self.predict_step, model, split)]
        return np.concatenate(batches, axis=1)[: len(self.configs), : len(split)]

    def probe_each(self, model: Model) -> list[dict[str, Any]]:
        rows = sharding.place(self.probed_rows(), sharding.replicated(self.mesh))
        return self.unstack(jax.device_get(self.probe_step(model, self.recipe, rows)))

    def evaluated(self, state: TrainState) -> Model:
        if self.evaluates_what_it_trains:
            return state.model
        return self.evaluated_model(state, self.recipe)

    def unstack(self, tree: Any) -> list[Any]:
        return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in self._members]

    @property
    def step_probes(self) -> tuple[str, ...]:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.experiment.step_probes

    def layers(self) -> list[summary.Layer]:
        return self.experiment.layers()

    def facts(self, step: int) -> dict[str, str]:
        devices = f"{self.mesh.size} ({jax.devices()[0].device_kind}), {self.lift} within each"
        seeds = sorted({config.seed for config in self.configs})
        members = f"{len(self.configs)}, with seeds from {seeds[0]} to {seeds[-1]}"
        facts = self.experiment.facts(step)
        alike = facts["model"].partition(", seed ")[0]
        return facts | {"model": alike, "members": members, "devices": devices}

    @property
    def _members(self) -> range:
        return range(len(self.configs))

    def _each(
        self, step: Callable[[Model, Recipe, MaskedBatch], Any], model: Model, split: Split
    ) -> Iterator[Any]:
        """Stream what an evaluation step gives for each batch of a split."""
        size, whole = self.execution.evaluation_batch_size, sharding.replicated(self.mesh)
        for batch in evaluation_batches(split, size):
            yield step(model, self.recipe, sharding.place(batch, whole))

    def _stack(self, trees: list[Any]) -> Any:
        """Return one tree with a leading axis of lanes; static parts are those of the first."""
        arrays = [eqx.filter(trees[member], eqx.is_array) for member in self.lanes]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)
        placed = sharding.place(stacked, sharding.over_members(self.mesh))
        return eqx.combine(placed, eqx.filter(trees[0], eqx.is_array, inverse=True))


def _lifted(mesh: Mesh, lift: Lift) -> Callable:
    """Return (function, lanes, shared) -> function(lane, shared) for each lane, over the mesh."""

    def each(function: Callable, lanes: PyTree, shared: PyTree) -> PyTree:
        def local(lanes: PyTree, shared: PyTree) -> PyTree:
            def one(lane: PyTree) -> PyTree:
                return function(lane, shared)

            return jax.vmap(one)(lanes) if lift == "vmap" else jax.lax.map(one, lanes)

        spread, whole = PartitionSpec("member"), PartitionSpec()
        return jax.shard_map(
            local, mesh=mesh, in_specs=(spread, whole), out_specs=spread, check_vma=False
        )(lanes, shared)

    return each


def _compile_train_steps(each: Callable) -> TrainSteps:
    @eqx.filter_jit(donate="all-except-first")
    @eqx.debug.assert_max_traces(max_traces=1)
    def compiled(
        inputs: tuple[Recipe, AnyChunk], states: TrainState
    ) -> tuple[TrainState, StepMetrics]:
        recipes, chunk = inputs
        assert isinstance(chunk, RowChunk)
        arrays, static = eqx.partition(states, eqx.is_array)

        def one(lane: PyTree, shared: PyTree) -> PyTree:
            (arrays, recipe, rows), (data, count) = lane, shared
            state = eqx.combine(arrays, static)
            state, metrics = train_steps(state, recipe, RowChunk(data, rows, count))
            return eqx.filter(state, eqx.is_array), metrics

        lanes, shared = (arrays, recipes, chunk.steps), (chunk.data, chunk.count)
        arrays, metrics = each(one, lanes, shared)
        return eqx.combine(arrays, static), metrics

    return lambda states, recipes, chunk: compiled((recipes, chunk), states)


def _compile_each(each: Callable, step: Callable[[Model, Recipe, Any], PyTree]) -> Any:
    """Return a step of every member's model on the same batch, which trains nothing."""

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def compiled(models: Model, recipes: Recipe, batch: MaskedBatch | Batch) -> PyTree:
        arrays, static = eqx.partition(models, eqx.is_array)

        def one(lane: PyTree, shared: MaskedBatch | Batch) -> PyTree:
            return step(eqx.combine(lane[0], static), lane[1], shared)

        return each(one, (arrays, recipes), batch)

    return compiled


def _compile_evaluated_model(each: Callable) -> Callable[[TrainState, Recipe], Model]:
    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def compiled(states: TrainState, recipes: Recipe) -> Model:
        arrays, static = eqx.partition(states, eqx.is_array)

        def one(lane: PyTree, _: None) -> PyTree:
            model = evaluated_model(eqx.combine(lane[0], static), lane[1])
            return eqx.filter(model, eqx.is_array)

        return eqx.combine(each(one, (arrays, recipes), None), static.model)

    return compiled
