"""Augmentations, data, starts and probes that each break a promise on purpose, and what follows."""

import ctypes
import itertools
import sys
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.core import Tracer
from jax.experimental.custom_partitioning import custom_partitioning
from pydantic import Field

from mlp_research.augmentations import Augmentation
from mlp_research.data import DataConfig, Rows
from mlp_research.objectives import CrossEntropy
from mlp_research.parts import TRACED
from mlp_research.probes import Probe
from mlp_research.starts import Start
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
        changed = super().batch(images, image_shape, key=key)
        return 0.9 * changed + 0.1 * changed[::-1]


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


# Starts


class Noisy(Start, frozen=True):
    """Weights scaled with some noise, then kept within a bound; the broken ones are made of it."""

    kind: str = "noisy"
    factor: Annotated[float, TRACED] = 2.0
    bound: Annotated[float, TRACED] = 1.0

    def prepare(self, model, *, key):
        scaled = jax.tree.map(
            lambda leaf: self.factor * leaf if eqx.is_inexact_array(leaf) else leaf, model
        )
        return with_first_bias(scaled, lambda bias: bias + 0.1 * jr.normal(key, bias.shape))

    def constrain(self, before, after):
        return jax.tree.map(lambda leaf: jnp.clip(leaf, -self.bound, self.bound), after)


def _is_first_bias(path: Any) -> bool:
    return jax.tree_util.keystr(path).endswith("layers[0].bias")


def with_first_bias(tree: Any, change: Callable) -> Any:
    """Return the tree with that one array changed."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: change(leaf) if _is_first_bias(path) else leaf, tree
    )


class LooksAtItsNumbers(Noisy, frozen=True):
    kind: str = "looks-at-its-numbers"

    def prepare(self, model, *, key):
        prepared = super().prepare(model, key=key)
        return prepared if prepared.layers[0].bias.max() < 100 else model


class KnowsItIsCompiled(Noisy, frozen=True):
    kind: str = "knows-it-is-compiled"

    def prepare(self, model, *, key):
        traced = isinstance(model.layers[0].bias, Tracer)
        return with_first_bias(super().prepare(model, key=key), lambda bias: bias + traced)


class LosesAUnit(Noisy, frozen=True):
    kind: str = "loses-a-unit"

    def prepare(self, model, *, key):
        return with_first_bias(super().prepare(model, key=key), lambda bias: bias[1:])


class ReturnsAMapping(Noisy, frozen=True):
    kind: str = "returns-a-mapping"

    def prepare(self, model, *, key):
        return {"model": super().prepare(model, key=key)}


class KeepsHalfPrecision(Noisy, frozen=True):
    kind: str = "keeps-half-precision"

    def constrain(self, before, after):
        kept = super().constrain(before, after)
        return jax.tree.map(lambda leaf: leaf.astype(jnp.float16), kept)


class StartsInfinite(Noisy, frozen=True):
    kind: str = "starts-infinite"

    def prepare(self, model, *, key):
        prepared = super().prepare(model, key=key)
        return with_first_bias(prepared, lambda bias: bias.at[0].set(jnp.inf))


class KeepsWhatIsNotFinite(Noisy, frozen=True):
    kind: str = "keeps-what-is-not-finite"

    def constrain(self, before, after):
        kept = super().constrain(before, after)
        return with_first_bias(kept, lambda bias: bias.at[0].set(jnp.nan))


class PreparesInPython(Noisy, frozen=True):
    kind: str = "prepares-in-python"

    def prepare(self, model, *, key):
        prepared = super().prepare(model, key=key)
        return with_first_bias(prepared, lambda bias: bias + random.normal())


class DeafStart(Noisy, frozen=True):
    kind: str = "deaf-start"
    shift: Annotated[float, TRACED] = 0.5


class DecaysEachTime(Noisy, frozen=True):
    kind: str = "decays-each-time"

    def constrain(self, before, after):
        return jax.tree.map(lambda leaf: 0.9 * leaf, super().constrain(before, after))


class FreshStart(Noisy, frozen=True):
    kind: str = "fresh-start"
    curve: Callable = Field(default_factory=lambda: lambda values: values)


BROKEN_STARTS: list[Breaks] = [
    (raises, "can_be_built", ()),
    (CrossEntropy, "can_be_built", ()),
    (LooksAtItsNumbers, "works_under_jit", ()),
    (KnowsItIsCompiled, "works_under_jit", ()),
    (LosesAUnit, "keeps_shapes_and_structure", ()),
    (ReturnsAMapping, "keeps_shapes_and_structure", ()),
    (KeepsHalfPrecision, "keeps_shapes_and_structure", ()),
    (StartsInfinite, "is_finite", ()),
    (KeepsWhatIsNotFinite, "is_finite", ()),
    (PreparesInPython, "repeats_for_the_same_key", ()),
    (DeafStart, "heeds_its_traced_numbers", ()),
    (DecaysEachTime, "constrains_no_further_what_it_constrained", ()),
    (FreshStart, "is_compiled_once", ()),
]


# Probes


class Looks(Probe, frozen=True):
    """A mean of logits and the way of a bias; the broken ones are made of it."""

    kind: str = "looks"
    unit: Annotated[float, TRACED] = 2.0

    def measure(self, model, data):
        logits = jax.vmap(model)(data.images)
        return {"mean_logit": self.unit * logits.mean()}

    def measure_step(self, before, after):
        return {"way": jnp.linalg.norm(after.layers[0].bias - before.layers[0].bias)}


class LooksInAStep(Looks, frozen=True):
    """It measures nothing after an epoch."""

    kind: str = "looks-in-a-step"

    def measure(self, model, data):
        return {}

    def measure_step(self, before, after):
        return {"way": self.unit * super().measure_step(before, after)["way"]}


class OneNumberForEachUnit(Looks, frozen=True):
    kind: str = "one-number-for-each-unit"

    def measure_step(self, before, after):
        return {"way": after.layers[0].bias - before.layers[0].bias}


class NamedLikeTheLoss(Looks, frozen=True):
    kind: str = "named-like-the-loss"

    def measure(self, model, data):
        return {"loss": super().measure(model, data)["mean_logit"]}


class ReturnsItsNumberAlone(Looks, frozen=True):
    kind: str = "returns-its-number-alone"

    def measure(self, model, data) -> Any:
        return super().measure(model, data)["mean_logit"]


class CountsItsCalls(Looks, frozen=True):
    kind: str = "counts-its-calls"
    calls: ClassVar[Any] = itertools.count()

    def measure(self, model, data):
        return {f"mean_logit_{next(self.calls)}": super().measure(model, data)["mean_logit"]}


class MeasuresInPython(Looks, frozen=True):
    kind: str = "measures-in-python"

    def measure(self, model, data):
        return {"mean_logit": super().measure(model, data)["mean_logit"] + random.normal()}


class WritesIntoTheModel(Looks, frozen=True):
    """Through the memory of an array, as another library could that shares it."""

    kind: str = "writes-into-the-model"

    def measure(self, model, data):
        bias = model.layers[0].bias
        measured = super().measure(model, data)
        if not isinstance(bias, Tracer):
            jax.block_until_ready(measured)
            ctypes.memset(bias.unsafe_buffer_pointer(), 1, bias.nbytes)
        return measured


class Trains(Looks, frozen=True):
    """Looked at by a step that a test has made to heed it."""

    kind: str = "trains"


class InfiniteAtTheStart(Looks, frozen=True):
    """The biases are 0."""

    kind: str = "infinite-at-the-start"

    def measure_step(self, before, after):
        way = super().measure_step(before, after)["way"]
        return {"way": way, "relative_way": way / jnp.linalg.norm(before.layers[0].bias)}


class KnowsItIsAMember(Looks, frozen=True):
    kind: str = "knows-it-is-a-member"

    def measure(self, model, data):
        factor = 0.5 if is_in_a_loop() else 1
        return {"mean_logit": factor * super().measure(model, data)["mean_logit"]}


class AsksTheHost(Looks, frozen=True):
    """Its callback says nothing of batches, so that it cannot be one of batched members."""

    kind: str = "asks-the-host"

    def measure(self, model, data):
        mean = super().measure(model, data)["mean_logit"]
        shape = jax.ShapeDtypeStruct((), jnp.float32)
        return {"mean_logit": jax.pure_callback(lambda value: np.float32(value), shape, mean)}


class FreshProbe(Looks, frozen=True):
    kind: str = "fresh-probe"
    curve: Callable = Field(default_factory=lambda: lambda values: values)


class DeafProbe(Looks, frozen=True):
    kind: str = "deaf-probe"
    threshold: Annotated[float, TRACED] = 0.5


SCALARS = "gives_scalars_by_names_of_their_own"
BROKEN_PROBES: list[Breaks] = [
    (raises, "can_be_built", ()),
    (CrossEntropy, "can_be_built", ()),
    (OneNumberForEachUnit, SCALARS, ()),
    (NamedLikeTheLoss, SCALARS, ()),
    (ReturnsItsNumberAlone, SCALARS, ()),
    (CountsItsCalls, "gives_the_same_names_each_time", ()),
    (MeasuresInPython, "repeats_itself", ()),
    (WritesIntoTheModel, "does_not_train", ()),
    (InfiniteAtTheStart, "is_finite_at_the_start", ()),
    (KnowsItIsAMember, "works_for_members", ()),
    (AsksTheHost, "works_for_members", ()),
    (FreshProbe, "is_compiled_once", ()),
    (DeafProbe, "heeds_its_traced_numbers", ()),
]
