"""A config made real: the data, the plan of the run, and its compiled functions."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mlp_research import anatomy, datasets, idx, processes, sharding
from mlp_research.config import Config, Execution
from mlp_research.loader import ChunkPlan, Plan, evaluation_batches, row_chunks, train_chunks
from mlp_research.models import Model
from mlp_research.objectives import Sums
from mlp_research.optimizers import Optimizer, Settings
from mlp_research.prng import stream_key
from mlp_research.shapes import AnyChunk, Batch, RandomKey, Split
from mlp_research.step import (
    EvalStep,
    TrainState,
    TrainSteps,
    compile_eval_step,
    compile_train_steps,
    init_state,
    train_step,
    train_steps,
)

RESIDENT_BYTES = 2**30
"""Up to this size the training rows lie on the device, unless `data.resident` says otherwise."""


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """Exact numbers of one split: every row counted once."""

    correct: int
    total: int
    accuracy: float
    loss: float
    """Mean cross-entropy in nats."""

    @classmethod
    def of(cls, batches: list[Sums]) -> "Evaluation":
        """From the sums of all batches, on the host: the one division is here."""
        correct = sum(int(sums.correct) for sums in batches)
        total = sum(int(sums.total) for sums in batches)
        loss = sum(float(sums.loss) for sums in batches)
        return cls(correct, total, correct / total, loss / total)


@dataclasses.dataclass(frozen=True)
class Experiment:
    """What a run computes with. What cannot be run is refused here, before a file is written."""

    config: Config
    execution: Execution
    mesh: Mesh
    data: datasets.Splits
    plan: Plan
    optimizer: Optimizer
    settings: Settings
    resident_rows: Batch | None
    """The training rows on the device; None where each chunk brings its pixels."""
    train_steps: TrainSteps
    eval_step: EvalStep
    initial_state: Callable[[RandomKey, RandomKey], TrainState]
    """The state before the first step, from the keys of the streams "init" and "dropout"."""

    @classmethod
    def of(cls, config: Config, execution: Execution) -> "Experiment":
        mesh = sharding.device_mesh(execution.mesh_data, execution.mesh_model)
        sharding.check_divides(mesh, config.train.batch_size, "train.batch_size")
        sharding.check_divides(mesh, execution.evaluation_batch_size, "evaluation.batch_size")
        data = datasets.load(execution.data_dir, config.data)
        if not processes.all_have(data.crc32):
            raise idx.DataError(
                f"the processes have different data: here {execution.data_dir} has the checksum "
                f"{data.crc32}. Give all of them the same files"
            )
        order = config.stream_seed("order")
        plan = Plan(order, len(data.train), config.train.batch_size, config.train.epochs)
        optimizer = Optimizer.of(config.optimizer, config.schedule, plan.total_steps)
        rows = Batch(data.train.images, data.train.labels)
        resident = execution.resident
        if resident is None:
            small = rows.images.nbytes <= RESIDENT_BYTES
            resident = small and not processes.are_many()

        def initial_state(init_key: RandomKey, dropout_key: RandomKey) -> TrainState:
            model = config.model.build(data.image_shape, data.classes, key=init_key)
            return sharding.spread(mesh, init_state(model, optimizer, key=dropout_key))

        experiment = cls(
            config=config.on(data),
            execution=execution,
            mesh=mesh,
            data=data,
            plan=plan,
            optimizer=optimizer,
            settings=Settings.of(config.optimizer, config.train.label_smoothing),
            resident_rows=sharding.place(rows, sharding.replicated(mesh)) if resident else None,
            train_steps=compile_train_steps(mesh),
            eval_step=compile_eval_step(mesh),
            initial_state=eqx.filter_jit(initial_state),
        )
        experiment.template()  # a model that cannot be built is refused now
        return experiment

    @property
    def marks(self) -> tuple[dict[str, int], ...]:
        """What tells the lines of one member from another's: nothing, there is but one."""
        return ({},)

    @property
    def configs(self) -> tuple[Config, ...]:
        return (self.config,)

    @property
    def document(self) -> Any:
        """What config.json holds."""
        return self.config.to_json()

    def init(self) -> TrainState:
        """The state before the first step, from the seed alone."""
        return self.initial_state(*stream_keys(self.config))

    def template(self) -> TrainState:
        """The state by shapes alone, and where each of its arrays lies."""
        shapes = eqx.filter_eval_shape(self.initial_state, *stream_keys(self.config))
        return sharding.template(self.mesh, shapes)

    def chunk_plan(self, position: int) -> ChunkPlan:
        return self.plan.chunks(position, self.execution.steps_per_call)

    def chunks(self, position: int) -> Iterator[AnyChunk]:
        """The rest of the run after `position` steps, each chunk placed on the mesh."""
        plan, rows = self.chunk_plan(position), self.resident_rows
        part = sharding.local_part(self.mesh, self.plan.batch_size)
        if rows is None:
            train, threads = self.data.train, self.execution.read_threads
            ahead = int(idx.is_mapped(train.images)) if threads is None else threads
            chunks = train_chunks(plan, train, ahead, part)
        else:
            chunks = row_chunks(plan, rows, part)
        for chunk in chunks:
            yield sharding.place_chunk(self.mesh, chunk)

    def compile(self, state: TrainState) -> TrainState:
        """Compile both functions by a call that trains on no step and counts no row."""
        state, _ = self.train_steps(state, self.settings, without_steps(next(self.chunks(0))))
        self.evaluate(state.model, self.data.test.rows(1))
        return state

    def evaluate(self, model: Model, split: Split) -> Evaluation:
        """Loss and accuracy over every row of a split."""
        size = self.execution.evaluation_batch_size
        batches = evaluation_batches(split, size, sharding.local_part(self.mesh, size))
        placed = (sharding.place_batch(self.mesh, batch) for batch in batches)
        return Evaluation.of([jax.device_get(self.eval_step(model, batch)) for batch in placed])

    def evaluate_each(self, model: Model, split: Split) -> list[Evaluation]:
        """The evaluation of each member: of the one there is."""
        return [self.evaluate(model, split)]

    def split(self, tree: Any) -> list[Any]:
        """The part of each member of a tree: of the one there is, all."""
        return [tree]

    def evaluated_splits(self) -> dict[str, Split]:
        """What is evaluated after every epoch, by name."""
        rows, data = self.config.evaluation.train_rows, self.data
        splits = {
            "train_rows": data.train.rows(rows) if rows else None,
            "validation": data.validation if len(data.validation) else None,
            "test": data.test if self.config.evaluation.test else None,
        }
        return {name: split for name, split in splits.items() if split is not None}

    def layers(self) -> list[anatomy.Layer]:
        """What the model is made of."""
        keys = stream_keys(self.config)
        model = eqx.filter_eval_shape(self.initial_state, *keys).model
        return anatomy.layers(model, self.data.train.images.shape[1], keys[1])

    def step_program(self) -> jax.stages.Lowered:
        """One training step, traced and not compiled: what its costs are read from."""
        train = self.data.train
        rows = Batch(train.images, train.labels)
        size = self.plan.batch_size
        batch = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((size, *leaf.shape[1:]), leaf.dtype), rows
        )
        return anatomy.lowered(train_step, self.template(), self.settings, batch)

    def cost(self) -> dict[str, str]:
        """Operations and memory, from XLA's own analysis of the programs that a run compiles."""
        step = anatomy.operations(self.step_program())
        chunk = next(self.chunks(0))
        program = anatomy.lowered(train_steps, self.template(), self.settings, chunk).compile()
        memory: Any = program.memory_analysis()
        parts = {
            "arguments": memory.argument_size_in_bytes,
            "results": memory.output_size_in_bytes,
            "temporary": memory.temp_size_in_bytes,
        }
        return {
            "work": f"{step:.3g} floating-point operations a step, "
            f"{step * self.plan.total_steps:.3g} a run",
            "memory": ", ".join(f"{size / 1e6:,.1f} MB {name}" for name, size in parts.items()),
        }

    def facts(self, step: int) -> dict[str, str]:
        """What a run says it is before it starts at `step`."""
        config, data, plan, device = self.config, self.data, self.plan, jax.devices()[0]
        return {
            "model": f"{config.model.kind}, optimizer {config.optimizer.kind}, "
            f"schedule {config.schedule.kind}, seed {config.seed}",
            "data": f"{len(data.train):,} training, {len(data.validation):,} validation, "
            f"{len(data.test):,} test rows",
            "steps": f"{plan.total_steps:,} ({plan.epochs} epochs of {plan.steps_per_epoch}, "
            f"batch {plan.batch_size}), starting at {step:,}",
            "devices": f"{self.mesh.size} of {jax.device_count()} ({device.device_kind})"
            + (f" in {jax.process_count()} processes" if processes.are_many() else ""),
        } | self._spread_facts()

    def _spread_facts(self) -> dict[str, str]:
        """How the dense layers lie on the axis `model`, where it has more than one device."""
        devices = self.mesh.shape["model"]
        if devices == 1:
            return {}
        whole = ", ".join(sharding.undivided(self.mesh, self.template().model))
        spread = f"dense layers, each over {devices} devices"
        return {"spread": f"{spread}, but whole on each: {whole}" if whole else spread}


def stream_keys(config: Config) -> tuple[RandomKey, RandomKey]:
    """The keys of the streams "init" and "dropout"."""
    init, dropout = (stream_key(config.stream_seed(name), name) for name in ("init", "dropout"))
    return init, dropout


def without_steps(chunk: AnyChunk) -> AnyChunk:
    """The chunk with no real step: it compiles the program and trains nothing."""
    return eqx.tree_at(lambda chunk: chunk.count, chunk, jnp.zeros_like(chunk.count))
