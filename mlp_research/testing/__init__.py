"""Contracts for your own models, objectives and optimizers, to be called from any test.

Each check runs a whole table of promises and raises `ContractBroken` with every broken one by name.
`without` names the promises that a thing does not make.
"""

from collections.abc import Callable, Collection, Mapping
from typing import Any

from mlp_research.objectives import Objective
from mlp_research.optimizers import OptimizerConfig
from mlp_research.optimizers.schedules import ScheduleConfig
from mlp_research.testing import models as model
from mlp_research.testing import objectives as objective
from mlp_research.testing import optimizers as optimizer
from mlp_research.testing import training
from mlp_research.testing.promises import ContractBroken as ContractBroken
from mlp_research.testing.promises import Fault, check_promises


def check_model(
    build: Callable[..., Any],
    *,
    image_shape: tuple[int, int],
    classes: int,
    without: Collection[str] = (),
) -> None:
    """Hold the model that `build(key=key)` makes against `PROMISES`. Raises `ContractBroken`."""
    test = model.ModelUnderTest(build, image_shape, classes)
    check_promises("the model", PROMISES, test, without=without)


def check_objective(build: Callable[[], Objective], *, without: Collection[str] = ()) -> None:
    """Hold the objective that `build()` makes against OBJECTIVE_PROMISES.

    Raises `ContractBroken`.
    """
    test = objective.ObjectiveUnderTest(build)
    check_promises("the objective", OBJECTIVE_PROMISES, test, without=without, foundations=2)


def check_optimizer(
    build: Callable[[], OptimizerConfig | tuple[OptimizerConfig, ScheduleConfig]],
    *,
    without: Collection[str] = (),
) -> None:
    """Hold an optimizer, and its schedule if `build()` gives one, against OPTIMIZER_PROMISES.

    Raises `ContractBroken`.
    """
    test = optimizer.OptimizerUnderTest(build)
    check_promises("the optimizer", OPTIMIZER_PROMISES, test, without=without)


def _by_name(*promises: Callable[[Any], Fault]) -> Mapping[str, Callable[[Any], Fault]]:
    return {promise.__name__: promise for promise in promises}


PROMISES = _by_name(
    model.can_be_built,
    model.gives_one_float32_logit_for_each_class,
    model.works_under_jit,
    model.works_under_vmap,
    model.works_under_grad,
    model.works_under_all_together,
    model.trains_jax_arrays_and_nothing_else,
    model.repeats_its_output_for_the_same_key,
    model.draws_another_mask_for_another_key,
    model.needs_no_key_in_inference_mode,
    model.refuses_a_missing_key,
    model.uses_no_key_twice,
    model.starts_elsewhere_for_another_key,
    model.starts_finite,
    model.starts_with_moderate_logits,
    model.has_a_gradient_for_every_parameter,
    model.refuses_a_wrong_image_shape,
    training.can_be_taken_apart,
    training.builds_without_allocating,
    training.builds_many_at_once,
    training.saves_and_restores,
    training.compiles_once,
    training.survives_donation,
    training.learns_32_examples,
)
"""What a model promises, by name; the first is what the others stand on."""

OBJECTIVE_PROMISES = _by_name(
    objective.can_be_built,
    objective.gives_a_scalar_loss_and_a_gradient_like_the_model,
    objective.is_finite,
    objective.repeats_for_the_same_key,
    objective.is_compiled_once,
    objective.heeds_its_traced_numbers,
    objective.counts_correct,
    objective.evaluates_without_chance,
    objective.sums_what_it_measures,
    objective.is_the_same_on_two_devices,
    objective.descends,
)
"""What an objective promises; the first two are what the others stand on."""

OPTIMIZER_PROMISES = _by_name(
    optimizer.can_be_built,
    optimizer.is_compiled_once,
    optimizer.heeds_its_traced_numbers,
    optimizer.keeps_the_schedule_in_bounds,
    optimizer.applies_the_logged_rate,
    optimizer.goes_downhill,
    optimizer.gives_finite_updates,
    optimizer.leaves_parameters_alone_without_gradient,
    optimizer.decays_matrices_only,
    optimizer.clips_the_gradient,
    optimizer.evaluates_its_own_parameters,
    optimizer.leaves_frozen_leaves_alone,
    optimizer.saves_and_restores,
)
"""What an optimizer and its schedule promise; the first is what the others stand on."""
