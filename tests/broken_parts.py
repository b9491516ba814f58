"""Objectives and optimizers that each break a promise on purpose, and what breaks with it."""

from collections.abc import Callable
from typing import Annotated, Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec
from pydantic import Field

from mlp_research.errors import ConfigError
from mlp_research.objectives import CrossEntropy, Objective, summed
from mlp_research.optimizers import OptimizerConfig, SGDConfig, WeightDecay
from mlp_research.optimizers.schedules import ScheduleConfig
from mlp_research.parts import TRACED

Breaks = tuple[Callable[[], Any], str, tuple[str, ...]]
"""A way to make the thing, the promise it is made to break, and the others that fall with it."""

random = np.random.default_rng(0)


def raises() -> Any:
    raise ConfigError("no such part")


# Objectives


class Confident(Objective, frozen=True):
    """Cross-entropy with a measurement; it keeps every promise, and the others are made of it."""

    kind: str = "confident"
    sharpness: Annotated[float, TRACED] = 1.0

    def loss(self, logits, label):
        return -jax.nn.log_softmax(self.sharpness * logits)[label]

    def measure(self, logits, label):
        return {"confidence": jax.nn.softmax(logits).max()}


class Within(Confident, frozen=True):
    """An objective made of another, whose traced numbers are its own too."""

    kind: str = "within"
    inner: Objective = CrossEntropy(label_smoothing=0.1)

    def loss(self, logits, label):
        return self.inner.loss(self.sharpness * logits, label)


class OneLossForEachClass(Confident, frozen=True):
    kind: str = "one-loss-for-each-class"

    def loss(self, logits, label):
        return jax.nn.log_softmax(self.sharpness * logits)


class LosesALayer(Confident, frozen=True):
    kind: str = "loses-a-layer"

    def gradients(self, model, images, labels, *, key):
        loss, gradient = super().gradients(model, images, labels, key=key)
        return loss, eqx.tree_at(lambda tree: tree.layers[0].bias, gradient, None)


class EvaluatesEachClass(Confident, frozen=True):
    kind: str = "evaluates-each-class"

    def evaluation_loss(self, logits, label):
        return logits


class Overflows(Confident, frozen=True):
    kind: str = "overflows"

    def loss(self, logits, label):
        powers = jnp.exp(self.sharpness * logits)
        return -jnp.log(powers[label] / powers.sum())


class NoLossAtAll(Confident, frozen=True):
    kind: str = "no-loss-at-all"

    def loss(self, logits, label):
        return self.sharpness * logits[0] / jnp.zeros(())


class DrawsInPython(Confident, frozen=True):
    kind: str = "draws-in-python"

    def loss(self, logits, label):
        return super().loss(logits, label) * random.uniform(0.9, 1.1)


class FreshFunction(Confident, frozen=True):
    kind: str = "fresh-function"
    shape: Callable = Field(default_factory=lambda: lambda values: values)


class DeafObjective(Confident, frozen=True):
    kind: str = "deaf-objective"
    strength: Annotated[float, TRACED] = 0.0


class DeafWithin(Within, frozen=True):
    """It takes its inner part's loss without the number that the part has traced."""

    kind: str = "deaf-within"

    def loss(self, logits, label):
        return -jax.nn.log_softmax(self.sharpness * logits)[label]


class CountsProbabilities(Confident, frozen=True):
    kind: str = "counts-probabilities"

    def measured(self, logits, label):
        return super().measured(logits, label) | {"correct": jax.nn.softmax(logits)[label]}


class CountsTheSmallest(Confident, frozen=True):
    kind: str = "counts-the-smallest"

    def measured(self, logits, label):
        return super().measured(logits, label) | {"correct": logits.argmin() == label}


class CountsTwice(Confident, frozen=True):
    kind: str = "counts-twice"

    def batch(self, model, images, labels, *, key):
        loss, measured = super().batch(model, images, labels, key=key)
        return loss, measured | {"correct": measured["correct"] + len(labels)}


class EvaluatesByChance(Confident, frozen=True):
    kind: str = "evaluates-by-chance"

    def evaluation_loss(self, logits, label):
        return self.loss(logits, label) * random.uniform(0.9, 1.1)


class EvaluatesToInfinity(Confident, frozen=True):
    kind: str = "evaluates-to-infinity"

    def evaluation_loss(self, logits, label):
        return self.loss(logits, label) / jnp.zeros(())


class MeasuresInfinity(Confident, frozen=True):
    """In evaluation alone."""

    kind: str = "measures-infinity"

    def measured(self, logits, label):
        largest = jax.lax.stop_gradient(logits.max())
        return super().measured(logits, label) | {"ratio": largest / jnp.zeros(())}

    def batch(self, model, images, labels, *, key):
        loss, measured = super().batch(model, images, labels, key=key)
        return loss, measured | {"ratio": jnp.zeros(())}


class MeasuresInEvaluationAlone(Confident, frozen=True):
    kind: str = "measures-in-evaluation-alone"

    def batch(self, model, images, labels, *, key):
        loss, measured = super().batch(model, images, labels, key=key)
        return loss, summed({"correct": measured["correct"]})


@custom_partitioning
def _mean_of_what_is_here(values):
    return values.mean()


def _everywhere(mesh, *_):
    return NamedSharding(mesh, PartitionSpec())


_mean_of_what_is_here.def_partition(
    partition=lambda mesh, arguments, _: (
        mesh,
        lambda values: values.mean(),
        _everywhere(mesh),
        (arguments[0].sharding,),
    ),
    infer_sharding_from_operands=_everywhere,
    sharding_rule="i -> ",
)


class SeesOneDevice(Confident, frozen=True):
    """A mean over a batch that each device takes over its own rows."""

    kind: str = "sees-one-device"

    def batch(self, model, images, labels, *, key):
        loss, measured = super().batch(model, images, labels, key=key)
        return loss + _mean_of_what_is_here(labels.astype(jnp.float32)), measured


class Ascends(Confident, frozen=True):
    kind: str = "ascends"

    def gradients(self, model, images, labels, *, key):
        loss, gradient = super().gradients(model, images, labels, key=key)
        return loss, jax.tree.map(jnp.negative, gradient)


SHAPES = "gives_a_scalar_loss_and_a_gradient_like_the_model"
BROKEN_OBJECTIVES: list[Breaks] = [
    (raises, "can_be_built", ()),
    (SGDConfig, "can_be_built", ()),
    (OneLossForEachClass, SHAPES, ()),
    (LosesALayer, SHAPES, ()),
    (EvaluatesEachClass, SHAPES, ()),
    (Overflows, "is_finite", ()),
    (NoLossAtAll, "is_finite", ("heeds_its_traced_numbers",)),  # every value gives NaN
    (DrawsInPython, "repeats_for_the_same_key", ()),
    (FreshFunction, "is_compiled_once", ()),
    (DeafObjective, "heeds_its_traced_numbers", ()),
    (DeafWithin, "heeds_its_traced_numbers", ()),
    (CountsProbabilities, SHAPES, ()),
    (CountsTheSmallest, "counts_correct", ()),
    (CountsTwice, "counts_correct", ()),
    (EvaluatesByChance, "evaluates_without_chance", ()),
    (EvaluatesToInfinity, "evaluates_without_chance", ()),
    (MeasuresInfinity, "evaluates_without_chance", ()),
    (MeasuresInEvaluationAlone, "sums_what_it_measures", ()),
    (SeesOneDevice, "is_the_same_on_two_devices", ()),
    (Ascends, "descends", ()),
]


# Optimizers


class Rule(OptimizerConfig, frozen=True):
    """Plain gradient descent, which keeps every promise; the broken rules are made of it."""

    kind: str = "rule"

    def direction(self) -> optax.GradientTransformation:
        return optax.identity()

    def transformation(self, learning_rate) -> Any:
        return optax.chain(self.direction(), optax.scale_by_learning_rate(learning_rate))


class Averaged(Rule, frozen=True):
    """It evaluates a running mean of its parameters, as far as they are trained."""

    kind: str = "averaged"
    decay: Annotated[float, TRACED] = 0.9

    def transformation(self, learning_rate):
        rule = super().transformation(learning_rate)

        def update(updates, state, params: Any = None):
            updates, inner = rule.update(updates, state[0], params)
            after = optax.apply_updates(params, updates)
            mean = jax.tree.map(
                lambda one, other: self.decay * one + (1 - self.decay) * other, state[1], after
            )
            return updates, (inner, mean)

        return optax.GradientTransformation(lambda params: (rule.init(params), params), update)

    def evaluated(self, parameters, state):
        return state[1]


class Searches(Rule, frozen=True):
    """It looks for a step along the gradient by the loss elsewhere."""

    kind: str = "searches"

    def transformation(self, learning_rate):
        return optax.chain(
            optax.scale(-learning_rate),
            optax.scale_by_backtracking_linesearch(max_backtracking_steps=5),
        )


class Around(Rule, frozen=True):
    """An optimizer made of another one."""

    kind: str = "around"
    inner: OptimizerConfig = SGDConfig(weight_decay=0.1)

    def transformation(self, learning_rate):
        return self.inner.transformation(learning_rate)


def mapped(function: Callable) -> optax.GradientTransformation:
    """The direction as a function of each gradient and its parameter."""
    return optax.stateless(lambda updates, params: jax.tree.map(function, updates, params))


class WrongShapes(Rule, frozen=True):
    kind: str = "wrong-shapes"

    def direction(self):
        return mapped(lambda gradient, _: gradient.sum(0))


class Counts(Rule, frozen=True):
    """Its state starts as a whole number and goes on as a fraction."""

    kind: str = "counts"

    def direction(self):
        return optax.GradientTransformation(
            lambda params: 0, lambda updates, state, params=None: (updates, state + 0.5)
        )


class FreshRule(Rule, frozen=True):
    kind: str = "fresh-rule"
    shape: Callable = Field(default_factory=lambda: lambda values: values)


class Deaf(Rule, frozen=True):
    kind: str = "deaf"
    momentum: Annotated[float, TRACED] = 0.9

    def direction(self):
        return optax.trace(0.9)


class Squares(Rule, frozen=True):
    """The learning rate enters twice."""

    kind: str = "squares"

    def direction(self):
        return optax.scale(self.learning_rate)


class Uphill(Rule, frozen=True):
    kind: str = "uphill"

    def direction(self):
        return optax.scale(-1.0)


class DividesByNorm(Rule, frozen=True):
    kind: str = "divides-by-norm"

    def direction(self):
        return mapped(lambda gradient, _: gradient / jnp.linalg.norm(gradient))


class Drifts(Rule, frozen=True):
    kind: str = "drifts"

    def direction(self):
        return mapped(lambda gradient, _: gradient + 1e-3)


class DecaysAll(Rule, frozen=True):
    kind: str = "decays-all"
    weight_decay: WeightDecay = 0.1

    def direction(self):
        return mapped(lambda gradient, weight: gradient + self.weight_decay * weight)


class EvaluatesHalf(Rule, frozen=True):
    kind: str = "evaluates-half"

    def evaluated(self, parameters, state):
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), parameters)


class EvaluatesNothing(Rule, frozen=True):
    """Its mean counts no step."""

    kind: str = "evaluates-nothing"

    def evaluated(self, parameters, state):
        return jax.tree.map(lambda leaf: 0 * leaf / jnp.zeros(()), parameters)


class TrainsAll(Rule, frozen=True):
    kind: str = "trains-all"

    def trained(self, model):
        return eqx.filter(model, eqx.is_inexact_array)


class Remembers(TrainsAll, frozen=True):
    """It moves no frozen leaf, but keeps a moment of it."""

    kind: str = "remembers"

    def direction(self):
        frozen = "layers[0]" if self.freeze else "nothing"

        def update(path, leaf):
            return 0 * leaf if frozen in jax.tree_util.keystr(path) else leaf

        masked = optax.stateless(
            lambda updates, _: jax.tree_util.tree_map_with_path(update, updates)
        )
        return optax.chain(masked, optax.trace(0.5))


class Doubled(ScheduleConfig, frozen=True):
    kind: str = "doubled"

    def shape(self, total_steps):
        return optax.constant_schedule(2.0)


class WithoutSteps(ScheduleConfig, frozen=True):
    kind: str = "without-steps"

    def shape(self, total_steps):
        raise ConfigError("no steps")


BROKEN_OPTIMIZERS: list[Breaks] = [
    (raises, "can_be_built", ()),
    (CrossEntropy, "can_be_built", ()),
    (lambda: (Rule(), WithoutSteps()), "can_be_built", ()),
    (WrongShapes, "can_be_built", ()),
    (Counts, "is_compiled_once", ("saves_and_restores",)),
    (FreshRule, "is_compiled_once", ()),
    (Deaf, "heeds_its_traced_numbers", ()),
    (lambda: (Rule(), Doubled()), "keeps_the_schedule_in_bounds", ()),
    (Squares, "applies_the_logged_rate", ()),
    (Uphill, "goes_downhill", ()),
    (DividesByNorm, "gives_finite_updates", ("leaves_parameters_alone_without_gradient",)),
    (Drifts, "leaves_parameters_alone_without_gradient", ()),
    (DecaysAll, "decays_matrices_only", ()),
    (EvaluatesHalf, "evaluates_its_own_parameters", ()),
    (EvaluatesNothing, "evaluates_its_own_parameters", ()),
    (TrainsAll, "leaves_frozen_leaves_alone", ()),
    (Remembers, "leaves_frozen_leaves_alone", ()),
]


def named(breaks: Breaks) -> str:
    """Return a name for a row of a table."""
    build, promise, _ = breaks
    return promise if build.__name__ == "<lambda>" else build.__name__
