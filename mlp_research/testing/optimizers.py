"""What an update rule and its schedule promise; `testing.check_optimizer` asks."""

import dataclasses
import functools
import tempfile
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jaxtyping import Array, Float, PyTree

from mlp_research import sharding, step
from mlp_research.checkpoint import Checkpoints
from mlp_research.models import MLPConfig
from mlp_research.optimizers import (
    TRACED,
    ConstantConfig,
    Optimizer,
    OptimizerConfig,
    ScheduleConfig,
    Settings,
)
from mlp_research.shapes import Batch
from mlp_research.step import StepMetrics, TrainState, init_state
from mlp_research.testing.promises import (
    Fault,
    bits_differ,
    compiled_quickly,
    named_arrays,
    not_finite,
    trees_differ,
)

TOTAL_STEPS = 10_000
"""Length of the run in which an optimizer is looked at."""


class Witness(Optimizer):
    """An optimizer whose state also holds the norm of the last gradient that reached the rule."""

    def init(self, parameters: PyTree) -> PyTree:
        return super().init(parameters), jnp.float32(0)

    def update(
        self,
        gradients: PyTree,
        state: PyTree,
        parameters: PyTree,
        settings: Settings,
        rate: Float[Array, ""],
    ) -> tuple[PyTree, PyTree]:
        updates, inner = super().update(gradients, state[0], parameters, settings, rate)
        return updates, (inner, optax.tree.norm(gradients))


@dataclasses.dataclass(frozen=True)
class OptimizerUnderTest:
    """A way to make the configs, and what several promises look at."""

    build: Callable[[], OptimizerConfig | tuple[OptimizerConfig, ScheduleConfig]]

    @functools.cached_property
    def optimizer(self) -> Witness:
        built = self.build()
        rule, schedule = built if isinstance(built, tuple) else (built, ConstantConfig())
        made = Optimizer.of(rule, schedule, TOTAL_STEPS)
        return Witness(made.rule, made.schedule, made.total_steps)

    @functools.cached_property
    def traced(self) -> list[str]:
        """The traced numbers that the rule has."""
        return [name for name in TRACED if name in type(self.optimizer.rule).model_fields]

    @functools.cached_property
    def factors(self) -> np.ndarray:
        """The schedule's shape at each step."""
        shape = self.optimizer.schedule.shape(TOTAL_STEPS)
        return np.asarray(jax.vmap(shape)(jnp.arange(TOTAL_STEPS)))

    @functools.cached_property
    def batch(self) -> Batch:
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (8, 6), dtype=np.uint8)
        return Batch(images, random.integers(0, 3, 8, dtype=np.uint8))

    def settings(self, **numbers: float) -> Settings:
        """Rate 1 and neither decay nor momentum nor clipping, but for these numbers."""
        neutral = {"learning_rate": 1.0, "clip_norm": np.inf}
        return Settings(
            **{
                field.name: jnp.float32((neutral | numbers).get(field.name, 0.0))
                for field in dataclasses.fields(Settings)
            }
        )

    @functools.cached_property
    def state(self) -> TrainState:
        """A small model where the schedule is at its peak."""
        network = MLPConfig(widths=(4,)).build((2, 3), 3, key=jr.key(0))
        state = init_state(network, self.optimizer, key=jr.key(1))
        return eqx.tree_at(lambda state: state.step, state, jnp.int32(self.factors.argmax()))

    @functools.cached_property
    def train_step(self) -> Callable[..., tuple[TrainState, StepMetrics]]:
        """The package's step, compiled; a second trace raises."""
        once = eqx.debug.assert_max_traces(max_traces=1)(step.train_step)
        return compiled_quickly(once)

    def one_step(self, settings: Settings) -> tuple[TrainState, StepMetrics]:
        return self.train_step(self.state, settings, self.batch)

    @functools.cached_property
    def parameters(self) -> PyTree:
        return eqx.filter(self.state.model, eqx.is_inexact_array)

    @functools.cached_property
    def gradients(self) -> PyTree:
        return jax.tree.map(lambda leaf: jr.normal(jr.key(2), leaf.shape), self.parameters)

    def change(self, settings: Settings, gradients: PyTree) -> PyTree:
        """What two updates at the settings' rate add to the parameters."""
        return _change(self.optimizer, settings, self.parameters, gradients)


@compiled_quickly
def _change(optimizer: Optimizer, settings: Settings, parameters: PyTree, gradients: PyTree):
    state, rate, changed = optimizer.init(parameters), settings.learning_rate, parameters
    for _ in range(2):
        updates, state = optimizer.update(gradients, state, changed, settings, rate)
        changed = eqx.apply_updates(changed, updates)
    return jax.tree.map(lambda one, other: one - other, changed, parameters)


def can_be_built(test: OptimizerUnderTest) -> Fault:
    rule, schedule = test.optimizer.rule, test.optimizer.schedule
    if not (isinstance(rule, OptimizerConfig) and isinstance(schedule, ScheduleConfig)):
        return f"wanted an OptimizerConfig and a ScheduleConfig, not {rule!r} and {schedule!r}"
    return None


def is_compiled_once(test: OptimizerUnderTest) -> Fault:
    """One program serves every step and every value of the traced numbers."""
    for number in (0.1, 0.2):
        state, settings = test.state, test.settings(**dict.fromkeys(TRACED, number))
        for _ in range(2):
            state, _ = test.train_step(state, settings, test.batch)
    return None


def heeds_its_settings(test: OptimizerUnderTest) -> Fault:
    """Each traced number that the rule has changes the update."""
    before = test.change(test.settings(), test.gradients)
    for name in test.traced:
        after = test.change(test.settings(**{name: 0.5}), test.gradients)
        if name != "clip_norm" and trees_differ("", before, "", after) is None:
            return f"another {name} makes no difference: is it read from `settings`?"
    return None


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
        after, metrics = test.one_step(test.settings(learning_rate=peak))
        expected = peak * test.factors.max()
        if not np.isclose(metrics.learning_rate, expected):
            return f"logged {metrics.learning_rate}, but peak times shape is {expected}"
        new = eqx.filter(after.model, eqx.is_inexact_array)
        change = optax.tree.sub(new, test.parameters)
        changes.append(optax.tree.scale(1 / metrics.learning_rate, change))
    return trees_differ("per unit of a rate of 1", changes[0], "of 2", changes[1])


def goes_downhill(test: OptimizerUnderTest) -> Fault:
    """The first updates go against the gradient."""
    change = jax.tree.leaves(test.change(test.settings(), test.gradients))
    slope = sum(map(np.vdot, change, jax.tree.leaves(test.gradients)))
    return None if slope < 0 else f"update times gradient is {slope:.4g}, wanted below 0"


def gives_finite_updates(test: OptimizerUnderTest) -> Fault:
    for scale in (0.0, 1e-12, 1.0, 1e6):
        gradients = optax.tree.scale(scale, test.gradients)
        fault = not_finite("update", test.change(test.settings(), gradients))
        if fault:
            return f"{fault} where the gradient has size {scale:g}"
    return None


def leaves_parameters_alone_without_gradient(test: OptimizerUnderTest) -> Fault:
    """Without gradient and decay nothing moves."""
    change = test.change(test.settings(momentum=0.9), optax.tree.zeros_like(test.gradients))
    moved = [path for path, leaf in named_arrays(change).items() if np.any(leaf)]
    return f"{', '.join(moved)} moved without gradient or decay" if moved else None


def decays_matrices_only(test: OptimizerUnderTest) -> Fault:
    """Weight decay changes no leaf of rank below two: biases and scales are exempt."""
    plain = named_arrays(test.change(test.settings(), test.gradients))
    decayed = named_arrays(test.change(test.settings(weight_decay=0.5), test.gradients))
    wrong = [
        path
        for path, leaf in plain.items()
        if leaf.ndim < 2 and not np.array_equal(leaf, decayed[path])
    ]
    return f"{', '.join(wrong)} decayed, but only matrices should" if wrong else None


def clips_the_gradient(test: OptimizerUnderTest) -> Fault:
    """What reaches the rule is no longer than the clip norm, and else whole; the metrics say so."""
    for bound in (1e-3, np.inf):
        after, metrics = test.one_step(test.settings(clip_norm=bound))
        given, wanted = float(after.optimizer_state[1]), min(bound, float(metrics.gradient_norm))
        if not np.isclose(given, wanted) or bool(metrics.clipped) != (bound < 1):
            return (
                f"at clip norm {bound:g} a gradient of norm {given:.4g} came, wanted {wanted:.4g}"
            )
    return None


def saves_and_restores(test: OptimizerUnderTest) -> Fault:
    """After a checkpoint in the middle the next step is bitwise the uninterrupted one."""
    state, _ = test.one_step(test.settings())
    with tempfile.TemporaryDirectory() as folder, Checkpoints(Path(folder)) as checkpoints:
        checkpoints.save(0, state, {}, None)
        checkpoints.wait()
        shapes = eqx.filter_eval_shape(lambda: state)
        restored, _ = checkpoints.restore(0, sharding.template(sharding.device_mesh(1), shapes))
    # Where the state under test lies: the step is compiled for that place.
    restored = sharding.place(restored, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    after, resumed = (
        test.train_step(each, test.settings(), test.batch)[0] for each in (state, restored)
    )
    fault = bits_differ(after, resumed)
    return f"the step after a restore is another one: {fault}" if fault else None
