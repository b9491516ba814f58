"""What a model promises to training: `testing.check_model` asks.

That it is a pytree, can be built by shapes and in numbers, is saved whole, compiled once, donated,
and learns.
"""

import tempfile
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import PyTree

from mlp_research.checkpoints.checkpoint import Checkpoints
from mlp_research.models import parameters_of
from mlp_research.shapes import is_shape
from mlp_research.system import sharding
from mlp_research.testing.promises import (
    Fault,
    bits_differ,
    compiled_quickly,
    differs,
    named_arrays,
    named_parameters,
)
from mlp_research.testing.subject import (
    EXAMPLES,
    MEAN,
    ModelUnderTest,
    batch_gradients,
    batch_logits,
)

LEARNING_STEPS = 1000
LEARNING_RATE = 3e-3
WITHOUT = "give a larger image, or without=('learns_32_examples',)"


def can_be_taken_apart(test: ModelUnderTest) -> Fault:
    """Flatten and unflatten give the same model; `tree_at` replaces one parameter and no other."""
    leaves, structure = jax.tree.flatten(test.model)
    rebuilt = jax.tree.unflatten(structure, leaves)
    if jax.tree.structure(rebuilt) != structure:
        return "flattened and unflattened, its structure is another"
    logits = test.call(rebuilt, test.images[0], test.keys[0])
    fault = differs("flattened and unflattened", logits, "as built", test.logits)
    if fault:
        return fault
    before = named_parameters(test.model)
    path, value = next(iter(before.items()))
    index = [eqx.is_inexact_array(leaf) for leaf in leaves].index(True)
    replaced = eqx.tree_at(lambda model: jax.tree.leaves(model)[index], test.model, value + 1)
    after = named_parameters(replaced)
    changed = [path for path in before if not np.array_equal(before[path], after[path])]
    return None if changed == [path] else f"tree_at on {path} changed {changed}"


def builds_without_allocating(test: ModelUnderTest) -> Fault:
    """`eqx.filter_eval_shape` of the constructor gives the shapes of the model."""
    abstract = eqx.filter_eval_shape(test.made, key=jr.key(0))
    shapes = {path: leaf.shape for path, leaf in _shapes(abstract).items()}
    real = {path: leaf.shape for path, leaf in named_arrays(test.built).items()}
    return None if shapes == real else f"by shapes alone it is {shapes}, but really {real}"


def builds_many_at_once(test: ModelUnderTest) -> Fault:
    """`eqx.filter_vmap` of the constructor over keys stacks models; here by shapes alone."""
    keys = jr.split(jr.key(0), 2)
    many = _shapes(eqx.filter_eval_shape(eqx.filter_vmap(lambda key: test.made(key=key)), keys))
    for path, leaf in named_arrays(test.built).items():
        if many[path].shape != (2, *leaf.shape):
            return f"{path} of two models is {many[path].shape}, wanted {(2, *leaf.shape)}"
    return None


def saves_and_restores(test: ModelUnderTest) -> Fault:
    """Through a checkpoint it is bitwise the same, its outputs too."""
    empty = [path for path, leaf in named_arrays(test.model).items() if leaf.size == 0]
    if empty:
        return f"{', '.join(empty)} has size zero, which a checkpoint cannot hold"
    with tempfile.TemporaryDirectory() as folder, Checkpoints(Path(folder)) as checkpoints:
        checkpoints.save(0, test.model, {}, None)
        checkpoints.wait()
        shapes = eqx.filter_eval_shape(lambda: test.model)
        restored, _ = checkpoints.restore(0, sharding.template(sharding.device_mesh(1), shapes))
    fault = bits_differ(test.model, restored)
    if fault:
        return f"restored, {fault}"
    logits = test.call(restored, test.images[0], test.keys[0])
    return differs("restored", logits, "as saved", test.logits)


def compiles_once(test: ModelUnderTest) -> Fault:
    """One program serves another model and what an update makes of a model."""
    once = eqx.debug.assert_max_traces(max_traces=1)(_nudge)
    update = compiled_quickly(once)
    models = {"the first": test.made(key=jr.key(0)), "another": test.made(key=jr.key(1))}
    models["an updated"] = update(models["the first"])
    for name, model in models.items():
        try:
            update(model)
        except RuntimeError:
            change = _first_change(models["the first"], model)
            return f"{name} model needs a second program: {change}"
    return None


def survives_donation(test: ModelUnderTest) -> Fault:
    """A program may overwrite the model it is given, as nothing else holds its arrays."""
    update = compiled_quickly(_nudge, donate="all")
    update(update(test.made(key=jr.key(0))))
    model = update(update(test.made(key=jr.key(0))))
    test.call(model, test.images[0], test.keys[0])
    return None


def learns_32_examples(test: ModelUnderTest) -> Fault:
    """Adam brings it to 100 % on random images with random labels."""
    images, labels, keys = test.examples
    model, correct = test.model, 0
    leaves, structure = jax.tree.flatten(parameters_of(model))
    state = optax.adam(LEARNING_RATE).init(leaves)
    for step in range(LEARNING_STEPS):
        if step % 20 == 0:
            logits = batch_logits(eqx.nn.inference_mode(model), images, keys)
            correct = int((logits.argmax(-1) == labels).sum())
            if correct == EXAMPLES:
                return None
        step_keys = jax.vmap(jr.fold_in, in_axes=(0, None))(keys, step)
        gradients = batch_gradients(model, (images, labels, step_keys), MEAN)
        leaves, state = _adam_step(leaves, jax.tree.leaves(gradients), state)
        after = model if test.state_fault else test.after_a_batch(model, jr.fold_in(keys[0], step))
        model = eqx.combine(jax.tree.unflatten(structure, leaves), after)
    few = test.pixels < EXAMPLES
    hint = f". If it is linear in its {test.pixels} pixels it cannot: {WITHOUT}" if few else ""
    return f"after {LEARNING_STEPS} steps of Adam {correct} of {EXAMPLES} are right{hint}"


def _nudge(model: Any) -> Any:
    """An update as an optimizer's, but cheap to compile."""
    parameters = parameters_of(model)
    updates = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 1e-3, leaf.dtype), parameters)
    return eqx.apply_updates(model, updates)


def _first_change(one: Any, other: Any) -> str:
    """What a compiled program tells apart in two models."""

    def kinds(model: Any) -> dict[str, str]:
        leaves = jax.tree_util.tree_flatten_with_path(model)[0]
        return {
            jax.tree_util.keystr(path).lstrip("."): repr(
                jax.typeof(leaf) if eqx.is_array(leaf) else leaf
            )
            for path, leaf in leaves
        }

    before, after = kinds(one), kinds(other)
    for path in before:
        if before[path] != after.get(path):
            return f"{path} was {before[path]} and is {after.get(path)}"
    return "a static field changed: is a function or object made anew in each constructor?"


@jax.jit
def _adam_step(leaves: Any, gradients: Any, state: PyTree) -> tuple[Any, PyTree]:
    """On a list, so that models of the same shapes share the program."""
    updates, state = optax.adam(LEARNING_RATE).update(gradients, state)
    return optax.apply_updates(leaves, updates), state


def _shapes(tree: PyTree) -> dict[str, Any]:
    """The arrays by their paths, of a tree that holds shapes in their place."""
    abstract = eqx.filter(tree, is_shape)
    leaves = jax.tree_util.tree_flatten_with_path(abstract)[0]
    return {jax.tree_util.keystr(path).lstrip("."): leaf for path, leaf in leaves}
