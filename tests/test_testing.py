"""The contract suite: what is sound passes, and each promise can be broken and is then named."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mlp_research import step
from mlp_research.checkpoints import checkpoint
from mlp_research.data.batches import Split
from mlp_research.data.loader import ChunkPlan, Plan
from mlp_research.errors import ConfigError
from mlp_research.models import MixerConfig, MLPConfig, ModelConfig, ResidualConfig
from mlp_research.objectives import CrossEntropy, Objective
from mlp_research.optimizers import AdamConfig, AdamWConfig, OptimizerConfig, SGDConfig
from mlp_research.optimizers.schedules import ScheduleConfig
from mlp_research.testing import (
    OBJECTIVE_PROMISES,
    OPTIMIZER_PROMISES,
    PROMISES,
    ContractBroken,
    check_model,
    check_objective,
    check_optimizer,
)
from mlp_research.testing.promises import check_promises
from tests import loader_promises
from tests.broken_models import (
    BROKEN,
    CLASSES,
    IMAGE_SHAPE,
    Broken,
    Centred,
    Sound,
    Spectral,
    with_state,
)
from tests.broken_parts import (
    BROKEN_OBJECTIVES,
    BROKEN_OPTIMIZERS,
    Around,
    Averaged,
    Confident,
    LosesALayer,
    Rule,
    Searches,
    Squares,
    Within,
    named,
)
from tests.loader_promises import LOADER_PROMISES, LoaderUnderTest
from tests.made import own_kinds


def broken_promises(check: Callable, *arguments: Any, **options: Any) -> set[str]:
    """The names in a check's report; none where it passes."""
    try:
        check(*arguments, **options)
    except ContractBroken as report:
        return set(report.broken)
    return set()


# Models


BATCH_STATISTICS: dict[str, Any] = {
    "mlp with batch norm": lambda: MLPConfig(widths=(32,), normalisation="batch", dropout=0.2)
}
MODELS = own_kinds(ModelConfig) | BATCH_STATISTICS


@pytest.mark.parametrize("config", MODELS.values(), ids=MODELS)
def test_every_model_of_the_table_keeps_every_promise(config: Any):
    def build(*, key):
        return config().build((14, 14), CLASSES, key=key)

    check_model(build, image_shape=(14, 14), classes=CLASSES)


VARIANTS: dict[str, ModelConfig] = {
    "mlp": MLPConfig(widths=(32,), normalisation="layer", dropout=0.2, input_dropout=0.1),
    "residual": ResidualConfig(width=16, blocks=1, gated=True, normalisation="layer", dropout=0),
}


@pytest.mark.long
@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_every_variant_of_a_model_keeps_every_promise(config: ModelConfig):
    def build(*, key):
        return config.build(IMAGE_SHAPE, CLASSES, key=key)

    check_model(build, image_shape=IMAGE_SHAPE, classes=CLASSES)


def test_softmax_regression_keeps_every_promise():
    def build(*, key):
        return MLPConfig(widths=()).build((14, 14), CLASSES, key=key)

    check_model(build, image_shape=(14, 14), classes=CLASSES)


def test_softmax_regression_on_few_pixels_keeps_all_but_what_it_is_told_it_cannot():
    """A linear model of 12 pixels cannot give 32 random images any labels."""

    def build(*, key):
        return MLPConfig(widths=()).build((4, 3), CLASSES, key=key)

    told = "learns_32_examples"
    check_model(build, image_shape=(4, 3), classes=CLASSES, without=(told,))
    with pytest.raises(ContractBroken) as caught:
        check_model(build, image_shape=(4, 3), classes=CLASSES)
    assert caught.value.broken.keys() == {told}
    assert "without=('learns_32_examples',)" in caught.value.broken[told]


def test_equinox_own_perceptron_keeps_every_promise():
    def build(*, key):
        return eqx.nn.MLP(784, 10, 64, 2, key=key)

    check_model(build, image_shape=(28, 28), classes=10)


SOUND_MODELS = [Sound, with_state(Centred), with_state(Spectral)]


@pytest.mark.parametrize("build", SOUND_MODELS, ids=["stateless", "centred", "spectral"])
def test_a_sound_model_that_the_broken_ones_are_made_of_is_sound(build: Any):
    check_model(build, image_shape=IMAGE_SHAPE, classes=CLASSES)


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.name)
def test_a_broken_promise_is_named_with_exactly_what_follows_from_it(broken: Broken):
    found = broken_promises(check_model, broken.build, image_shape=IMAGE_SHAPE, classes=CLASSES)
    assert found == {broken.promise, *broken.follows}


def test_each_promise_of_a_model_is_broken_on_purpose():
    assert {broken.promise for broken in BROKEN} == set(PROMISES)


def test_the_report_tells_every_broken_promise_and_why():
    with pytest.raises(ContractBroken) as caught:
        check_model(
            lambda *, key: eqx.tree_at(lambda model: model.head.bias, Sound(key=key), jnp.ones(4)),
            image_shape=IMAGE_SHAPE,
            classes=CLASSES,
        )
    report = caught.value
    assert len(report.broken) > 1
    for name, explanation in report.broken.items():
        assert f"{name}: {explanation}" in str(report)
    assert f"{len(report.broken)} of {len(PROMISES)}" in str(report)


def test_a_config_that_does_not_fit_the_image_is_reported_with_its_own_words():
    with pytest.raises(ContractBroken) as caught:
        check_model(
            lambda *, key: MixerConfig(patch_size=3).build((4, 4), 3, key=key),
            image_shape=(4, 4),
            classes=3,
        )
    assert "patch_size is 3" in caught.value.broken["can_be_built"]


# Objectives


SMOOTHED = {"smoothed": lambda: CrossEntropy(label_smoothing=0.1)}
SOUND_OBJECTIVES = own_kinds(Objective) | SMOOTHED | {"measures": Confident, "within": Within}


@pytest.mark.parametrize("build", SOUND_OBJECTIVES.values(), ids=SOUND_OBJECTIVES)
def test_every_sound_objective_keeps_every_promise(build: Any):
    check_objective(build)


@pytest.mark.parametrize(
    ("build", "promise", "follows"), BROKEN_OBJECTIVES, ids=map(named, BROKEN_OBJECTIVES)
)
def test_a_broken_objective_is_named_with_exactly_what_follows(build, promise, follows):
    assert broken_promises(check_objective, build) == {promise, *follows}


def test_each_promise_of_an_objective_is_broken_on_purpose():
    assert {row[1] for row in BROKEN_OBJECTIVES} == set(OBJECTIVE_PROMISES)


def test_a_hook_that_returns_what_cannot_be_used_is_named_with_its_file():
    with pytest.raises(ContractBroken) as caught:
        check_objective(LosesALayer)
    (explanation,) = caught.value.broken.values()
    assert "gradients of 'loses-a-layer' (broken_parts.py:" in explanation
    assert "layers[0].bias" in explanation


# Optimizers


@pytest.mark.parametrize(
    "rule", own_kinds(OptimizerConfig).values(), ids=own_kinds(OptimizerConfig)
)
def test_every_update_rule_keeps_every_promise(rule: Any):
    check_optimizer(rule)


@pytest.mark.parametrize(
    "schedule", own_kinds(ScheduleConfig).values(), ids=own_kinds(ScheduleConfig)
)
def test_every_schedule_keeps_every_promise(schedule: Any):
    check_optimizer(lambda: (SGDConfig(nesterov=True), schedule()))


def test_what_the_check_looks_through_is_no_kind_of_optimizer():
    assert not [kind for kind in OptimizerConfig.kinds if "witness" in kind]


def test_the_rule_that_the_broken_ones_are_made_of_is_sound():
    check_optimizer(Rule)


@pytest.mark.parametrize("rule", [Averaged, Around])
def test_an_optimizer_with_parameters_or_parts_of_its_own_is_sound(rule: Any):
    check_optimizer(rule)


def test_an_optimizer_that_looks_for_its_step_keeps_all_but_the_promise_of_the_rate():
    check_optimizer(Searches, without=("applies_the_logged_rate",))


@pytest.mark.parametrize(
    ("build", "promise", "follows"), BROKEN_OPTIMIZERS, ids=map(named, BROKEN_OPTIMIZERS)
)
def test_a_broken_optimizer_is_named_with_exactly_what_follows(build, promise, follows):
    assert broken_promises(check_optimizer, build) == {promise, *follows}


def test_a_promise_that_is_left_out_is_not_asked_and_an_unknown_one_is_refused():
    check_optimizer(Squares, without=("applies_the_logged_rate",))
    with pytest.raises(ConfigError, match=r"without names goes_up.*goes_downhill"):
        check_optimizer(Squares, without=("goes_up",))


def test_clipping_that_scales_too_little_is_named(monkeypatch: pytest.MonkeyPatch):
    clip = step.clip_by_global_norm
    monkeypatch.setattr(step, "clip_by_global_norm", lambda tree, norm: clip(tree, 2 * norm))
    assert broken_promises(check_optimizer, AdamConfig) == {"clips_the_gradient"}


def test_a_checkpoint_that_loses_bits_of_the_optimizer_is_named(monkeypatch: pytest.MonkeyPatch):
    save = checkpoint.Checkpoints.save

    def rounded(self, step, state, notes, accuracy):
        half = jax.tree.map(
            lambda leaf: (
                leaf.astype(jnp.float16).astype(leaf.dtype) if eqx.is_inexact_array(leaf) else leaf
            ),
            state,
        )
        save(self, step, half, notes, accuracy)

    monkeypatch.setattr(checkpoint.Checkpoints, "save", rounded)
    assert broken_promises(check_optimizer, AdamWConfig) == {"saves_and_restores"}


def test_each_promise_of_an_optimizer_is_broken_on_purpose():
    by_monkeypatch = {"clips_the_gradient", "saves_and_restores"}
    assert {row[1] for row in BROKEN_OPTIMIZERS} | by_monkeypatch == set(OPTIMIZER_PROMISES)


# The package's own plan


def check_loader(build: Callable[..., Plan]) -> None:
    """Hold the plan that `build(seed=seed)` makes against LOADER_PROMISES."""
    check_promises("the loader", LOADER_PROMISES, LoaderUnderTest(build))


@pytest.mark.parametrize(
    ("rows", "batch_size", "epochs"), [(103, 8, 3), (64, 16, 2), (30, 1, 2), (31, 10, 4)]
)
def test_the_plan_keeps_every_promise(rows: int, batch_size: int, epochs: int):
    check_loader(lambda *, seed: Plan(seed, rows, batch_size, epochs))


class DrawsWithReplacement(Plan):
    def permutation(self, epoch):
        generator = np.random.default_rng([self.seed, epoch])
        return generator.integers(0, self.rows, self.rows, dtype=np.int32)


class LosesChunks(ChunkPlan):
    def __len__(self):
        return super().__len__() - 1


class LosesItsEnd(Plan):
    def chunks(self, position, steps_per_call):
        return LosesChunks(self, position, min(steps_per_call, self.steps_per_epoch))


class RepeatsABatch(Plan):
    """Every second step of an epoch is the one before it once more."""

    def indices(self, start, steps):
        rows = [start + step - (start + step) % self.steps_per_epoch % 2 for step in range(steps)]
        return np.concatenate([super(RepeatsABatch, self).indices(row, 1) for row in rows])


class CountsFromOne(Plan):
    def indices(self, start, steps):
        return super().indices(start, steps) + 1


class Unseeded(Plan):
    def _shuffle(self, epoch):
        order = np.random.default_rng().permutation(self.rows)
        self._orders[epoch] = Future()
        self._orders[epoch].set_result(order.astype(np.int32))


class OneOrder(Plan):
    def permutation(self, epoch):
        return super().permutation(0)


class SumsSeedAndEpoch(Plan):
    def permutation(self, epoch):
        return np.random.default_rng(self.seed + epoch).permutation(self.rows).astype(np.int32)


class ResumesAtEpochs(Plan):
    """Forgets how far into an epoch it was."""

    def chunks(self, position, steps_per_call):
        return super().chunks(position - position % self.steps_per_epoch, steps_per_call)


class ShuffledChunks(ChunkPlan):
    def rows(self, index):
        rows, count = super().rows(index)
        return (rows[::-1] if self.capacity == count == 3 else rows), count


class ShufflesInChunks(Plan):
    """The steps of a chunk of three come in another order."""

    def chunks(self, position, steps_per_call):
        return ShuffledChunks(self, position, min(steps_per_call, self.steps_per_epoch))


class TooShort(Plan):
    def __init__(self, seed, rows, batch_size, epochs):
        super().__init__(seed, rows, rows, 1)


REBUILDS = (
    "resumes_at_any_step",
    "gives_the_same_batches_for_any_chunk_length",
    "streams_what_it_plans",
)
"""What compares the plan in chunks of one step with another stream of it."""

BROKEN_PLANS: list[tuple[type[Plan], str, tuple[str, ...]]] = [
    (TooShort, "can_be_built", ()),
    (DrawsWithReplacement, "orders_every_row_each_epoch", ("trains_on_no_row_twice_an_epoch",)),
    (LosesItsEnd, "gives_full_batches", REBUILDS),
    (RepeatsABatch, "trains_on_no_row_twice_an_epoch", ()),
    (CountsFromOne, "stays_within_the_training_rows", ("streams_what_it_plans",)),
    (Unseeded, "repeats_the_order_of_its_seed", REBUILDS),
    (OneOrder, "changes_the_order_every_epoch", ()),
    (SumsSeedAndEpoch, "changes_the_order_with_the_seed", ()),
    (ResumesAtEpochs, "resumes_at_any_step", ()),
    (ShufflesInChunks, "gives_the_same_batches_for_any_chunk_length", ()),
]


@pytest.mark.parametrize(
    ("kind", "promise", "follows"), BROKEN_PLANS, ids=[row[0].__name__ for row in BROKEN_PLANS]
)
def test_a_broken_plan_is_named_with_exactly_what_follows(kind, promise, follows):
    def build(*, seed):
        return kind(seed, 103, 8, 3)

    assert broken_promises(check_loader, build) == {promise, *follows}


def test_a_stream_that_gathers_other_rows_than_planned_is_named(monkeypatch: pytest.MonkeyPatch):
    stream = loader_promises.train_chunks

    def reversed_rows(chunks, split):
        return stream(chunks, Split(split.images[::-1].copy(), split.labels))

    monkeypatch.setattr(loader_promises, "train_chunks", reversed_rows)
    found = broken_promises(check_loader, lambda *, seed: Plan(seed, 103, 8, 3))
    assert found == {"streams_what_it_plans"}


def test_each_promise_of_a_loader_is_broken_on_purpose():
    by_monkeypatch = {"streams_what_it_plans"}
    assert {row[1] for row in BROKEN_PLANS} | by_monkeypatch == set(LOADER_PROMISES)
