"""The checks of augmentations, data, starts and probes: each promise is broken and then named."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlp_research import step
from mlp_research.augmentations import Affine, Augmentation, Shift
from mlp_research.data import ArraysConfig, IdxConfig
from mlp_research.models import MLPConfig
from mlp_research.probes import Probe
from mlp_research.starts import RunStart, Start
from mlp_research.testing import (
    AUGMENTATION_PROMISES,
    DATA_PROMISES,
    PROBE_PROMISES,
    START_PROMISES,
    ContractBroken,
    check_augmentation,
    check_data,
    check_probe,
    check_start,
)
from tests.broken_kinds import (
    BROKEN_AUGMENTATIONS,
    BROKEN_DATA,
    Cropped,
    Dimmed,
    Dots,
    Inverted,
    LabelOutsideTheClasses,
)
from tests.broken_parts import named
from tests.broken_starts import (
    BROKEN_PROBES,
    BROKEN_STARTS,
    Looks,
    LooksInAStep,
    LosesAUnit,
    Noisy,
    Trains,
)
from tests.made import own_kinds
from tests.test_testing import broken_promises

IMAGE_SHAPE = (6, 5)
BATCH_NORM = MLPConfig(widths=(4,), normalisation="batch")


# Augmentations

DRAWS = "draws_another_change_for_another_key"
AUGMENTATIONS = own_kinds(Augmentation) | {"dimmed": Dimmed}


@pytest.mark.parametrize("kind", AUGMENTATIONS)
def test_every_augmentation_keeps_every_promise(kind: str):
    """One that draws nothing is told so."""
    without = (DRAWS,) if kind == "none" else ()
    check_augmentation(AUGMENTATIONS[kind], without=without)


def test_an_augmentation_that_draws_nothing_keeps_all_but_what_it_is_told_it_cannot():
    check_augmentation(Inverted, image_shape=IMAGE_SHAPE, without=(DRAWS,))


def test_an_augmentation_of_colour_images_keeps_every_promise():
    check_augmentation(Shift, image_shape=(4, 4, 3))


def test_an_augmentation_that_does_not_fit_the_shape_says_so_itself():
    with pytest.raises(ContractBroken) as caught:
        check_augmentation(Affine, image_shape=(5,))
    (explanation,) = caught.value.broken.values()
    assert "2 or 3 dimensions" in explanation


@pytest.mark.parametrize(
    ("build", "promise", "follows"), BROKEN_AUGMENTATIONS, ids=map(named, BROKEN_AUGMENTATIONS)
)
def test_a_broken_augmentation_is_named_with_exactly_what_follows(build, promise, follows):
    found = broken_promises(check_augmentation, build, image_shape=IMAGE_SHAPE)
    assert found == {promise, *follows}


def test_each_promise_of_an_augmentation_is_broken_on_purpose():
    assert {row[1] for row in BROKEN_AUGMENTATIONS} == set(AUGMENTATION_PROMISES)


def test_an_image_of_another_shape_is_named_with_the_hook_and_its_file():
    with pytest.raises(ContractBroken) as caught:
        check_augmentation(Cropped, image_shape=IMAGE_SHAPE)
    (explanation,) = caught.value.broken.values()
    assert "augment of 'cropped' (broken_kinds.py:" in explanation
    assert "float32[6,5] becomes float32[5,5]" in explanation


# Data


@pytest.fixture(scope="module")
def dots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with 12 training rows and 6 test rows, no two of them alike."""
    folder, random = tmp_path_factory.mktemp("dots"), np.random.default_rng(0)
    pixels = random.permutation(18 * 6).astype(np.uint8).reshape(18, 2, 3)
    labels = (np.arange(18) % 3).astype(np.uint8)
    arrays = (pixels[:12], labels[:12], pixels[12:], labels[12:])
    np.savez(folder / "dots.npz", **dict(zip(("x", "y", "x_test", "y_test"), arrays, strict=True)))
    return folder


def test_the_packages_data_keep_every_promise(data_dir: Path, dots: Path):
    check_data(IdxConfig, data_dir)
    check_data(ArraysConfig, dots)
    check_data(Dots, dots)


def test_a_folder_may_be_named_from_where_the_process_stands(
    dots: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(dots.parent)
    check_data(ArraysConfig, dots.name)


@pytest.mark.parametrize(("build", "promise", "follows"), BROKEN_DATA, ids=map(named, BROKEN_DATA))
def test_broken_data_are_named_with_exactly_what_follows(
    build, promise, follows, dots: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(dots)
    assert broken_promises(check_data, build, dots) == {promise, *follows}


def test_each_promise_of_data_is_broken_on_purpose():
    assert {row[1] for row in BROKEN_DATA} == set(DATA_PROMISES)


def test_rows_that_cannot_be_used_are_named_with_the_row(dots: Path):
    with pytest.raises(ContractBroken, match=r"row 2 has the label 7.*3 classes"):
        check_data(LabelOutsideTheClasses, dots)


# Starts


STARTS = {kind: start for kind, start in own_kinds(Start).items() if kind != "run"}


@pytest.mark.parametrize("build", [*STARTS.values(), Noisy], ids=[*STARTS, "noisy"])
def test_every_start_keeps_every_promise(build: Any):
    check_start(build)


def test_a_start_keeps_every_promise_for_a_model_with_state():
    check_start(Noisy, model=BATCH_NORM)


def test_a_start_from_a_run_keeps_every_promise_for_the_model_of_that_run(trained: Path):
    def build() -> RunStart:
        return RunStart(run_dir=str(trained))

    check_start(build, model=MLPConfig(widths=(8, 6), dropout=0.3), image_shape=(4, 3))


@pytest.mark.parametrize(
    ("build", "promise", "follows"), BROKEN_STARTS, ids=map(named, BROKEN_STARTS)
)
def test_a_broken_start_is_named_with_exactly_what_follows(build, promise, follows):
    assert broken_promises(check_start, build) == {promise, *follows}


def test_each_promise_of_a_start_is_broken_on_purpose():
    assert {row[1] for row in BROKEN_STARTS} == set(START_PROMISES)


def test_an_array_of_another_shape_is_named_with_the_hook_and_its_file():
    with pytest.raises(ContractBroken) as caught:
        check_start(LosesAUnit)
    (explanation,) = caught.value.broken.values()
    assert "prepare of 'loses-a-unit' (broken_starts.py:" in explanation
    assert "float32[3] at layers[0].bias, wanted float32[4]" in explanation


# Probes


SOUND_PROBES = own_kinds(Probe) | {"looks": Looks, "looks in a step": LooksInAStep}


@pytest.mark.parametrize("build", SOUND_PROBES.values(), ids=SOUND_PROBES)
def test_every_probe_keeps_every_promise(build: Any):
    check_probe(build)


def test_a_probe_keeps_every_promise_on_a_model_with_state():
    check_probe(Looks, model=BATCH_NORM)


@pytest.mark.parametrize(
    ("build", "promise", "follows"), BROKEN_PROBES, ids=map(named, BROKEN_PROBES)
)
def test_a_broken_probe_is_named_with_exactly_what_follows(build, promise, follows):
    assert broken_promises(check_probe, build) == {promise, *follows}


def test_a_probe_that_enters_the_step_is_named(monkeypatch: pytest.MonkeyPatch):
    train_step = step.train_step

    def heeded(state, recipe, batch):
        """The rate is another one where there is the probe."""
        if isinstance(recipe.probes, Trains):
            rate = recipe.optimizer.learning_rate * recipe.probes.unit
            optimizer = recipe.optimizer.model_copy(update={"learning_rate": rate})
            recipe = dataclasses.replace(recipe, optimizer=optimizer)
        return train_step(state, recipe, batch)

    monkeypatch.setattr(step, "train_step", heeded)
    assert broken_promises(check_probe, Trains) == {"does_not_train"}


def test_each_promise_of_a_probe_is_broken_on_purpose():
    assert {row[1] for row in BROKEN_PROBES} == set(PROBE_PROMISES)
