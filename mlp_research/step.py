"""The heart: from a state and a batch to the next state. Pure functions of arrays, no I/O."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int32, Integer, PyTree

from mlp_research.augmentations import Augmentation
from mlp_research.data.batches import AnyChunk, Batch, MaskedBatch
from mlp_research.data.inputs import Inputs, RawImages, scaled
from mlp_research.models import Model, ModelConfig, advanced, with_model, without_state
from mlp_research.objectives import Measured, Objective, Sums, masked_sums
from mlp_research.optimizers import OptimizerConfig, clip_by_global_norm
from mlp_research.optimizers.schedules import ScheduleConfig
from mlp_research.prng import StepKeys
from mlp_research.probes import Examples, Probe
from mlp_research.shapes import (
    Counter,
    HostOrDevice,
    RandomKey,
    Scalar,
    ScaledImages,
    strongly_typed,
    where_given,
)
from mlp_research.starts import Start
from mlp_research.system import sharding


class Recipe(eqx.Module):
    """The parts that decide a run's steps; in place of each traced number a float32 scalar."""

    inputs: Inputs
    augmentation: Augmentation
    model: ModelConfig
    start: Start
    objective: Objective
    optimizer: OptimizerConfig
    schedule: ScheduleConfig
    probes: Probe
    total_steps: int = eqx.field(static=True)

    def training_images(self, images: RawImages, *, key: RandomKey) -> ScaledImages:
        """Return what a step trains on: images scaled, augmented and standardised, in this order.

        `key` is the step's, of the stream "augmentation".
        """
        augmented = self.augmentation.batch(scaled(images), self.inputs.image_shape, key=key)
        return self.inputs.standardised(augmented)

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
    keys: StepKeys
    """Roots of the keys of all steps; they never change."""


class StepMetrics(eqx.Module):
    """What one step measures: loss and gradient before its update. Of a chunk, with an axis."""

    loss: Float32[HostOrDevice, "*steps"]
    correct: Int32[HostOrDevice, "*steps"]
    gradient_norm: Float32[HostOrDevice, "*steps"]
    clipped: Bool[HostOrDevice, "*steps"]
    learning_rate: Float32[HostOrDevice, "*steps"]
    measured: dict[str, HostOrDevice]
    """Sums over the batch of what the objective measures beside."""
    probed: dict[str, HostOrDevice]
    """What a probe measures of the parameters before the update and after it."""


def init_state(model: Model, recipe: Recipe, *, keys: StepKeys) -> TrainState:
    """Return the state before the first step. `keys` are the roots of the keys of all steps."""
    rule = recipe.optimizer.transformation(recipe.optimizer.learning_rate)
    optimizer_state = rule.init(recipe.optimizer.trained(without_state(model)))
    return TrainState(model, strongly_typed(optimizer_state), jnp.int32(0), keys)


def evaluated_model(state: TrainState, recipe: Recipe) -> Model:
    """Return the model that is validated, tested and saved as the result."""
    network = without_state(state.model)
    parameters = recipe.optimizer.trained(network)
    evaluated = recipe.optimizer.evaluated(parameters, state.optimizer_state)
    return with_model(state.model, eqx.combine(evaluated, network))


def train_step(state: TrainState, recipe: Recipe, batch: Batch) -> tuple[TrainState, StepMetrics]:
    """Return the state after one step, and what the step measured.

    The images are augmented; the objective's gradients are clipped; the optimizer makes them
    updates at the schedule's rate; the start may hold some parameters where they are. What state a
    model has, such as running statistics, advances by one pass over the batch.
    """
    objective, optimizer = recipe.objective, recipe.optimizer
    keys = state.keys.at(state.step)
    images = recipe.training_images(batch.images, key=keys.augmentation)
    labels, key = jnp.asarray(batch.labels), keys.dropout
    (loss, measured), gradients = objective.gradients(state.model, images, labels, key=key)
    network = without_state(state.model)
    parameters = optimizer.trained(network)
    gradients = where_given(parameters, without_state(gradients))
    clip_norm: Any = optimizer.clip_norm  # traced, and infinite where there is none
    gradients, norm, clipped = clip_by_global_norm(gradients, clip_norm)

    def loss_at(parameters: PyTree) -> Scalar:
        model = with_model(state.model, eqx.combine(parameters, network))
        return objective.batch(model, images, labels, key=key)[0]

    rate = recipe.learning_rate(state.step)
    rule = optax.with_extra_args_support(optimizer.transformation(rate))
    updates, optimizer_state = rule.update(
        *(gradients, state.optimizer_state, parameters),
        value=loss,
        grad=gradients,
        value_fn=loss_at,
    )
    updated = recipe.start.constrain(parameters, eqx.apply_updates(parameters, updates))
    model = with_model(advanced(state.model, images, key=key), eqx.combine(updated, network))
    # Compiled apart: to be looked at must not change the bits.
    looked_at = jax.lax.optimization_barrier((parameters, updated))
    probed: Any = recipe.probes.measure_step(*looked_at)
    further: Any = {name: total for name, total in measured.items() if name != "correct"}
    metrics = StepMetrics(
        loss=loss,
        correct=measured["correct"],
        gradient_norm=norm,
        clipped=clipped,
        learning_rate=rate,
        measured=further,
        probed=probed,
    )
    return TrainState(model, optimizer_state, state.step + 1, state.keys), metrics


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


def eval_step(model: Model, recipe: Recipe, batch: MaskedBatch) -> Sums:
    """Return the sums over a batch's real rows of what is measured, with randomness off."""
    objective, labels = recipe.objective, jnp.asarray(batch.labels)
    logits = batch_logits(model, recipe, batch)
    losses = jax.vmap(objective.evaluation_loss)(logits, labels)
    measured = jax.vmap(objective.measured)(logits, labels)
    return masked_sums(losses, measured, jnp.asarray(batch.real))


def probe_step(model: Model, recipe: Recipe, batch: Batch) -> Measured:
    """Return what a probe measures of a model on a batch, with randomness off."""
    examples = Examples(recipe.inputs(batch.images), jnp.asarray(batch.labels))
    return recipe.probes.measure(eqx.nn.inference_mode(model), examples)


def predict_step(model: Model, recipe: Recipe, batch: MaskedBatch) -> Integer[Array, " batch"]:
    """Return the class with the largest logit, for each row."""
    return jnp.argmax(batch_logits(model, recipe, batch), axis=-1)


def batch_logits(model: Model, recipe: Recipe, batch: MaskedBatch) -> Float[Array, "batch classes"]:
    """Return the logits of each row, with randomness off."""
    model = eqx.nn.inference_mode(model)
    return jax.vmap(lambda image: model(image))(recipe.inputs(batch.images))


TrainSteps = Callable[[TrainState, Recipe, AnyChunk], tuple[TrainState, StepMetrics]]
EvalStep = Callable[[Model, Recipe, MaskedBatch], Sums]


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
    def compiled(model: Model, recipe: Recipe, batch: MaskedBatch) -> Sums:
        return sharding.replicate(mesh, eval_step(model, recipe, batch))

    return compiled


def compile_probe_step(mesh: Mesh) -> Callable[[Model, Recipe, Batch], Measured]:
    """Return `probe_step` compiled for one run; a second trace raises."""

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def compiled(model: Model, recipe: Recipe, batch: Batch) -> Measured:
        return sharding.replicate(mesh, probe_step(model, recipe, batch))

    return compiled


def compile_evaluated_model(mesh: Mesh) -> Callable[[TrainState, Recipe], Model]:
    """Return `evaluated_model` compiled for one run; a second trace raises."""

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def compiled(state: TrainState, recipe: Recipe) -> Model:
        return sharding.spread(mesh, evaluated_model(state, recipe))

    return compiled
