"""Starts and probes that each break a promise on purpose, and what breaks with it."""

import ctypes
import itertools
from collections.abc import Callable
from typing import Annotated, Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.core import Tracer
from pydantic import Field

from mlp_research.objectives import CrossEntropy
from mlp_research.parts import TRACED
from mlp_research.probes import Probe
from mlp_research.starts import Start
from tests.broken_kinds import is_in_a_loop
from tests.broken_parts import Breaks, raises

random = np.random.default_rng(0)


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
