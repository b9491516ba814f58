"""The heart: from a state and a batch to the next state. Pure functions of arrays, no I/O."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int32, PyTree, UInt8

from mlp_research import sharding
from mlp_research.models import Model
from mlp_research.objectives import Sums, cross_entropy, is_correct, masked_sums
from mlp_research.optimizers import Optimizer, Settings, clip_by_global_norm
from mlp_research.prng import example_keys
from mlp_research.shapes import (
    AnyChunk,
    Batch,
    Counter,
    HostOrDevice,
    MaskedBatch,
    RandomKey,
    Scalar,
)


class TrainState(eqx.Module):
    """All that a run carries from step to step; `step` is also the position in the data."""

    model: Model
    optimizer_state: PyTree
    step: Counter
    """Steps taken."""
    key: RandomKey
    """Root of the dropout masks; it never changes."""
    optimizer: Optimizer = eqx.field(static=True)


class StepMetrics(eqx.Module):
    """What one step measures on its batch before the update; after a chunk, with a leading axis."""

    loss: Float32[HostOrDevice, "*steps"]
    correct: Int32[HostOrDevice, "*steps"]
    gradient_norm: Float32[HostOrDevice, "*steps"]
    clipped: Bool[HostOrDevice, "*steps"]
    learning_rate: Float32[HostOrDevice, "*steps"]


def init_state(model: Model, optimizer: Optimizer, *, key: RandomKey) -> TrainState:
    """The state before the first step. `key` is the root of the dropout masks."""
    parameters = eqx.filter(model, eqx.is_inexact_array)
    return TrainState(model, optimizer.init(parameters), jnp.int32(0), key, optimizer)


def scale_pixels(images: UInt8[HostOrDevice, "*shape"]) -> Float[Array, "*shape"]:
    """Raw pixels, 0 to 255, as float32 in [0, 1]."""
    return jnp.asarray(images, jnp.float32) / 255


def train_step(
    state: TrainState, settings: Settings, batch: Batch
) -> tuple[TrainState, StepMetrics]:
    """One optimizer step on the mean loss of a batch."""
    keys = example_keys(state.key, state.step, len(batch.labels))
    images, labels = scale_pixels(batch.images), jnp.asarray(batch.labels)

    def mean_loss(model: Model) -> tuple[Scalar, Counter]:
        logits = jax.vmap(lambda image, key: model(image, key=key))(images, keys)
        losses = jax.vmap(cross_entropy, in_axes=(0, 0, None))(
            logits, labels, settings.label_smoothing
        )
        return losses.mean(), jax.vmap(is_correct)(logits, labels).sum(dtype=jnp.int32)

    (loss, correct), gradients = eqx.filter_value_and_grad(mean_loss, has_aux=True)(state.model)
    gradients, norm, clipped = clip_by_global_norm(gradients, settings.clip_norm)
    rate = state.optimizer.learning_rate(settings, state.step)
    updates, optimizer_state = state.optimizer.update(
        gradients,
        state.optimizer_state,
        eqx.filter(state.model, eqx.is_inexact_array),
        settings,
        rate,
    )
    model = eqx.apply_updates(state.model, updates)
    next_state = TrainState(model, optimizer_state, state.step + 1, state.key, state.optimizer)
    return next_state, StepMetrics(loss, correct, norm, clipped, rate)


def train_steps(
    state: TrainState, settings: Settings, chunk: AnyChunk
) -> tuple[TrainState, StepMetrics]:
    """The chunk's real steps in one scan; its surplus steps leave the state as it is."""
    arrays, static = eqx.partition(state, eqx.is_array)

    def step(arrays: PyTree, part: PyTree) -> tuple[PyTree, StepMetrics]:
        batch = chunk.batch(part)
        next_state, metrics = train_step(eqx.combine(arrays, static), settings, batch)
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


def eval_step(model: Model, batch: MaskedBatch) -> Sums:
    """Loss and correct answers of a model, randomness off, summed over the real rows of a batch."""
    model = eqx.nn.inference_mode(model)
    labels = jnp.asarray(batch.labels)
    logits = jax.vmap(lambda image: model(image))(scale_pixels(batch.images))
    losses = jax.vmap(cross_entropy, in_axes=(0, 0, None))(logits, labels, jnp.float32(0))
    return masked_sums(losses, jax.vmap(is_correct)(logits, labels), jnp.asarray(batch.real))


TrainSteps = Callable[[TrainState, Settings, AnyChunk], tuple[TrainState, StepMetrics]]
EvalStep = Callable[[Model, MaskedBatch], Sums]


def compile_train_steps(mesh: Mesh) -> TrainSteps:
    """`train_steps` compiled for one run. The state is donated; a second trace raises."""

    @eqx.filter_jit(donate="all-except-first")
    @eqx.debug.assert_max_traces(max_traces=1)
    def compiled(
        inputs: tuple[Settings, AnyChunk], state: TrainState
    ) -> tuple[TrainState, StepMetrics]:
        next_state, metrics = train_steps(state, *inputs)
        return sharding.spread(mesh, next_state), sharding.replicate(mesh, metrics)

    return lambda state, settings, chunk: compiled((settings, chunk), state)


def compile_eval_step(mesh: Mesh) -> EvalStep:
    """`eval_step` compiled for one run; a second trace raises."""

    @eqx.filter_jit
    @eqx.debug.assert_max_traces(max_traces=1)
    def compiled(model: Model, batch: MaskedBatch) -> Sums:
        return sharding.replicate(mesh, eval_step(model, batch))

    return compiled
