"""An optimizer under test: what its promises look at, and a witness of the gradient it is given."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from mlp_research import step
from mlp_research.config import Config
from mlp_research.data.batches import Batch
from mlp_research.data.inputs import Inputs
from mlp_research.models import MLPConfig, whole
from mlp_research.optimizers import OptimizerConfig, Rate
from mlp_research.optimizers.schedules import ConstantConfig
from mlp_research.prng import StepKeys
from mlp_research.programs.base import recipe_of
from mlp_research.programs.checks import check_trees_like
from mlp_research.step import Recipe, StepMetrics, TrainState, init_state
from mlp_research.testing.promises import compiled_quickly

TOTAL_STEPS = 10_000
"""Length of the run in which an optimizer is looked at."""
HEEDED_STEPS = 8
"""Steps after which a traced number must have made a difference."""
NEUTRAL = {"learning_rate": 1.0, "weight_decay": 0.0, "momentum": 0.0, "clip_norm": None}
MODEL = MLPConfig(widths=(4,))
IMAGE_SHAPE, CLASSES = (2, 3), 3


class Witness(OptimizerConfig, frozen=True):
    """Another optimizer, whose state also holds the norm of the last gradient that reached it."""

    kind: Literal["witness of a check"] = "witness of a check"
    inner: OptimizerConfig

    @classmethod
    def of(cls, optimizer: OptimizerConfig) -> "Witness":
        """Return the witness of an optimizer, with all that the step itself reads of it."""
        read = {name: getattr(optimizer, name) for name in OptimizerConfig.model_fields}
        return cls(**read | {"kind": cls.model_fields["kind"].default, "inner": optimizer})

    def transformation(self, learning_rate: Rate) -> optax.GradientTransformationExtraArgs:
        rule = optax.with_extra_args_support(self.inner.transformation(learning_rate))

        def init(params: PyTree) -> PyTree:
            return rule.init(params), jnp.float32(0)

        def update(
            updates: PyTree, state: PyTree, params: PyTree = None, **extra: Any
        ) -> tuple[PyTree, PyTree]:
            changed, inner = rule.update(updates, state[0], params, **extra)
            return changed, (inner, optax.tree.norm(updates))

        return optax.GradientTransformationExtraArgs(init, update)

    def evaluated(self, parameters: PyTree, state: PyTree) -> PyTree:
        return self.inner.evaluated(parameters, state[0])

    def trained(self, model: PyTree) -> PyTree:
        return self.inner.trained(model)


OptimizerConfig.kinds.pop("witness of a check")  # nobody trains with it


@dataclasses.dataclass(frozen=True)
class OptimizerUnderTest:
    """A way to make the configs, and what several promises look at."""

    build: Callable[[], Any]

    @functools.cached_property
    def parts(self) -> tuple[Any, Any]:
        """The optimizer and the schedule as they are built."""
        built = self.build()
        return built if isinstance(built, tuple) else (built, ConstantConfig())

    def part(self, **fields: Any) -> OptimizerConfig:
        """Return the optimizer at rate 1, without decay, momentum and clipping, but for these."""
        return neutral(self.parts[0], **fields)

    def recipe(self, optimizer: OptimizerConfig) -> Recipe:
        """Return what a step needs, with the optimizer's witness."""
        base = recipe_of(Config(model=MODEL, schedule=self.parts[1]), TOTAL_STEPS, Inputs())
        return dataclasses.replace(base, optimizer=Witness.of(optimizer).traced())

    @functools.cached_property
    def factors(self) -> np.ndarray:
        """The schedule's shape at each step."""
        shape = self.parts[1].traced().shape(TOTAL_STEPS)
        return np.asarray(jax.vmap(shape)(jnp.arange(TOTAL_STEPS)))

    @functools.cached_property
    def batch(self) -> Batch:
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (8, 6), dtype=np.uint8)
        return Batch(images, random.integers(0, CLASSES, 8, dtype=np.uint8))

    def state(self, recipe: Recipe) -> TrainState:
        """Return the state of a small model where the schedule is at its peak."""
        network = whole(MODEL.build(IMAGE_SHAPE, CLASSES, key=jr.key(0)))
        state = init_state(network, recipe, keys=StepKeys(jr.key(1), jr.key(1)))
        return eqx.tree_at(lambda state: state.step, state, jnp.int32(self.factors.argmax()))

    @functools.cached_property
    def train_step(self) -> Callable[..., tuple[TrainState, StepMetrics]]:
        """The package's step, compiled; a second trace raises."""
        return compiled_quickly(eqx.debug.assert_max_traces(max_traces=1)(step.train_step))

    def one_step(self, **fields: Any) -> tuple[TrainState, StepMetrics]:
        """Return state and metrics after one step of the neutral optimizer with these fields."""
        recipe = self.recipe(self.part(**fields))
        return self.train_step(self.state(recipe), recipe, self.batch)

    @functools.cached_property
    def parameters(self) -> PyTree:
        network = whole(MODEL.build(IMAGE_SHAPE, CLASSES, key=jr.key(0)))
        return eqx.filter(network, eqx.is_inexact_array)

    @functools.cached_property
    def gradients(self) -> PyTree:
        return jax.tree.map(lambda leaf: jr.normal(jr.key(2), leaf.shape), self.parameters)

    def after(
        self, optimizer: OptimizerConfig, gradients: PyTree, steps: int
    ) -> tuple[PyTree, PyTree]:
        """Return (parameters, state) after updates by one gradient at the optimizer's rate."""
        parameters, state = self.parameters, _initial(optimizer, self.parameters)
        for _ in range(steps):
            parameters, state = _updated(optimizer, parameters, state, gradients)
        return parameters, state

    def change(self, optimizer: OptimizerConfig, gradients: PyTree) -> PyTree:
        """Return what two updates by one gradient add to the parameters."""
        changed, _ = self.after(optimizer.traced(), gradients, steps=2)
        return optax.tree.sub(changed, self.parameters)

    def outcome(self, optimizer: OptimizerConfig) -> PyTree:
        """Return the parameters that are trained and those that are evaluated, after steps."""
        parameters, state = self.after(optimizer, self.gradients, HEEDED_STEPS)
        return parameters, optimizer.evaluated(parameters, state)


def neutral(optimizer: OptimizerConfig, **fields: Any) -> OptimizerConfig:
    """Return the optimizer with neutral numbers but for these fields, those within it as well."""
    within = {name: neutral(part) for name, part in optimizer if isinstance(part, OptimizerConfig)}
    wanted = within | NEUTRAL | {"freeze": ()} | fields
    known = {name: value for name, value in wanted.items() if name in type(optimizer).model_fields}
    return optimizer.model_copy(update=known)


@compiled_quickly
def _initial(optimizer: OptimizerConfig, parameters: PyTree) -> PyTree:
    return optimizer.transformation(jnp.asarray(optimizer.learning_rate)).init(parameters)


@compiled_quickly
def _updated(
    optimizer: OptimizerConfig, parameters: PyTree, state: PyTree, gradients: PyTree
) -> tuple[PyTree, PyTree]:
    """Return (parameters, state) after an update at a loss of 1 with this gradient everywhere."""
    loss = jnp.float32(1)

    def loss_at(elsewhere: PyTree) -> Float[Array, ""]:
        return loss + optax.tree.vdot(gradients, optax.tree.sub(elsewhere, parameters))

    rate = jnp.asarray(optimizer.learning_rate)
    rule = optax.with_extra_args_support(optimizer.transformation(rate))
    extra = {"value": loss, "grad": gradients, "value_fn": loss_at}
    updates, state = rule.update(gradients, state, parameters, **extra)
    check_trees_like(optimizer, "transformation", "an update", updates, parameters)
    return eqx.apply_updates(parameters, updates), state
