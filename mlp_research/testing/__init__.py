"""Contracts for your own parts of every family, to be called from any test.

Each check runs a whole table of promises and raises `ContractBroken` with every broken one by name.
`without` names the promises that a thing does not make.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from mlp_research.augmentations import Augmentation
from mlp_research.data import DataConfig
from mlp_research.models import ModelConfig
from mlp_research.objectives import Objective
from mlp_research.optimizers import OptimizerConfig
from mlp_research.optimizers.schedules import ScheduleConfig
from mlp_research.probes import Probe
from mlp_research.starts import Start
from mlp_research.testing import augmentations as augmentation
from mlp_research.testing import data, steps, subject, training
from mlp_research.testing import models as model
from mlp_research.testing import objectives as objective
from mlp_research.testing import optimizers as optimizer
from mlp_research.testing import probes as probe
from mlp_research.testing import starts as start
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
    test = subject.ModelUnderTest(build, image_shape, classes)
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


def check_augmentation(
    build: Callable[[], Augmentation],
    *,
    image_shape: tuple[int, ...] = (28, 28),
    without: Collection[str] = (),
) -> None:
    """Hold the augmentation that `build()` makes against AUGMENTATION_PROMISES.

    One that draws nothing is checked without "draws_another_change_for_another_key". Raises
    `ContractBroken`.
    """
    test = augmentation.AugmentationUnderTest(build, tuple(image_shape))
    promises = AUGMENTATION_PROMISES
    check_promises("the augmentation", promises, test, without=without, foundations=2)


def check_data(
    build: Callable[[], DataConfig], directory: Path | str, *, without: Collection[str] = ()
) -> None:
    """Hold what the config that `build()` makes reads of a folder against DATA_PROMISES.

    Raises `ContractBroken`.
    """
    test = data.DataUnderTest(build, Path(directory).absolute())
    check_promises("the data", DATA_PROMISES, test, without=without, foundations=2)


def check_start(
    build: Callable[[], Start],
    *,
    model: ModelConfig = steps.MODEL,
    image_shape: tuple[int, ...] = steps.IMAGE_SHAPE,
    classes: int = steps.CLASSES,
    without: Collection[str] = (),
) -> None:
    """Hold the start that `build()` makes for a model against START_PROMISES.

    Raises `ContractBroken`.
    """
    test = start.StartUnderTest(build, model, tuple(image_shape), classes)
    check_promises("the start", START_PROMISES, test, without=without, foundations=3)


def check_probe(
    build: Callable[[], Probe],
    *,
    model: ModelConfig = steps.MODEL,
    image_shape: tuple[int, ...] = steps.IMAGE_SHAPE,
    classes: int = steps.CLASSES,
    without: Collection[str] = (),
) -> None:
    """Hold the probe that `build()` makes, on a model, against PROBE_PROMISES.

    Raises `ContractBroken`.
    """
    test = probe.ProbeUnderTest(build, model, tuple(image_shape), classes)
    check_promises("the probe", PROBE_PROMISES, test, without=without, foundations=2)


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
    model.changes_no_state_in_inference_mode,
    model.has_one_state_for_the_whole_batch,
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

AUGMENTATION_PROMISES = _by_name(
    augmentation.can_be_built,
    augmentation.keeps_shape_and_dtype,
    augmentation.is_finite,
    augmentation.repeats_for_the_same_key,
    augmentation.draws_another_change_for_another_key,
    augmentation.does_not_depend_on_the_rest_of_the_batch,
    augmentation.is_the_same_on_two_devices,
    augmentation.is_compiled_once,
    augmentation.heeds_its_traced_numbers,
    augmentation.is_the_same_in_a_chunk,
)
"""What an augmentation promises; the first two are what the others stand on."""

DATA_PROMISES = _by_name(
    data.can_be_built,
    data.gives_rows_that_can_be_used,
    data.reads_the_same_rows_twice,
    data.leaves_alone_what_it_gave,
    data.reads_all_rows_whatever_is_used,
    data.reads_from_any_working_directory,
    data.tests_on_no_training_row,
)
"""What a kind of data promises; the first two are what the others stand on."""

START_PROMISES = _by_name(
    start.can_be_built,
    start.works_under_jit,
    start.keeps_shapes_and_structure,
    start.is_finite,
    start.repeats_for_the_same_key,
    start.heeds_its_traced_numbers,
    start.constrains_no_further_what_it_constrained,
    start.is_compiled_once,
)
"""What a start promises; the first three are what the others stand on."""

PROBE_PROMISES = _by_name(
    probe.can_be_built,
    probe.gives_scalars_by_names_of_their_own,
    probe.gives_the_same_names_each_time,
    probe.repeats_itself,
    probe.does_not_train,
    probe.is_finite_at_the_start,
    probe.works_for_members,
    probe.is_compiled_once,
    probe.heeds_its_traced_numbers,
)
"""What a probe promises; the first two are what the others stand on."""
