"""What an objective promises; `testing.check_objective` asks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, PyTree

from mlp_research.config import Config
from mlp_research.data.batches import Batch, MaskedBatch
from mlp_research.data.inputs import Inputs, scaled
from mlp_research.models import MLP, MLPConfig, whole
from mlp_research.objectives import Objective, Sums, summed
from mlp_research.optimizers import SGDConfig
from mlp_research.parts import blaming
from mlp_research.prng import StepKeys
from mlp_research.programs import checks
from mlp_research.programs.base import recipe_of
from mlp_research.step import Recipe, batch_logits, eval_step, init_state
from mlp_research.system import sharding
from mlp_research.testing.promises import (
    Fault,
    bits_differ,
    compiled_quickly,
    not_finite,
    unheeded,
    with_other_numbers,
)

EXAMPLES, IMAGE_SHAPE, CLASSES = 8, (2, 3), 3
MODEL = MLPConfig(widths=(4,))
LARGE = 1e4
"""Size of logits at which a loss must still be finite."""
DESCENT_STEPS = 60
DESCENT_RATE = 0.1

Step = tuple[tuple[Array, dict[str, Array]], PyTree]
"""((Loss, measurements), gradient) of a batch."""


@dataclasses.dataclass(frozen=True)
class ObjectiveUnderTest:
    """A way to make the objective, and what several promises look at."""

    build: Callable[[], Any]

    @functools.cached_property
    def objective(self) -> Any:
        return self.build()

    @functools.cached_property
    def traced(self) -> Objective:
        """The objective as a program sees it."""
        return self.objective.traced()

    @functools.cached_property
    def recipe(self) -> Recipe:
        """What a step needs, with the objective."""
        base = recipe_of(Config(model=MODEL, optimizer=SGDConfig()), DESCENT_STEPS, Inputs())
        return dataclasses.replace(base, objective=self.traced)

    @functools.cached_property
    def model(self) -> MLP:
        return whole(MODEL.build(IMAGE_SHAPE, CLASSES, key=jr.key(0)))

    def model_with_logits(self, size: float) -> MLP:
        """Return the model with its logits made this large; 0 makes them equal."""
        factor = size / jnp.abs(batch_logits(self.model, self.recipe, self.rows)).max()
        last = jax.tree.map(lambda leaf: factor * leaf, self.model.layers[-1])
        return eqx.tree_at(lambda model: model.layers[-1], self.model, last)

    @functools.cached_property
    def rows(self) -> MaskedBatch:
        """The batch, with no padding."""
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (EXAMPLES, 6), dtype=np.uint8)
        labels = random.permutation(np.arange(EXAMPLES, dtype=np.uint8) % CLASSES)
        return MaskedBatch(images, labels, np.ones(EXAMPLES, bool))

    @functools.cached_property
    def key(self) -> Array:
        return jr.key(1)

    @functools.cached_property
    def compiled(self) -> Callable[..., Step]:
        return compiled_quickly(_step)

    @functools.cached_property
    def compiled_evaluation(self) -> Callable[..., Sums]:
        return compiled_quickly(eval_step)

    def step(self, objective: Objective) -> Step:
        """Return what an objective gives for the model and the batch."""
        return self.compiled(objective, self.model, self.rows, self.key)

    def evaluation(self, objective: Objective) -> Sums:
        """Return what an objective sums in evaluation of the model on the batch."""
        recipe = dataclasses.replace(self.recipe, objective=objective)
        return self.compiled_evaluation(self.model, recipe, self.rows)

    def measured_rows(self) -> dict[str, Array]:
        """Return what is measured of each row in evaluation."""
        logits = batch_logits(self.model, self.recipe, self.rows)
        return jax.vmap(self.traced.measured)(logits, jnp.asarray(self.rows.labels))

    def outcome(self, objective: Objective) -> PyTree:
        """Return all that an objective gives."""
        return self.step(objective), self.evaluation(objective)

    @functools.cached_property
    def repeat(self) -> Fault:
        """How two calls with one key differ. Nothing is compiled, which would fix what is drawn."""
        arguments = self.traced, self.model, self.rows, self.key
        return bits_differ(_step(*arguments), _step(*arguments))


def _step(objective: Objective, model: MLP, rows: MaskedBatch, key: Array) -> Step:
    images, labels = scaled(rows.images), jnp.asarray(rows.labels)
    return objective.gradients(model, images, labels, key=key)


def can_be_built(test: ObjectiveUnderTest) -> Fault:
    """`build()` returns an objective. Without this the others are not looked at."""
    if not isinstance(test.objective, Objective):
        return f"wanted an Objective, not {test.objective!r}"
    return None


def gives_a_scalar_loss_and_a_gradient_like_the_model(test: ObjectiveUnderTest) -> Fault:
    """Every hook, in training and evaluation, by shapes alone; the others need it too."""
    with blaming([test.objective]):
        state = init_state(test.model, test.recipe, keys=StepKeys(test.key, test.key))
        checks.check_objective(state, test.recipe, Batch(test.rows.images, test.rows.labels))
        for place, measured in eqx.filter_eval_shape(_measured, test).items():
            if measured["correct"].dtype != jnp.int32:
                found = checks.described(measured["correct"])
                return f"in {place} correct is {found}, wanted int32: count truths, not shares"
        eqx.filter_eval_shape(eval_step, test.model, test.recipe, test.rows)
    return None


def _measured(test: ObjectiveUnderTest) -> dict[str, dict[str, Array]]:
    """Return the summed measurements of training and of evaluation."""
    (_, measured), _ = _step(test.traced, test.model, test.rows, test.key)
    return {"training": measured, "evaluation": summed(test.measured_rows())}


def is_finite(test: ObjectiveUnderTest) -> Fault:
    """Loss, measurements and gradient, also where logits are large or equal."""
    large, equal = (test.model_with_logits(size) for size in (LARGE, 0.0))
    models = {"as first built": test.model, f"{LARGE:g} in size": large, "all equal": equal}
    for name, model in models.items():
        (loss, measured), gradient = test.compiled(test.traced, model, test.rows, test.key)
        named = {"loss": loss, "measurements": measured, "gradient": gradient}
        wrong = [what for what, tree in named.items() if not_finite("", tree)]
        if wrong:
            return f"{', '.join(wrong)} not finite where the logits are {name}"
    return None


def repeats_for_the_same_key(test: ObjectiveUnderTest) -> Fault:
    """One key gives the same loss, measurements and gradient, to the bit."""
    return f"two calls with one key differ: {test.repeat}" if test.repeat else None


def is_compiled_once(test: ObjectiveUnderTest) -> Fault:
    """One program serves all values of the traced numbers, and an objective made anew."""
    once = eqx.debug.assert_max_traces(max_traces=1)
    step, evaluation = compiled_quickly(once(_step)), compiled_quickly(once(eval_step))
    for factor in (1.0, 0.5):
        objective = with_other_numbers(test.build().traced(), factor)
        step(objective, test.model, test.rows, test.key)
        evaluation(test.model, dataclasses.replace(test.recipe, objective=objective), test.rows)
    return None


def heeds_its_traced_numbers(test: ObjectiveUnderTest) -> Fault:
    """Each traced number changes something that training or evaluation is given."""
    return unheeded(test.traced, test.outcome)


def counts_correct(test: ObjectiveUnderTest) -> Fault:
    """In training a number within the batch, in evaluation whether the largest logit is right."""
    (_, measured), _ = test.step(test.traced)
    correct = int(measured["correct"])
    if not 0 <= correct <= EXAMPLES:
        return f"correct is {correct} of {EXAMPLES} examples"
    wanted = (
        np.asarray(batch_logits(test.model, test.recipe, test.rows)).argmax(-1) == test.rows.labels
    )
    came = np.asarray(test.measured_rows()["correct"])
    if not np.array_equal(came, wanted):
        return f"in evaluation correct is {came}, but the largest logit is the label's in {wanted}"
    return None


def evaluates_without_chance(test: ObjectiveUnderTest) -> Fault:
    """Evaluation gives the same finite numbers twice. It is given no key."""
    first, again = (eval_step(test.model, test.recipe, test.rows) for _ in range(2))
    fault = bits_differ(first, again)
    if fault and not test.repeat:  # what is drawn in the loss is said there
        return f"two evaluations differ: {fault}"
    return not_finite("evaluation's sum", (first, again)) if not is_finite(test) else None


def sums_what_it_measures(test: ObjectiveUnderTest) -> Fault:
    """What evaluation measures stands among a training batch's measurements too."""
    (_, measured), _ = test.step(test.traced)
    missing = [name for name in test.evaluation(test.traced).measured if name not in measured]
    if missing:
        return f"training does not measure {', '.join(missing)}: add summed(measured) in batch"
    return None


def is_the_same_on_two_devices(test: ObjectiveUnderTest) -> Fault:
    """A batch spread over two devices has the same loss to 1e-5. Asked only where there are two."""
    if jax.device_count() == 1 or test.repeat:  # what is drawn in the loss is said there
        return None
    mesh = sharding.device_mesh(2)
    whole = sharding.place((test.traced, test.model, test.key), sharding.replicated(mesh))
    rows = jax.device_put(test.rows, NamedSharding(mesh, PartitionSpec("data")))
    objective, model, key = whole
    (spread, _), _ = test.compiled(objective, model, rows, key)
    (loss, _), _ = test.step(test.traced)
    if not np.isclose(spread, loss, 1e-5, 1e-5, equal_nan=True):
        return f"the loss is {float(loss):.7g}, but {float(spread):.7g} over two devices"
    return None


def descends(test: ObjectiveUnderTest) -> Fault:
    """Steps against its own gradient, no longer than the rate, lower the evaluation loss."""
    model = test.model
    for number in range(DESCENT_STEPS):
        key = jr.fold_in(test.key, number)
        _, gradient = test.compiled(test.traced, model, test.rows, key)
        model = _descended(model, gradient)
    before, after = (
        float(test.compiled_evaluation(each, test.recipe, test.rows).loss) / EXAMPLES
        for each in (test.model, model)
    )
    if np.isfinite(before) and not after < before and not is_finite(test):
        return f"after {DESCENT_STEPS} steps the evaluation loss is {after:.4g}, was {before:.4g}"
    return None


@compiled_quickly
def _descended(model: MLP, gradient: PyTree) -> MLP:
    rate = DESCENT_RATE / jnp.maximum(1, optax.tree.norm(gradient))
    return eqx.apply_updates(model, optax.tree.scale(-rate, gradient))
