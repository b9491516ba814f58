"""Contracts for your own models, optimizers and loaders, to be called from any test.

Each check runs a whole table of promises and raises `ContractBroken` with every broken one by name.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mlp_research.loader import Plan
from mlp_research.optimizers import OptimizerConfig, ScheduleConfig
from mlp_research.testing import loaders as loader
from mlp_research.testing import models as model
from mlp_research.testing import optimizers as optimizer
from mlp_research.testing import training
from mlp_research.testing.promises import ContractBroken as ContractBroken
from mlp_research.testing.promises import Fault, check_promises


def check_model(build: Callable[..., Any], *, image_shape: tuple[int, int], classes: int) -> None:
    """Hold the model that `build(key=key)` makes against `PROMISES`. Raises `ContractBroken`."""
    check_promises("the model", PROMISES, model.ModelUnderTest(build, image_shape, classes))


def check_optimizer(
    build: Callable[[], OptimizerConfig | tuple[OptimizerConfig, ScheduleConfig]],
) -> None:
    """Hold an update rule, and its schedule if `build()` gives one, against OPTIMIZER_PROMISES.

    Raises `ContractBroken`.
    """
    check_promises("the optimizer", OPTIMIZER_PROMISES, optimizer.OptimizerUnderTest(build))


def check_loader(build: Callable[..., Plan]) -> None:
    """Hold the plan that `build(seed=seed)` makes against LOADER_PROMISES.

    It should have two epochs or more and an odd number of steps. Raises `ContractBroken`.
    """
    check_promises("the loader", LOADER_PROMISES, loader.LoaderUnderTest(build))


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

OPTIMIZER_PROMISES = _by_name(
    optimizer.can_be_built,
    optimizer.is_compiled_once,
    optimizer.heeds_its_settings,
    optimizer.keeps_the_schedule_in_bounds,
    optimizer.applies_the_logged_rate,
    optimizer.goes_downhill,
    optimizer.gives_finite_updates,
    optimizer.leaves_parameters_alone_without_gradient,
    optimizer.decays_matrices_only,
    optimizer.clips_the_gradient,
    optimizer.saves_and_restores,
)
"""What an update rule and its schedule promise."""

LOADER_PROMISES = _by_name(
    loader.can_be_built,
    loader.orders_every_row_each_epoch,
    loader.gives_full_batches,
    loader.trains_on_no_row_twice_an_epoch,
    loader.stays_within_the_training_rows,
    loader.repeats_the_order_of_its_seed,
    loader.changes_the_order_every_epoch,
    loader.changes_the_order_with_the_seed,
    loader.resumes_at_any_step,
    loader.gives_the_same_batches_for_any_chunk_length,
    loader.streams_what_it_plans,
)
"""What a loader promises."""
