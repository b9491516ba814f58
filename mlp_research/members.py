"""Many members, one program: `train_steps` lifted over seeds and traced settings.

A member is exactly the single run with its config: the same initial weights, data order and masks,
to the bit where members are computed one after the other on each device (`jax.lax.map`).
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Integer, PyTree

from mlp_research import anatomy, sharding
from mlp_research.config import Config, Execution
from mlp_research.experiment import Evaluation, Experiment, stream_keys, without_steps
from mlp_research.frozen import ConfigError
from mlp_research.loader import ChunkPlan, Plan, evaluation_batches, member_chunks
from mlp_research.models import Model
from mlp_research.objectives import Sums
from mlp_research.optimizers import TRACED, Settings
from mlp_research.shapes import Batch, MaskedBatch, RowChunk, Split, is_shape
from mlp_research.step import StepMetrics, TrainState, eval_step, scale_pixels, train_steps

Lift = Literal["map", "vmap"]
"""How the members of one device are computed: one after the other, or batched."""


def program_key(config: Config) -> str:
    """Equal for configs that one compiled program serves: those that differ in traced numbers."""
    document = config.to_json()
    del document["seed"], document["streams"], document["train"]["label_smoothing"]
    for field in TRACED:
        document["optimizer"].pop(field, None)
    return repr(document)


@dataclasses.dataclass(frozen=True)
class Members:
    """What a program of many members computes with; for `fit`, what an `Experiment` is for one."""

    experiment: Experiment
    """The first member's: its data, and the static parts that all share."""
    configs: tuple[Config, ...]
    mesh: Mesh
    plans: tuple[Plan, ...]
    settings: Settings
    """With a leading axis: one setting a lane."""
    lift: Lift
    train_steps: Callable
    eval_step: Callable
    predict: Callable

    @classmethod
    def of(
        cls, configs: Sequence[Config], execution: Execution, lift: Lift | None = None
    ) -> "Members":
        """Members on an axis `member` of all devices; `lift` is by default the device's faster one.

        Raises `ConfigError` where one program cannot serve all.
        """
        if len({program_key(config) for config in configs}) != 1:
            raise ConfigError("these configs need more than one program")
        experiment = Experiment.of(
            configs[0], execution.model_copy(update={"mesh_data": 1, "mesh_model": 1})
        )
        mesh = sharding.member_mesh()
        chosen = lift or ("map" if jax.default_backend() == "cpu" else "vmap")
        settings = [Settings.of(c.optimizer, c.train.label_smoothing) for c in configs]
        each = _lifted(mesh, chosen)
        base = experiment.plan
        rows = experiment.resident_rows or Batch(
            experiment.data.train.images, experiment.data.train.labels
        )
        members = cls(
            experiment=dataclasses.replace(
                experiment, resident_rows=sharding.place(rows, sharding.replicated(mesh))
            ),
            configs=tuple(config.on(experiment.data) for config in configs),
            mesh=mesh,
            plans=tuple(dataclasses.replace(base, seed=c.stream_seed("order")) for c in configs),
            settings=settings[0],
            lift=chosen,
            train_steps=_compile_train_steps(each),
            eval_step=_compile_each(each, eval_step),
            predict=_compile_each(each, predict_step),
        )
        return dataclasses.replace(members, settings=members._stack(settings))

    @property
    def execution(self) -> Execution:
        return self.experiment.execution

    @property
    def data(self) -> Any:
        return self.experiment.data

    @property
    def plan(self) -> Plan:
        """The plan of the first member; all have as many epochs, steps and rows."""
        return self.plans[0]

    @property
    def marks(self) -> tuple[dict[str, int], ...]:
        """What tells the lines of one member from another's."""
        return tuple({"member": index} for index in range(len(self.configs)))

    @property
    def document(self) -> Any:
        """What config.json holds."""
        return {"members": [config.to_json() for config in self.configs]}

    @property
    def lanes(self) -> list[int]:
        """The member of each lane; surplus lanes, which even out the devices, repeat the last."""
        size = self.mesh.size
        members = list(range(len(self.configs)))
        return members + [members[-1]] * (-len(members) % size)

    def init(self) -> TrainState:
        """The members' states before the first step, each by the single run's own program."""
        states = [self.experiment.initial_state(*stream_keys(c)) for c in self.configs]
        return self._stack(states)

    def template(self) -> TrainState:
        """The members' states by shapes alone, spread over the axis `member`."""
        lanes, layout = len(self.lanes), sharding.over_members(self.mesh)

        def widen(leaf: Any) -> Any:
            if is_shape(leaf):
                return jax.ShapeDtypeStruct((lanes, *leaf.shape), leaf.dtype, sharding=layout)
            return leaf

        return jax.tree.map(widen, self.experiment.template())

    def chunk_plan(self, position: int) -> ChunkPlan:
        return self.plan.chunks(position, self.execution.steps_per_call)

    def chunks(self, position: int) -> Iterator[RowChunk]:
        """The rest of the run after `position` steps: the rows of each lane, placed on the mesh."""
        rows = self.experiment.resident_rows
        assert rows is not None
        each = [plan.chunks(position, self.execution.steps_per_call) for plan in self.plans]
        lanes = [each[member] for member in self.lanes]
        for chunk in member_chunks(lanes, rows):
            yield sharding.place_member_chunk(self.mesh, chunk)

    def compile(self, state: TrainState) -> TrainState:
        """Compile by calls that train on no step and count no row."""
        state, _ = self.train_steps(state, self.settings, without_steps(next(self.chunks(0))))
        self.evaluate_each(state.model, self.data.test.rows(1))
        return state

    def evaluate_each(self, model: Model, split: Split) -> list[Evaluation]:
        """The evaluation of each member, exactly as a single run's."""
        size = self.execution.evaluation_batch_size
        batches = [
            jax.device_get(
                self.eval_step(model, sharding.place(batch, sharding.replicated(self.mesh)))
            )
            for batch in evaluation_batches(split, size)
        ]
        return [Evaluation.of([self.split(sums)[i] for sums in batches]) for i in self._members]

    def predictions(self, model: Model, split: Split) -> Integer[np.ndarray, "members examples"]:
        """The class that each member predicts for each row."""
        size = self.execution.evaluation_batch_size
        batches = [
            np.asarray(self.predict(model, sharding.place(batch, sharding.replicated(self.mesh))))
            for batch in evaluation_batches(split, size)
        ]
        return np.concatenate(batches, axis=1)[: len(self.configs), : len(split)]

    def split(self, tree: Any) -> list[Any]:
        """The part of each member of a tree with a leading axis of lanes."""
        return [jax.tree.map(lambda leaf, i=i: leaf[i], tree) for i in self._members]

    def evaluated_splits(self) -> dict[str, Split]:
        return self.experiment.evaluated_splits()

    def layers(self) -> list[anatomy.Layer]:
        return self.experiment.layers()

    def facts(self, step: int) -> dict[str, str]:
        """What a program says it is before it starts at `step`."""
        devices = f"{self.mesh.size} ({jax.devices()[0].device_kind}), {self.lift} within each"
        seeds = sorted({config.seed for config in self.configs})
        members = f"{len(self.configs)}, with seeds from {seeds[0]} to {seeds[-1]}"
        facts = self.experiment.facts(step)
        alike = facts["model"].partition(", seed ")[0]
        return facts | {"model": alike, "members": members, "devices": devices}

    @property
    def _members(self) -> range:
        return range(len(self.configs))

    def _stack(self, trees: list[Any]) -> Any:
        """One tree with a leading axis of lanes on the mesh; static parts are the first one's."""
        arrays = [eqx.filter(trees[member], eqx.is_array) for member in self.lanes]
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)
        placed = sharding.place(stacked, sharding.over_members(self.mesh))
        return eqx.combine(placed, eqx.filter(trees[0], eqx.is_array, inverse=True))


def predict_step(model: Model, batch: MaskedBatch) -> Integer[Array, " batch"]:
    """The class with the largest logit, for each row."""
    model = eqx.nn.inference_mode(model)
    logits = jax.vmap(lambda image: model(image))(scale_pixels(batch.images))
    return jnp.argmax(logits, axis=-1)


def _lifted(mesh: Mesh, lift: Lift) -> Callable:
    """(function, lanes, shared) -> function(lane, shared) for each lane, spread over the mesh."""

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


def _compile_train_steps(each: Callable) -> Callable:
    @eqx.filter_jit(donate="all-except-first")
    @eqx.debug.assert_max_traces(max_traces=1)
    def compiled(
        inputs: tuple[Settings, RowChunk], states: TrainState
    ) -> tuple[TrainState, StepMetrics]:
        settings, chunk = inputs
        arrays, static = eqx.partition(states, eqx.is_array)

        def one(lane: PyTree, shared: PyTree) -> PyTree:
            (arrays, settings, rows), (data, count) = lane, shared
            state = eqx.combine(arrays, static)
            state, metrics = train_steps(state, settings, RowChunk(data, rows, count))
            return eqx.filter(state, eqx.is_array), metrics

        lanes, shared = (arrays, settings, chunk.steps), (chunk.data, chunk.count)
        arrays, metrics = each(one, lanes, shared)
        return eqx.combine(arrays, static), metrics

    return lambda states, settings, chunk: compiled((settings, chunk), states)


def _compile_each(each: Callable, step: Callable[[Model, MaskedBatch], PyTree]) -> Callable:
    """An evaluation step of every member's model on the same batch."""

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def compiled(models: Model, batch: MaskedBatch) -> Sums | Array:
        arrays, static = eqx.partition(models, eqx.is_array)
        return each(lambda lane, shared: step(eqx.combine(lane, static), shared), arrays, batch)

    return compiled
