"""Check a run's parts before a file is written, by shapes alone: nothing is computed.

Each fault is a `ConfigError` that names the hook, its place, what came and what is wanted.
"""

import inspect
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from mlp_research.config import Config
from mlp_research.data.batches import Batch, MaskedBatch
from mlp_research.data.datasets import Splits
from mlp_research.errors import ConfigError
from mlp_research.models import BATCH, Model, over_batch, without_state
from mlp_research.objectives import RESERVED, Sums
from mlp_research.parts import Part
from mlp_research.shapes import named_leaves
from mlp_research.step import (
    Recipe,
    TrainState,
    batch_logits,
    eval_step,
    probe_step,
)


def check_steps(state: TrainState, recipe: Recipe, data: Splits, config: Config) -> None:
    """Raise `ConfigError` where a part does not fit the others. `state` is one by shapes alone."""
    check_model(state.model, data, config)
    batch = batch_shapes(data, config.train.batch_size)
    check_augmentation(state, recipe, batch)
    check_start(state, recipe)
    check_objective(state, recipe, batch)
    check_optimizer(state, recipe)
    check_schedule(recipe)
    check_probe(state, recipe, batch)

    def evaluate(model: Model, batch: Batch) -> Sums:
        return eval_step(model, recipe, rows_of(batch))

    eqx.filter_eval_shape(evaluate, state.model, batch)


def check_model(model: Model, data: Splits, config: Config) -> None:
    """Raise `ConfigError` where the logits of one image are not one float32 for each class."""
    images = shape((1, data.train.images.shape[1]), jnp.float32)
    keys = eqx.filter_eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    logits = eqx.filter_eval_shape(lambda m, x, k: over_batch(m, x, k)[0], model, images, keys)
    wanted = shape((data.classes,), jnp.float32)
    if described(logits) != described(wanted):
        raise ConfigError(
            f"model {config.model.kind!r} ({hook_place(config.model, 'build')}) gives "
            f"{described(logits)} for one image, wanted {described(wanted)}: one logit for each of "
            f"the {data.classes} classes of the data"
        )


def check_augmentation(state: TrainState, recipe: Recipe, batch: Batch) -> None:
    """Raise `ConfigError` where an image is not of the same shape and dtype afterwards."""
    augmentation = recipe.augmentation
    image = shape(recipe.inputs.image_shape or batch.images.shape[1:], jnp.float32)
    came = eqx.filter_eval_shape(
        lambda image, keys: augmentation.augment(image, key=keys.augmentation), image, state.keys
    )
    if described(came) != described(image):
        raise ConfigError(
            f"{place(augmentation, 'augment')}: an image of {described(image)} becomes "
            f"{described(came)}, wanted the same shape and dtype"
        )


def check_start(state: TrainState, recipe: Recipe) -> None:
    """Raise `ConfigError` where a start gives arrays of other shapes or dtypes."""
    start, model = recipe.start, state.model
    if start.is_gone:
        return
    came = eqx.filter_eval_shape(
        lambda state: start.prepare_whole(state.model, key=state.keys.dropout), state
    )
    if jax.tree.structure(came) != jax.tree.structure(model):
        check_trees_like(start, "prepare", "the prepared model", came, model)
        raise ConfigError(
            f"{place(start, 'prepare')}: the prepared model is a {type(came).__name__} of another "
            "structure: give other numbers in the model that came, as eqx.tree_at does"
        )
    check_trees_like(start, "prepare", "the prepared model", came, model)
    parameters = recipe.optimizer.trained(without_state(model))
    kept = eqx.filter_eval_shape(start.constrain, parameters, parameters)
    check_trees_like(start, "constrain", "what is kept", kept, parameters)


def check_probe(state: TrainState, recipe: Recipe, batch: Batch) -> None:
    """Raise `ConfigError` where a probe gives anything but scalars by names of their own."""
    probe = recipe.probes
    parameters = recipe.optimizer.trained(without_state(state.model))
    after_epoch = eqx.filter_eval_shape(
        lambda model, batch: probe_step(model, recipe, batch), state.model, batch
    )
    in_step = eqx.filter_eval_shape(probe.measure_step, parameters, parameters)
    for hook, came in {"measure": after_epoch, "measure_step": in_step}.items():
        if not isinstance(came, dict):
            raise ConfigError(f"{place(probe, hook)}: it returned {described(came)}, wanted a dict")
        check_named_scalars(probe, hook, came)


def check_objective(state: TrainState, recipe: Recipe, batch: Batch) -> None:
    """Raise `ConfigError` where a hook returns what its caller cannot use."""
    objective = recipe.objective
    classes = eqx.filter_eval_shape(logits_of, state.model, recipe, batch).shape[1]
    logits, label = shape((classes,), jnp.float32), shape((), batch.labels.dtype)
    for hook in [hook for hook in ("loss", "evaluation_loss") if is_own(objective, hook)]:
        loss = eqx.filter_eval_shape(getattr(objective, hook), logits, label)
        check_scalar(objective, hook, "the loss of one example", loss)
    if is_own(objective, "measure") or is_own(objective, "measured"):
        measured = eqx.filter_eval_shape(objective.measured, logits, label)
        hook = "measured" if is_own(objective, "measured") else "measure"
        check_measured(objective, hook, measured)
    if is_own(objective, "example"):

        def one(state: TrainState, batch: Batch) -> Any:
            images, labels = recipe.inputs(batch.images), jnp.asarray(batch.labels)
            each = jax.vmap(
                lambda image, label: objective.example(
                    state.model, image, label, key=state.keys.dropout
                ),
                axis_name=BATCH,
            )
            return jax.tree.map(lambda leaf: leaf[0], each(images, labels))

        came = eqx.filter_eval_shape(one, state, batch)
        check_pair(objective, "example", "the loss of one example", came)

    def call(hook: str) -> Any:
        def many(state: TrainState, batch: Batch) -> Any:
            images, labels = recipe.inputs(batch.images), jnp.asarray(batch.labels)
            return getattr(objective, hook)(state.model, images, labels, key=state.keys.dropout)

        return eqx.filter_eval_shape(many, state, batch)

    if is_own(objective, "batch"):
        check_pair(objective, "batch", "the mean loss", call("batch"))
    came = call("gradients")
    if not (isinstance(came, tuple) and len(came) == 2):
        wanted = "((loss, measurements), gradient)"
        raise ConfigError(f"{place(objective, 'gradients')}: it returned {came!r}, wanted {wanted}")
    check_pair(objective, "gradients", "the mean loss", came[0])
    parameters = recipe.optimizer.trained(without_state(state.model))
    found, wanted = dict(named_leaves(without_state(came[1]))), dict(named_leaves(parameters))
    # What stands at frozen parameters is not used.
    gradient = {path: found[path] for path in wanted if path in found}
    check_like(objective, "gradients", "the gradient", gradient, wanted)


def check_optimizer(state: TrainState, recipe: Recipe) -> None:
    """Raise `ConfigError` where the updates or the state of a step are not like those before."""
    optimizer = recipe.optimizer
    parameters = optimizer.trained(without_state(state.model))
    empty = [path for path, leaf in named_leaves(state.optimizer_state) if not leaf.size]
    if empty:
        raise ConfigError(
            f"{place(optimizer, 'transformation')}: its state holds arrays without a number, which "
            f"cannot be saved: {', '.join(empty)}"
        )

    def update(parameters: PyTree, state: PyTree) -> tuple[PyTree, PyTree]:
        rule = optax.with_extra_args_support(optimizer.transformation(optimizer.learning_rate))
        loss = jnp.float32(0)
        extra = {"value": loss, "grad": parameters, "value_fn": lambda parameters: loss}
        return rule.update(parameters, state, parameters, **extra)

    updates, after = eqx.filter_eval_shape(update, parameters, state.optimizer_state)
    check_trees_like(optimizer, "transformation", "an update", updates, parameters)
    check_trees_like(optimizer, "transformation", "its next state", after, state.optimizer_state)
    result = eqx.filter_eval_shape(optimizer.evaluated, parameters, state.optimizer_state)
    check_trees_like(optimizer, "evaluated", "what is evaluated", result, parameters)


def check_schedule(recipe: Recipe) -> None:
    """Raise `ConfigError` where the factor of a step is not one number."""
    schedule = recipe.schedule

    def factor(step: Array) -> Array:
        return jnp.asarray(schedule.shape(recipe.total_steps)(step))

    came = eqx.filter_eval_shape(factor, shape((), jnp.int32))
    if came.shape != ():
        raise ConfigError(
            f"{place(schedule, 'shape')}: the factor of a step is {described(came)}, wanted one "
            "number"
        )


def check_scalar(part: Part, hook: str, what: str, came: Any) -> None:
    """Raise `ConfigError` for a loss that is no float32 scalar."""
    if described(came) != "float32[]":
        raise ConfigError(f"{place(part, hook)}: {what} is {described(came)}, wanted float32[]")


def check_measured(part: Part, hook: str, measured: Any) -> None:
    """Raise `ConfigError` for measurements that no log line could hold."""
    if not isinstance(measured, dict) or "correct" not in measured:
        raise ConfigError(
            f"{place(part, hook)}: the measurements are {described(measured)}, wanted a dict with "
            "`correct`: begin with self.measured(logits, label)"
        )
    correct = measured["correct"]
    if not jnp.issubdtype(correct.dtype, jnp.integer) and correct.dtype != bool:
        raise ConfigError(
            f"{place(part, hook)}: the measurement correct is {described(correct)}, wanted a truth "
            "or a count"
        )
    check_named_scalars(part, hook, {n: v for n, v in measured.items() if n != "correct"})


def check_named_scalars(part: Part, hook: str, measured: dict[str, Any]) -> None:
    """Raise `ConfigError` for a name that another number has, or a value that is no number."""
    reserved = sorted(RESERVED & measured.keys())
    if reserved:
        raise ConfigError(
            f"{place(part, hook)}: the measurement {reserved[0]} has the name of another number of "
            "metrics.jsonl: give it another"
        )
    for name, value in measured.items():
        if getattr(value, "shape", None) != ():
            raise ConfigError(
                f"{place(part, hook)}: the measurement {name} is {described(value)}, wanted one "
                "number"
            )


def check_trees_like(part: Part, hook: str, what: str, came: PyTree, wanted: PyTree) -> None:
    """Raise `ConfigError` where two trees differ in a path, a shape or a dtype."""
    check_like(part, hook, what, dict(named_leaves(came)), dict(named_leaves(wanted)))


def check_like(
    part: Part, hook: str, what: str, came: dict[str, Any], wanted: dict[str, Any]
) -> None:
    """Raise `ConfigError` where arrays by path differ in a path, a shape or a dtype."""
    mine, others = (
        {path: described(leaf) for path, leaf in tree.items() if hasattr(leaf, "shape")}
        for tree in (came, wanted)
    )
    for path in sorted(mine.keys() | others.keys()):
        if mine.get(path) != others.get(path):
            raise ConfigError(
                f"{place(part, hook)}: {what} has {mine.get(path, 'nothing')} at {path or 'top'}, "
                f"wanted {others.get(path, 'nothing')}"
            )


def check_pair(part: Part, hook: str, what: str, came: Any) -> None:
    """Raise `ConfigError` for what is no pair of a loss and measurements."""
    if not (isinstance(came, tuple) and len(came) == 2):
        raise ConfigError(
            f"{place(part, hook)}: it returned {described(came)}, wanted (loss, measurements)"
        )
    check_scalar(part, hook, what, came[0])
    check_measured(part, hook, came[1])


def is_own(part: Part, hook: str) -> bool:
    """Return whether a hook is defined outside the package, which needs no check of its own."""
    return not inspect.unwrap(getattr(type(part), hook)).__module__.startswith("mlp_research.")


def place(part: Part, hook: str) -> str:
    """Return a hook with the place of its definition: `objective hook batch (my_lab.py:12)`."""
    return f"{hook} of {part.kind!r} ({hook_place(part, hook)})"


def hook_place(part: Part, hook: str) -> str:
    """Return file and line of a hook's definition."""
    code = inspect.unwrap(getattr(type(part), hook)).__code__
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}"


def described(value: Any) -> str:
    """Return dtype and shape of an array, the type of anything else: `float32[10]`."""
    if not hasattr(value, "shape"):
        return type(value).__name__
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def rows_of(batch: Batch) -> MaskedBatch:
    """Return a training batch as an evaluation batch of which every row counts."""
    return MaskedBatch(batch.images, batch.labels, jnp.ones(len(batch.labels), bool))


def logits_of(model: Model, recipe: Recipe, batch: Batch) -> Array:
    return batch_logits(model, recipe, rows_of(batch))


def batch_shapes(data: Splits, batch_size: int) -> Batch:
    """Return a batch by shapes alone."""
    rows = Batch(data.train.images, data.train.labels)
    return jax.tree.map(lambda leaf: shape((batch_size, *leaf.shape[1:]), leaf.dtype), rows)


def shape(sizes: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)
