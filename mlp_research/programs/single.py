"""A config made real: the data, the plan of the run, and its compiled functions."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
from jax.sharding import Mesh

from mlp_research.config import Config, Execution
from mlp_research.data import datasets, idx
from mlp_research.data.base import Arrays
from mlp_research.data.batches import AnyChunk, Batch, Split
from mlp_research.data.inputs import inputs_of
from mlp_research.data.loader import Plan, evaluation_batches, row_chunks, train_chunks
from mlp_research.models import Model, summary, whole
from mlp_research.objectives import Evaluation, Measured
from mlp_research.parts import blaming
from mlp_research.programs.base import Keys, Program, recipe_of, stream_keys
from mlp_research.programs.checks import batch_shapes, check_model, check_steps
from mlp_research.step import (
    EvalStep,
    Recipe,
    TrainState,
    TrainSteps,
    compile_eval_step,
    compile_evaluated_model,
    compile_probe_step,
    compile_train_steps,
    init_state,
    train_step,
    train_steps,
)
from mlp_research.system import processes, sharding

RESIDENT_BYTES = 2**30
"""Up to this size the training rows lie on the device, unless `data.resident` says otherwise."""


@dataclasses.dataclass(frozen=True)
class Experiment(Program):
    """One run. What cannot be run is refused here, before a file is written."""

    configs: tuple[Config, ...]
    execution: Execution
    mesh: Mesh
    data: datasets.Splits
    plan: Plan
    recipe: Recipe
    resident_rows: Batch | None
    """The training rows on the device; None where each chunk brings its pixels."""
    train_steps: TrainSteps
    eval_step: EvalStep
    probe_step: Callable[[Model, Recipe, Batch], Measured]
    evaluated_model: Callable[[TrainState, Recipe], Model]
    initial_state: Callable[[Recipe, Keys], TrainState]
    """The state before the first step, from the keys that `stream_keys` gives."""

    @classmethod
    def of(
        cls,
        config: Config,
        execution: Execution,
        *,
        arrays: Arrays | None = None,
        only_evaluated: bool = False,
    ) -> "Experiment":
        """Return the run of a config.

        `arrays` are (x, y, x_test, y_test), in place of what the config reads. With
        `only_evaluated`, parts that evaluation does not need may be absent. Raises `ConfigError`
        for what cannot be run.
        """
        if not only_evaluated:
            with blaming([config.start]):
                config = config.identified()
        mesh = sharding.device_mesh(execution.mesh_data, execution.mesh_model)
        sharding.check_divides(mesh, config.train.batch_size, "train.batch_size")
        sharding.check_divides(mesh, execution.evaluation_batch_size, "evaluation.batch_size")
        config = config if arrays is None else config.with_arrays()
        data = datasets.load(execution.data_dir, config.data, arrays)
        if not processes.all_have(data.crc32):
            raise idx.DataError(
                f"the processes have different data: here {execution.data_dir} has the checksum "
                f"{data.crc32}. Give all of them the same files"
            )
        inputs = inputs_of(data.train, data.image_shape, config.data.normalize)
        order = config.stream_seed("order")
        plan = Plan(order, len(data.train), config.train.batch_size, config.train.epochs)
        rows = Batch(data.train.images, data.train.labels)
        resident = execution.resident
        if resident is None:
            small = rows.images.nbytes <= RESIDENT_BYTES
            resident = small and not processes.are_many()

        def initial_state(recipe: Recipe, keys: Keys) -> TrainState:
            built = whole(recipe.model.build(data.image_shape, data.classes, key=keys.model))
            model = recipe.start.prepare_whole(built, key=keys.start)
            return sharding.spread(mesh, init_state(model, recipe, keys=keys.steps))

        experiment = cls(
            configs=(config.on(data),),
            execution=execution,
            mesh=mesh,
            data=data,
            plan=plan,
            recipe=recipe_of(config, plan.total_steps, inputs),
            resident_rows=sharding.place(rows, sharding.replicated(mesh)) if resident else None,
            train_steps=compile_train_steps(mesh),
            eval_step=compile_eval_step(mesh),
            probe_step=compile_probe_step(mesh),
            evaluated_model=compile_evaluated_model(mesh),
            initial_state=eqx.filter_jit(initial_state),
        )
        with blaming(list(config.parts.values())):
            if only_evaluated:
                check_model(experiment.model_template(), data, config)
            else:
                check_steps(experiment.template(), experiment.recipe, data, config)
        return experiment

    @property
    def config(self) -> Config:
        return self.configs[0]

    @property
    def tags(self) -> tuple[dict[str, int], ...]:
        """Nothing tells the lines of the one run from another's."""
        return ({},)

    @property
    def document(self) -> Any:
        return self.config.to_json()

    def init(self) -> TrainState:
        return self.initial_state(self.recipe, stream_keys(self.config))

    def template(self) -> TrainState:
        def begun(recipe: Recipe, keys: Keys) -> TrainState:
            # Without the start, which changes no shape: what it reads may be gone by now.
            built = recipe.model.build(self.data.image_shape, self.data.classes, key=keys.model)
            return init_state(whole(built), recipe, keys=keys.steps)

        shapes = eqx.filter_eval_shape(begun, self.recipe, stream_keys(self.config))
        return sharding.template(self.mesh, shapes)

    def model_template(self) -> Model:
        """Return the model by shapes alone, each with the sharding of its array."""
        build, key = self.recipe.model.build, stream_keys(self.config).model
        shapes = eqx.filter_eval_shape(build, self.data.image_shape, self.data.classes, key=key)
        return sharding.template(self.mesh, whole(shapes))

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

    def evaluate(self, model: Model, split: Split) -> Evaluation:
        """Return exact numbers over every row of a split."""
        size = self.execution.evaluation_batch_size
        batches = evaluation_batches(split, size, sharding.local_part(self.mesh, size))
        placed = (sharding.place_batch(self.mesh, batch) for batch in batches)
        return Evaluation.of(
            [jax.device_get(self.eval_step(model, self.recipe, batch)) for batch in placed]
        )

    def evaluate_each(self, model: Model, split: Split) -> list[Evaluation]:
        return [self.evaluate(model, split)]

    def probe_each(self, model: Model) -> list[dict[str, Any]]:
        return [self.probe_step(model, self.recipe, self.probed_rows())]

    def evaluated(self, state: TrainState) -> Model:
        if self.evaluates_what_it_trains:
            return state.model
        return self.evaluated_model(state, self.recipe)

    def unstack(self, tree: Any) -> list[Any]:
        return [tree]

    def layers(self) -> list[summary.Layer]:
        key = stream_keys(self.config).steps.dropout
        pixels = self.data.train.images.shape[1]
        return summary.layers(self.model_template(), pixels, key)

    def step_program(self) -> jax.stages.Lowered:
        """One training step, traced and not compiled: what its costs are read from."""
        batch = batch_shapes(self.data, self.plan.batch_size)
        return summary.lowered(train_step, self.template(), self.recipe, batch)

    def cost(self) -> dict[str, str]:
        """Operations and memory, from XLA's own analysis of the programs that a run compiles."""
        step = summary.operations(self.step_program())
        chunk = next(self.chunks(0))
        program = summary.lowered(train_steps, self.template(), self.recipe, chunk).compile()
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
        config, plan, device = self.config, self.plan, jax.devices()[0]
        return {
            "model": f"{config.model.kind}, objective {config.objective.kind}, "
            f"optimizer {config.optimizer.kind}, schedule {config.schedule.kind}, "
            f"seed {config.seed}",
            "data": self._data_facts(),
            "steps": f"{plan.total_steps:,} ({plan.epochs} epochs of {plan.steps_per_epoch}, "
            f"batch {plan.batch_size}), starting at {step:,}",
            "devices": f"{self.mesh.size} of {jax.device_count()} ({device.device_kind})"
            + (f" in {jax.process_count()} processes" if processes.are_many() else ""),
        } | self._spread_facts()

    def _data_facts(self) -> str:
        """How many rows there are, and how many of the test rows were trained on or held out."""
        data = self.data
        rows = (
            f"{len(data.train):,} training, {len(data.validation):,} validation, "
            f"{len(data.test):,} test rows"
        )
        if not data.duplicates:
            return rows
        return f"{rows}; {data.duplicates:,} test rows are training rows too"

    def _spread_facts(self) -> dict[str, str]:
        """How the dense layers lie on the axis `model`, where it has more than one device."""
        devices = self.mesh.shape["model"]
        if devices == 1:
            return {}
        whole = ", ".join(sharding.undivided(self.mesh, self.template().model))
        spread = f"dense layers, each over {devices} devices"
        return {"spread": f"{spread}, but whole on each: {whole}" if whole else spread}
