"""A config made real: the data, the plan of the run, and its two compiled functions."""

import dataclasses
from collections.abc import Iterator

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from mlp_research import datasets, sharding
from mlp_research.config import Config, Execution
from mlp_research.loader import ChunkPlan, Plan, evaluation_batches, row_chunks, train_chunks
from mlp_research.models import Model
from mlp_research.optimizers import Optimizer, Settings
from mlp_research.prng import stream_key
from mlp_research.shapes import AnyChunk, Batch, Split
from mlp_research.step import (
    EvalStep,
    TrainState,
    TrainSteps,
    compile_eval_step,
    compile_train_steps,
    init_state,
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

    @classmethod
    def of(cls, config: Config, execution: Execution) -> "Experiment":
        mesh = sharding.data_mesh(execution.mesh_data)
        sharding.check_divides(mesh, config.train.batch_size, "train.batch_size")
        sharding.check_divides(mesh, execution.evaluation_batch_size, "evaluation.batch_size")
        data = datasets.load(execution.data_dir, config.data)
        plan = Plan(config.seed, len(data.train), config.train.batch_size, config.train.epochs)
        rows = Batch(data.train.images, data.train.labels)
        resident = execution.resident
        if resident is None:
            resident = rows.images.nbytes <= RESIDENT_BYTES
        return cls(
            config=config,
            execution=execution,
            mesh=mesh,
            data=data,
            plan=plan,
            optimizer=Optimizer.of(config.optimizer, config.schedule, plan.total_steps),
            settings=Settings.of(config.optimizer, config.train.label_smoothing),
            resident_rows=sharding.replicate(mesh, rows) if resident else None,
            train_steps=compile_train_steps(mesh),
            eval_step=compile_eval_step(mesh),
        )

    def init(self) -> TrainState:
        """The state before the first step, from the seed alone."""
        seed, data = self.config.seed, self.data
        key = stream_key(seed, "init")
        model = self.config.model.build(data.image_shape, data.classes, key=key)
        state = init_state(model, self.optimizer, key=stream_key(seed, "dropout"))
        return sharding.replicate(self.mesh, state)

    def chunk_plan(self, position: int) -> ChunkPlan:
        return self.plan.chunks(position, self.execution.steps_per_call)

    def chunks(self, position: int) -> Iterator[AnyChunk]:
        """The rest of the run after `position` steps, each chunk placed on the mesh."""
        plan, rows = self.chunk_plan(position), self.resident_rows
        if rows is None:
            chunks = train_chunks(plan, self.data.train, self.execution.read_threads)
        else:
            chunks = row_chunks(plan, rows)
        for chunk in chunks:
            yield sharding.place_chunk(self.mesh, chunk)

    def compile(self, state: TrainState) -> TrainState:
        """Compile both functions by a call that trains on no step and counts no row."""
        chunk = next(self.chunks(0))
        nothing = eqx.tree_at(lambda chunk: chunk.count, chunk, jnp.zeros_like(chunk.count))
        state, _ = self.train_steps(state, self.settings, nothing)
        self.evaluate(state.model, Split(self.data.test.images[:1], self.data.test.labels[:1]))
        return state

    def evaluate(self, model: Model, split: Split) -> Evaluation:
        """Loss and accuracy over every row. Sums leave the device; the one division is here."""
        loss, correct, total = 0.0, 0, 0
        for batch in evaluation_batches(split, self.execution.evaluation_batch_size):
            placed = sharding.place_batch(self.mesh, batch)
            sums = jax.device_get(self.eval_step(model, placed))
            loss += float(sums.loss)
            correct += int(sums.correct)
            total += int(sums.total)
        return Evaluation(correct, total, correct / total, loss / total)

    def evaluated_splits(self) -> dict[str, Split]:
        """What is evaluated after every epoch, by name."""
        rows, train = self.config.evaluation.train_rows, self.data.train
        splits = {
            "train_rows": Split(train.images[:rows], train.labels[:rows]),
            "validation": self.data.validation,
            "test": self.data.test,
        }
        wanted = {
            "train_rows": rows > 0,
            "validation": len(self.data.validation) > 0,
            "test": self.config.evaluation.test,
        }
        return {name: split for name, split in splits.items() if wanted[name]}

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
            "devices": f"{self.mesh.size} of {jax.device_count()} ({device.device_kind})",
        }


def parameter_table(model: Model) -> list[tuple[str, str, int]]:
    """(path, shape, number of parameters) of each array that is trained."""
    leaves = jax.tree_util.tree_flatten_with_path(eqx.filter(model, eqx.is_inexact_array))[0]
    return [
        (jax.tree_util.keystr(path).lstrip("."), "x".join(map(str, leaf.shape)), int(leaf.size))
        for path, leaf in leaves
    ]
