"""Every rule and schedule is the published one, and the learning rate logged is the one applied."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlp_research.config import Config
from mlp_research.data.inputs import Inputs
from mlp_research.errors import ConfigError
from mlp_research.models import MLPConfig
from mlp_research.optimizers import (
    AdamConfig,
    AdamWConfig,
    LionConfig,
    OptimizerConfig,
    SGDConfig,
    clip_by_global_norm,
)
from mlp_research.optimizers.schedules import (
    ConstantConfig,
    LinearConfig,
    OneCycleConfig,
    ScheduleConfig,
    WarmupCosineConfig,
)
from mlp_research.programs import base as programs
from mlp_research.programs.single import Experiment
from mlp_research.step import Recipe
from tests.made import (
    arrays_of,
    assert_bitwise,
    initial_state,
    own_kinds,
    small_config,
    small_execution,
    train_through,
)

STEPS = 12
Tree = dict[str, np.ndarray]
Direction = Callable[[Tree, Tree, int], Tree]
"""From (gradients, parameters, step counted from 0) to the direction of the step, in float64."""


def adam(config: AdamConfig) -> Direction:
    first: dict[str, float | np.ndarray] = {"w": 0.0, "b": 0.0}
    second: dict[str, float | np.ndarray] = {"w": 0.0, "b": 0.0}
    decay = getattr(config, "weight_decay", 0.0)

    def direction(gradients: Tree, parameters: Tree, step: int) -> Tree:
        out = {}
        for name, g in gradients.items():
            first[name] = config.b1 * first[name] + (1 - config.b1) * g
            second[name] = config.b2 * second[name] + (1 - config.b2) * g**2
            mean = first[name] / (1 - config.b1 ** (step + 1))
            square = second[name] / (1 - config.b2 ** (step + 1))
            out[name] = mean / (np.sqrt(square) + config.epsilon)
        out["w"] = out["w"] + decay * parameters["w"]
        return out

    return direction


def sgd(config: SGDConfig) -> Direction:
    velocity: dict[str, float | np.ndarray] = {"w": 0.0, "b": 0.0}

    def direction(gradients: Tree, parameters: Tree, step: int) -> Tree:
        out = {}
        for name, g in gradients.items():
            velocity[name] = config.momentum * velocity[name] + g
            out[name] = g + config.momentum * velocity[name] if config.nesterov else velocity[name]
        out["w"] = out["w"] + config.weight_decay * parameters["w"]
        return out

    return direction


def lion(config: LionConfig) -> Direction:
    momentum: dict[str, float | np.ndarray] = {"w": 0.0, "b": 0.0}

    def direction(gradients: Tree, parameters: Tree, step: int) -> Tree:
        out = {}
        for name, g in gradients.items():
            out[name] = np.sign(config.b1 * momentum[name] + (1 - config.b1) * g)
            momentum[name] = config.b2 * momentum[name] + (1 - config.b2) * g
        out["w"] = out["w"] + config.weight_decay * parameters["w"]
        return out

    return direction


RULES: dict[str, tuple[OptimizerConfig, Callable]] = {
    "adam": (AdamConfig(learning_rate=0.01), adam),
    "adamw": (AdamWConfig(learning_rate=0.01, weight_decay=0.1), adam),
    "sgd": (SGDConfig(learning_rate=0.01, weight_decay=0.1), sgd),
    "plain sgd": (SGDConfig(learning_rate=0.01, momentum=0.0), sgd),
    "nesterov": (SGDConfig(learning_rate=0.01, nesterov=True), sgd),
    "lion": (LionConfig(learning_rate=0.01), lion),
    "clipped adamw": (AdamWConfig(learning_rate=0.01, clip_norm=0.5), adam),
    "clipped sgd": (SGDConfig(learning_rate=0.01, clip_norm=0.5), sgd),
}


def cosine(x: float) -> float:
    return (1 + math.cos(math.pi * x)) / 2


def one_cycle(step: int) -> float:
    """With the defaults: peak after 30 % of the steps, from 1/25 and to 1/250,000 of it."""
    peak = int(0.3 * STEPS)
    if step < peak:
        return 1 - (1 - 1 / 25) * cosine(step / peak)
    end = 1 / 25 / 1e4
    return end + (1 - end) * cosine((step - peak) / (STEPS - peak))


SHAPES: dict[str, tuple[ScheduleConfig, Callable[[int], float]]] = {
    "constant": (ConstantConfig(), lambda step: 1.0),
    "linear": (LinearConfig(), lambda step: 1 - step / STEPS),
    "warmup-cosine": (
        WarmupCosineConfig(warmup_steps=4),
        lambda step: step / 4 if step < 4 else cosine((step - 4) / (STEPS - 4)),
    ),
    "longer warmup-cosine": (
        WarmupCosineConfig(warmup_steps=4, decay_steps=50),
        lambda step: step / 4 if step < 4 else cosine((step - 4) / 46),
    ),
    "one-cycle": (OneCycleConfig(), one_cycle),
}


def recipe_of(optimizer: OptimizerConfig, schedule: ScheduleConfig, steps: int = STEPS) -> Recipe:
    """Return the traced parts of a run."""
    config = Config(optimizer=optimizer, schedule=schedule)
    return programs.recipe_of(config, steps, Inputs())


def test_every_rule_and_schedule_has_a_reference():
    assert {config.kind for config, _ in RULES.values()} == set(own_kinds(OptimizerConfig))
    assert {config.kind for config, _ in SHAPES.values()} == set(own_kinds(ScheduleConfig))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rule", RULES)
def test_updates_equal_the_reference_in_float64(rule: str, shape: str):
    config, make_direction = RULES[rule]
    schedule, factor = SHAPES[shape]
    direction = make_direction(config)
    random = np.random.default_rng(0)
    expected = {"w": random.normal(size=(3, 2)), "b": random.normal(size=2)}
    parameters = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in expected.items()}
    expected = {name: np.asarray(leaf, np.float64) for name, leaf in parameters.items()}
    recipe = recipe_of(config, schedule)
    optimizer: Any = recipe.optimizer
    state = optimizer.transformation(optimizer.learning_rate).init(parameters)
    for step in range(STEPS):
        raw = {name: random.normal(size=leaf.shape) for name, leaf in expected.items()}
        gradients = {name: jnp.asarray(leaf, jnp.float32) for name, leaf in raw.items()}
        exact = {name: np.asarray(leaf, np.float64) for name, leaf in gradients.items()}
        norm = math.sqrt(sum((leaf**2).sum() for leaf in exact.values()))
        if config.clip_norm is not None:
            exact = {n: leaf * min(1, config.clip_norm / norm) for n, leaf in exact.items()}
        rate = recipe.learning_rate(jnp.int32(step))
        assert float(rate) == pytest.approx(config.learning_rate * factor(step), rel=1e-5, abs=1e-9)
        clipped, measured, was_clipped = clip_by_global_norm(gradients, optimizer.clip_norm)
        assert float(measured) == pytest.approx(norm, rel=1e-6)
        assert bool(was_clipped) == (config.clip_norm is not None and norm > config.clip_norm)
        updates, state = optimizer.transformation(rate).update(clipped, state, parameters)
        parameters = jax.tree.map(jnp.add, parameters, updates)
        moved = direction(exact, expected, step)
        expected = {
            name: leaf - config.learning_rate * factor(step) * moved[name]
            for name, leaf in expected.items()
        }
        for name, leaf in expected.items():
            np.testing.assert_allclose(parameters[name], leaf, rtol=0, atol=1e-6)


RATES = {"adam": 0.02, "adamw": 0.02, "sgd": 0.1, "lion": 0.005}
TRAINED = [*((kind, "constant") for kind in own_kinds(OptimizerConfig))]
TRAINED += [("adamw", "linear"), ("adam", "warmup-cosine"), ("sgd", "one-cycle")]


@pytest.mark.parametrize(("kind", "schedule"), TRAINED)
def test_each_trains_and_resumes_exactly(kind: str, schedule: str, data_dir: Path):
    config = small_config(
        optimizer=OptimizerConfig.kinds[kind](**{"learning_rate": RATES[kind]}),
        schedule=SHAPES[schedule][0],
        model=MLPConfig(widths=(8,)),
        epochs=6,
    )
    run = Experiment.of(config, small_execution(data_dir))
    whole, metrics = train_through(run)
    assert metrics["loss"][-12:].mean() < 0.9 * metrics["loss"][:6].mean()
    state, plan = initial_state(run), run.chunk_plan(0)
    for chunk, (start, count) in zip(run.chunks(0), plan.spans(), strict=True):
        state, _ = run.train_steps(state, run.recipe, chunk)
        if start + count == 22:
            break
    assert int(state.step) == 22
    resumed, rest = train_through(run, state)
    assert_bitwise(resumed, whole)
    assert rest["learning_rate"].tolist() == metrics["learning_rate"][22:].tolist()


def test_the_logged_learning_rate_is_the_one_applied(data_dir: Path):
    """Lion's first step without decay moves every weight by exactly the rate."""
    config = small_config(
        optimizer=LionConfig(weight_decay=0.0, learning_rate=0.5),
        schedule=OneCycleConfig(),
        model=MLPConfig(widths=()),
    )
    run = Experiment.of(config, small_execution(data_dir, steps_per_call=1))
    before = arrays_of(initial_state(run).model)
    state, metrics = run.train_steps(initial_state(run), run.recipe, next(run.chunks(0)))
    moved = np.abs(arrays_of(state.model)[0] - before[0])
    rate = float(metrics.learning_rate[0])
    assert rate == pytest.approx(0.5 / 25, rel=1e-5)
    np.testing.assert_allclose(moved[moved > 0], rate, rtol=1e-5)


def test_decay_spares_what_is_no_matrix():
    parameters: Any = {"w": jnp.ones((2, 2)), "b": jnp.ones(2), "scale": jnp.ones(())}
    nothing = jax.tree.map(jnp.zeros_like, parameters)
    config = AdamWConfig(learning_rate=1.0, weight_decay=0.5)
    rule = config.traced().transformation(jnp.float32(1))
    updates: Any = rule.update(nothing, rule.init(parameters), parameters)[0]
    assert {name: float(leaf.sum()) for name, leaf in updates.items()} == {
        "w": -2.0,
        "b": 0.0,
        "scale": 0.0,
    }


def test_a_warm_up_longer_than_the_run_is_refused():
    with pytest.raises(ConfigError, match="warmup_steps is 10, but the schedule has 10 steps"):
        recipe_of(AdamConfig(), WarmupCosineConfig(warmup_steps=10), 10).learning_rate(jnp.int32(0))


def test_traced_numbers_leave_the_static_part_alone():
    def static(optimizer: OptimizerConfig):
        return jax.tree.structure(recipe_of(optimizer, ConstantConfig(), 5))

    one = static(AdamWConfig(learning_rate=1, weight_decay=0.3))
    other = static(AdamWConfig(clip_norm=2.0))
    assert one == other and hash(one) == hash(other)
    assert one != static(AdamWConfig(b1=0.8))
