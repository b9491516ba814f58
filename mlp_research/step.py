"""The heart: from a state and a batch to the next state. Pure functions of arrays, no I/O."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int32, Integer, PyTree, UInt8

from mlp_research.data.batches import AnyChunk, Batch, MaskedBatch
from mlp_research.models import Model, ModelConfig
from mlp_research.objectives import Objective, Sums, masked_sums
from mlp_research.optimizers import OptimizerConfig, clip_by_global_norm
from mlp_research.optimizers.schedules import ScheduleConfig
from mlp_research.prng import step_key
from mlp_research.shapes import (
    Counter,
    HostOrDevice,
    RandomKey,
    Scalar,
    strongly_typed,
    where_given,
)
from mlp_research.system import sharding


class Recipe(eqx.Module):
    """The parts that decide a run's steps. Their traced numbers are float32 scalars in place."""

    model: ModelConfig
    objective: Objective
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    total_steps: int = eqx.field(static=True)

    def learning_rate(self, step: Integer[Array, ""]) -> Scalar:
        """Return the rate that is applied in the step after `step` steps."""
        shape = self.schedule.shape(self.total_steps)
        return jnp.asarray(self.optimizer.learning_rate * shape(step), jnp.float32)


class TrainState(eqx.Module):
    """All that a run carries from step to step; `step` is also the position in the data."""

    model: Model
    optimizer_state: PyTree
    step: Counter
    """Steps taken."""
    key: RandomKey
    """Root of the keys of all steps; it never changes."""


class StepMetrics(eqx.Module):
    """What one step measures on its batch before the update; after a chunk, with a leading axis."""

    loss: Float32[HostOrDevice, "*steps"]
    correct: Int32[HostOrDevice, "*steps"]
    gradient_norm: Float32[HostOrDevice, "*steps"]
    clipped: Bool[HostOrDevice, "*steps"]
    learning_rate: Float32[HostOrDevice, "*steps"]
    measured: dict[str, HostOrDevice]
    """Sums over the batch of what the objective measures beside."""


def init_state(model: Model, recipe: Recipe, *, key: RandomKey) -> TrainState:
    """Return the state before the first step. `key` is the root of the keys of all steps."""
    rule = recipe.optimizer.transformation(recipe.optimizer.learning_rate)
    optimizer_state = rule.init(recipe.optimizer.trained(model))
    return TrainState(model, strongly_typed(optimizer_state), jnp.int32(0), key)


def evaluated_model(state: TrainState, recipe: Recipe) -> Model:
    """Return the model that is validated, tested and saved as the result."""
    parameters = recipe.optimizer.trained(state.model)
    evaluated = recipe.optimizer.evaluated(parameters, state.optimizer_state)
    return eqx.combine(evaluated, state.model)


def scale_pixels(images: UInt8[HostOrDevice, "*shape"]) -> Float[Array, "*shape"]:
    """Raw pixels, 0 to 255, as float32 in [0, 1]."""
    return jnp.asarray(images, jnp.float32) / 255


def train_step(state: TrainState, recipe: Recipe, batch: Batch) -> tuple[TrainState, StepMetrics]:
    """One step: the objective's gradients, clipped, become the optimizer's updates at its rate."""
    objective, optimizer = recipe.objective, recipe.optimizer
    images, labels = scale_pixels(batch.images), jnp.asarray(batch.labels)
    key = step_key(state.key, state.step)
    (loss, measured), gradients = objective.gradients(state.model, images, labels, key=key)
    parameters = optimizer.trained(state.model)
    gradients = where_given(parameters, gradients)
    clip_norm: Any = optimizer.clip_norm  # traced, and infinite where there is none
    gradients, norm, clipped = clip_by_global_norm(gradients, clip_norm)

    def loss_at(parameters: PyTree) -> Scalar:
        model = eqx.combine(parameters, state.model)
        return objective.batch(model, images, labels, key=key)[0]

    rate = recipe.learning_rate(state.step)
    rule = optax.with_extra_args_support(optimizer.transformation(rate))
    updates, optimizer_state = rule.update(
        *(gradients, state.optimizer_state, parameters),
        value=loss,
        grad=gradients,
        value_fn=loss_at,
    )
    model = eqx.apply_updates(state.model, updates)
    further: Any = {name: total for name, total in measured.items() if name != "correct"}
    metrics = StepMetrics(loss, measured["correct"], norm, clipped, rate, further)
    return TrainState(model, optimizer_state, state.step + 1, state.key), metrics


def train_steps(
    state: TrainState, recipe: Recipe, chunk: AnyChunk
) -> tuple[TrainState, StepMetrics]:
    """The chunk's real steps in one scan; its surplus steps leave the state as it is."""
    arrays, static = eqx.partition(state, eqx.is_array)

    def step(arrays: PyTree, part: PyTree) -> tuple[PyTree, StepMetrics]:
        batch = chunk.batch(part)
        next_state, metrics = train_step(eqx.combine(arrays, static), recipe, batch)
        return eqx.filter(next_state, eqx.is_array), metrics

    def skip(arrays: PyTree, part: PyTree) -> tuple[PyTree, StepMetrics]:
        shapes = eqx.filter_eval_shape(step, arrays, part)[1]
        return arrays, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)

    def step_or_skip(arrays: PyTree, numbered: tuple) -> tuple[PyTree, StepMetrics]:
        index, part = numbered
        return jax.lax.cond(index < chunk.count, step, skip, arrays, part)

    room = jax.tree.leaves(chunk.steps)[0].shape[0]
    arrays, metrics = jax.lax.scan(step_or_skip, arrays, (jnp.arange(room), chunk.steps))
    return eqx.combine(arrays, static), metrics


def eval_step(model: Model, objective: Objective, batch: MaskedBatch) -> Sums:
    """Return the sums over a batch's real rows of what is measured, with randomness off."""
    labels = jnp.asarray(batch.labels)
    logits = batch_logits(model, batch)
    losses = jax.vmap(objective.evaluation_loss)(logits, labels)
    measured = jax.vmap(objective.measured)(logits, labels)
    return masked_sums(losses, measured, jnp.asarray(batch.real))


def predict_step(
    model: Model, objective: Objective, batch: MaskedBatch
) -> Integer[Array, " batch"]:
    """Return the class with the largest logit, for each row."""
    return jnp.argmax(batch_logits(model, batch), axis=-1)


def batch_logits(model: Model, batch: MaskedBatch) -> Float[Array, "batch classes"]:
    """Return the logits of each row, with randomness off."""
    model = eqx.nn.inference_mode(model)
    return jax.vmap(lambda image: model(image))(scale_pixels(batch.images))


TrainSteps = Callable[[TrainState, Recipe, AnyChunk], tuple[TrainState, StepMetrics]]
EvalStep = Callable[[Model, Objective, MaskedBatch], Sums]


def compile_train_steps(mesh: Mesh) -> TrainSteps:
    """`train_steps` compiled for one run. The state is donated; a second trace raises."""

    @eqx.filter_jit(donate="all-except-first")
    @eqx.debug.assert_max_traces(max_traces=1)
    def compiled(
        inputs: tuple[Recipe, AnyChunk], state: TrainState
    ) -> tuple[TrainState, StepMetrics]:
        next_state, metrics = train_steps(state, *inputs)
        return sharding.spread(mesh, next_state), sharding.replicate(mesh, metrics)

    return lambda state, recipe, chunk: compiled((recipe, chunk), state)


def compile_eval_step(mesh: Mesh) -> EvalStep:
    """`eval_step` compiled for one run; a second trace raises."""

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def compiled(model: Model, objective: Objective, batch: MaskedBatch) -> Sums:
        return sharding.replicate(mesh, eval_step(model, objective, batch))

    return compiled


def compile_evaluated_model(mesh: Mesh) -> Callable[[TrainState, Recipe], Model]:
    """Return `evaluated_model` compiled for one run; a second trace raises."""

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def compiled(state: TrainState, recipe: Recipe) -> Model:
        return sharding.spread(mesh, evaluated_model(state, recipe))

    return compiled
