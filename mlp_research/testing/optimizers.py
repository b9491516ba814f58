"""What an optimizer and its schedule promise; `testing.check_optimizer` asks."""

import tempfile
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import optax

from mlp_research import step
from mlp_research.checkpoints.checkpoint import Checkpoints
from mlp_research.optimizers import OptimizerConfig
from mlp_research.optimizers.schedules import ScheduleConfig
from mlp_research.programs.checks import check_trees_like
from mlp_research.step import evaluated_model
from mlp_research.system import sharding
from mlp_research.testing.promises import (
    Fault,
    bits_differ,
    compiled_quickly,
    named_arrays,
    not_finite,
    trees_differ,
    unheeded,
    with_other_numbers,
)
from mlp_research.testing.witness import OptimizerUnderTest

FROZEN = "layers[0]"
"""What is frozen of the model under test."""


def can_be_built(test: OptimizerUnderTest) -> Fault:
    """The configs, the schedule's shape, a state, and an update like the parameters."""
    rule, schedule = test.parts
    if not (isinstance(rule, OptimizerConfig) and isinstance(schedule, ScheduleConfig)):
        return f"wanted an OptimizerConfig and a ScheduleConfig, not {rule!r} and {schedule!r}"
    test.state(test.recipe(test.part()))
    test.after(test.part().traced(), test.gradients, steps=1)
    return None


def is_compiled_once(test: OptimizerUnderTest) -> Fault:
    """One program serves every step, every value of the traced numbers, and a part made anew."""
    for each, factor in ((test, 1.0), (OptimizerUnderTest(test.build), 0.5)):
        recipe = with_other_numbers(each.recipe(each.part()), factor)
        state = test.state(recipe)
        for _ in range(2):
            state, _ = test.train_step(state, recipe, test.batch)
    return None


def heeds_its_traced_numbers(test: OptimizerUnderTest) -> Fault:
    """Each traced number changes what is trained or evaluated.

    The clip norm is the step's, and the rate of an optimizer within is what it is given.
    """
    return unheeded(
        test.part().traced(),
        test.outcome,
        but=lambda path: path.endswith(("clip_norm", ".learning_rate")),
    )


def keeps_the_schedule_in_bounds(test: OptimizerUnderTest) -> Fault:
    """The shape lies between 0 and its peak 1, which is reached in the run."""
    low, high = float(test.factors.min()), float(test.factors.max())
    if not (low >= 0 and abs(high - 1) < 1e-3):
        return f"its shape runs from {low:.4g} to {high:.4g}, wanted within 0 to 1, reaching 1"
    return None


def applies_the_logged_rate(test: OptimizerUnderTest) -> Fault:
    """The change of a step is the rate in its metrics times what does not depend on the rate."""
    changes = []
    for peak in (1.0, 2.0):
        after, metrics = test.one_step(learning_rate=peak)
        expected = peak * test.factors.max()
        if not np.isclose(metrics.learning_rate, expected):
            return f"logged {metrics.learning_rate}, but peak times shape is {expected}"
        new = eqx.filter(after.model, eqx.is_inexact_array)
        change = optax.tree.sub(new, test.parameters)
        changes.append(optax.tree.scale(1 / metrics.learning_rate, change))
    return trees_differ("per unit of a rate of 1", changes[0], "of 2", changes[1])


def goes_downhill(test: OptimizerUnderTest) -> Fault:
    """The first updates go against the gradient."""
    change = jax.tree.leaves(test.change(test.part(), test.gradients))
    slope = sum(map(np.vdot, change, jax.tree.leaves(test.gradients)))
    return None if slope < 0 else f"update times gradient is {slope:.4g}, wanted below 0"


def gives_finite_updates(test: OptimizerUnderTest) -> Fault:
    """Updates are finite for a gradient of any size, and for none."""
    for scale in (0.0, 1e-12, 1.0, 1e6):
        gradients = optax.tree.scale(scale, test.gradients)
        fault = not_finite("update", test.change(test.part(), gradients))
        if fault:
            return f"{fault} where the gradient has size {scale:g}"
    return None


def leaves_parameters_alone_without_gradient(test: OptimizerUnderTest) -> Fault:
    """Without gradient and decay nothing moves."""
    change = test.change(test.part(momentum=0.9), optax.tree.zeros_like(test.gradients))
    moved = [path for path, leaf in named_arrays(change).items() if np.any(leaf)]
    return f"{', '.join(moved)} moved without gradient or decay" if moved else None


def decays_matrices_only(test: OptimizerUnderTest) -> Fault:
    """Weight decay changes no leaf of rank below two: biases and scales are exempt."""
    plain = named_arrays(test.change(test.part(), test.gradients))
    decayed = named_arrays(test.change(test.part(weight_decay=0.5), test.gradients))
    wrong = [
        path
        for path, leaf in plain.items()
        if leaf.ndim < 2 and not np.array_equal(leaf, decayed[path])
    ]
    return f"{', '.join(wrong)} decayed, but only matrices should" if wrong else None


def clips_the_gradient(test: OptimizerUnderTest) -> Fault:
    """What reaches the rule is no longer than the clip norm, and else whole; the metrics say so."""
    for bound in (1e-3, None):
        after, metrics = test.one_step(clip_norm=bound)
        norm = float(metrics.gradient_norm)
        given, wanted = float(after.optimizer_state[1]), norm if bound is None else min(bound, norm)
        if not np.isclose(given, wanted) or bool(metrics.clipped) != (bound is not None):
            return f"at clip norm {bound} a gradient of norm {given:.4g} came, wanted {wanted:.4g}"
    return None


def evaluates_its_own_parameters(test: OptimizerUnderTest) -> Fault:
    """What is evaluated after some steps is finite and like what is trained."""
    optimizer = test.part().traced()
    parameters, state = test.after(optimizer, test.gradients, steps=2)
    evaluated = optimizer.evaluated(parameters, state)
    check_trees_like(optimizer, "evaluated", "the evaluated parameters", evaluated, parameters)
    came, wanted = jax.tree.structure(evaluated), jax.tree.structure(parameters)
    if came != wanted:
        return f"the evaluated parameters are {came}, wanted {wanted}"
    return not_finite("evaluated parameter", evaluated)


def leaves_frozen_leaves_alone(test: OptimizerUnderTest) -> Fault:
    """What is frozen is the same to the bit in training and evaluation, and has no state."""
    recipe = test.recipe(test.part(freeze=(FROZEN,)))
    before = state = test.state(recipe)
    held = [path for path in named_arrays(state.optimizer_state) if FROZEN in path]
    if held:
        return f"with freeze {FROZEN} the state still holds {', '.join(held)}"
    train_step = compiled_quickly(step.train_step)
    for _ in range(2):
        state, _ = train_step(state, recipe, test.batch)
    first, *others = (
        {path: leaf for path, leaf in named_arrays(model).items() if path.startswith(FROZEN)}
        for model in (before.model, state.model, evaluated_model(state, recipe))
    )
    for other in others:
        fault = bits_differ(first, other)
        if fault:
            return f"with freeze {FROZEN} it still changes: {fault}"
    return None


def saves_and_restores(test: OptimizerUnderTest) -> Fault:
    """After a checkpoint in the middle the next step is bitwise the uninterrupted one."""
    state, _ = test.one_step()
    with tempfile.TemporaryDirectory() as folder, Checkpoints(Path(folder)) as checkpoints:
        checkpoints.save(0, state, {}, None)
        checkpoints.wait()
        shapes = eqx.filter_eval_shape(lambda: state)
        restored, _ = checkpoints.restore(0, sharding.template(sharding.device_mesh(1), shapes))
    # Where the state under test lies: the step is compiled for that place.
    restored = sharding.place(restored, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    recipe = test.recipe(test.part())
    after, resumed = (test.train_step(each, recipe, test.batch)[0] for each in (state, restored))
    fault = bits_differ(after, resumed)
    return f"the step after a restore is another one: {fault}" if fault else None
