"""Augmentations and data that each break a promise on purpose, and what breaks with it."""

import sys
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from pydantic import Field

from mlp_research.augmentations import Augmentation
from mlp_research.data import DataConfig, Rows
from mlp_research.objectives import CrossEntropy
from mlp_research.parts import TRACED
from tests.broken_parts import Breaks, raises

random = np.random.default_rng(0)


def is_in_a_loop() -> bool:
    """Whether a compiled loop is being traced around the caller."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "scan":
            return True
        frame = frame.f_back
    return False


# Augmentations


class Dimmed(Augmentation, frozen=True):
    """Random darkness, which keeps every promise; the broken ones are made of it."""

    kind: str = "dimmed"
    strength: Annotated[float, TRACED] = 0.5

    def augment(self, image, *, key):
        return image * (1 - self.strength * jr.uniform(key))


class Inverted(Dimmed, frozen=True):
    """It draws nothing."""

    kind: str = "inverted"

    def augment(self, image, *, key):
        return self.strength * (1 - image)


class Cropped(Dimmed, frozen=True):
    kind: str = "cropped"

    def augment(self, image, *, key):
        return super().augment(image, key=key)[1:]


class Halved(Dimmed, frozen=True):
    kind: str = "halved"

    def augment(self, image, *, key):
        return super().augment(image, key=key).astype(jnp.float16)


class LosesAnExample(Dimmed, frozen=True):
    kind: str = "loses-an-example"

    def batch(self, images, image_shape, *, key):
        return super().batch(images, image_shape, key=key)[1:]


class Brightened(Dimmed, frozen=True):
    """Its brightest pixel becomes 1, where there is one that is not black."""

    kind: str = "brightened"

    def augment(self, image, *, key):
        return super().augment(image, key=key) / image.max()


class DimsInPython(Dimmed, frozen=True):
    kind: str = "dims-in-python"

    def augment(self, image, *, key):
        return super().augment(image, key=key) * random.uniform(0.5, 1)


class AlwaysAlike(Dimmed, frozen=True):
    kind: str = "always-alike"

    def augment(self, image, *, key):
        return super().augment(image, key=jr.key(0))


class BlendsNeighbours(Dimmed, frozen=True):
    kind: str = "blends-neighbours"

    def batch(self, images, image_shape, *, key):
        brightest = jnp.maximum(images, images[::-1])
        return super().batch(brightest, image_shape, key=key)


class KnowsTheBatchSize(Dimmed, frozen=True):
    kind: str = "knows-the-batch-size"

    def batch(self, images, image_shape, *, key):
        return super().batch(images, image_shape, key=key) / len(images)


@custom_partitioning
def _as_it_is(values):
    return values


_as_it_is.def_partition(
    partition=lambda mesh, arguments, result: (
        mesh,
        lambda values: 0.5 * values,
        result.sharding,
        (arguments[0].sharding,),
    ),
    infer_sharding_from_operands=lambda mesh, arguments, result: arguments[0].sharding,
    sharding_rule="i j -> i j",
)


class KnowsItsDevices(Dimmed, frozen=True):
    kind: str = "knows-its-devices"

    def batch(self, images, image_shape, *, key):
        return _as_it_is(super().batch(images, image_shape, key=key))


class FreshCurve(Dimmed, frozen=True):
    kind: str = "fresh-curve"
    curve: Callable = Field(default_factory=lambda: lambda values: values)


class DeafAugmentation(Dimmed, frozen=True):
    kind: str = "deaf-augmentation"
    sharpness: Annotated[float, TRACED] = 0.5


class KnowsItsLoop(Dimmed, frozen=True):
    kind: str = "knows-its-loop"

    def augment(self, image, *, key):
        return super().augment(image, key=key) * (0.5 if is_in_a_loop() else 1)


BROKEN_AUGMENTATIONS: list[Breaks] = [
    (raises, "can_be_built", ()),
    (CrossEntropy, "can_be_built", ()),
    (Cropped, "keeps_shape_and_dtype", ()),
    (Halved, "keeps_shape_and_dtype", ()),
    (LosesAnExample, "keeps_shape_and_dtype", ()),
    (Brightened, "is_finite", ()),
    (DimsInPython, "repeats_for_the_same_key", ()),
    (AlwaysAlike, "draws_another_change_for_another_key", ()),
    (Inverted, "draws_another_change_for_another_key", ()),
    (BlendsNeighbours, "does_not_depend_on_the_rest_of_the_batch", ()),
    (KnowsTheBatchSize, "does_not_depend_on_the_rest_of_the_batch", ()),
    (KnowsItsDevices, "is_the_same_on_two_devices", ()),
    (FreshCurve, "is_compiled_once", ()),
    (DeafAugmentation, "heeds_its_traced_numbers", ()),
    (KnowsItsLoop, "is_the_same_in_a_chunk", ()),
]


# Data


class Dots(DataConfig, frozen=True):
    """The rows of dots.npz, as they are; the broken kinds are made of it."""

    kind: str = "dots"

    def read(self, directory):
        with np.load(directory / "dots.npz") as file:
            return Rows(file["x"], file["y"]), Rows(file["x_test"], file["y_test"])


class LabelOutsideTheClasses(Dots, frozen=True):
    kind: str = "label-outside-the-classes"

    def read(self, directory):
        train, test = super().read(directory)
        test.labels[2] = 7
        return train, test


class NegativeLabel(Dots, frozen=True):
    kind: str = "negative-label"

    def read(self, directory):
        train, test = super().read(directory)
        return Rows(train.features, train.labels.astype(np.int32) - 1), test


class FeatureNotFinite(Dots, frozen=True):
    kind: str = "feature-not-finite"

    def read(self, directory):
        train, test = (
            Rows(rows.features.astype(np.float32), rows.labels) for rows in super().read(directory)
        )
        train.features[3, 0, 1] = np.nan
        return train, test


class TooFewLabels(Dots, frozen=True):
    kind: str = "too-few-labels"

    def read(self, directory):
        train, test = super().read(directory)
        return Rows(train.features, train.labels[1:]), test


class ReturnsItsRowsAlone(Dots, frozen=True):
    kind: str = "returns-its-rows-alone"

    def read(self, directory) -> Any:
        return super().read(directory)[0]


class ShufflesItsRows(Dots, frozen=True):
    kind: str = "shuffles-its-rows"

    def read(self, directory):
        train, test = super().read(directory)
        order = random.permutation(len(train.labels))
        return Rows(train.features[order], train.labels[order]), test


class ClearsWhatItGave(Dots, frozen=True):
    """It gives its memory back before its rows are done with."""

    kind: str = "clears-what-it-gave"
    given: ClassVar[list[Rows]] = []

    def read(self, directory):
        for rows in self.given:
            rows.features[:] = 0
        train, test = super().read(directory)
        self.given[:] = [train, test]
        return train, test


class LimitsItself(Dots, frozen=True):
    kind: str = "limits-itself"

    def read(self, directory):
        train, test = super().read(directory)
        return Rows(train.features[: self.limit], train.labels[: self.limit]), test


class ForgetsOnceItIsKnown(Dots, frozen=True):
    """It reads otherwise where the checksum stands in the config already."""

    kind: str = "forgets-once-it-is-known"

    def read(self, directory):
        train, test = super().read(directory)
        return (train, test) if self.crc32 is None else (test, train)


class ReadsWhereItStands(Dots, frozen=True):
    kind: str = "reads-where-it-stands"

    def read(self, directory):
        with np.load("dots.npz") as file:
            return Rows(file["x"], file["y"]), Rows(file["x_test"], file["y_test"])


class TestsOnItsTrainingRows(Dots, frozen=True):
    kind: str = "tests-on-its-training-rows"
    __test__: ClassVar[bool] = False  # it is no test, whatever its name

    def read(self, directory):
        train, test = super().read(directory)
        test.features[:2] = train.features[:2]
        return train, test


BROKEN_DATA: list[Breaks] = [
    (raises, "can_be_built", ()),
    (CrossEntropy, "can_be_built", ()),
    (LabelOutsideTheClasses, "gives_rows_that_can_be_used", ()),
    (NegativeLabel, "gives_rows_that_can_be_used", ()),
    (FeatureNotFinite, "gives_rows_that_can_be_used", ()),
    (TooFewLabels, "gives_rows_that_can_be_used", ()),
    (ReturnsItsRowsAlone, "gives_rows_that_can_be_used", ()),
    (ShufflesItsRows, "reads_the_same_rows_twice", ()),
    (ClearsWhatItGave, "leaves_alone_what_it_gave", ()),
    (LimitsItself, "reads_all_rows_whatever_is_used", ()),
    (ForgetsOnceItIsKnown, "reads_all_rows_whatever_is_used", ()),
    (ReadsWhereItStands, "reads_from_any_working_directory", ()),
    (TestsOnItsTrainingRows, "tests_on_no_training_row", ()),
]
