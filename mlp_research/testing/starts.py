"""What a start promises; `testing.check_start` asks."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, PyTree

from mlp_research.contracts import ContractError
from mlp_research.models import Model, ModelConfig, parameters_of, without_state
from mlp_research.parts import blaming
from mlp_research.programs import checks
from mlp_research.starts import Start
from mlp_research.testing import steps
from mlp_research.testing.promises import (
    Fault,
    bits_differ,
    compiled_quickly,
    not_finite,
    trees_differ,
    unheeded,
    with_other_numbers,
)


@dataclasses.dataclass(frozen=True)
class StartUnderTest:
    """A way to make the start, and what several promises look at."""

    build: Callable[[], Any]
    model: ModelConfig
    image_shape: tuple[int, ...]
    classes: int

    @functools.cached_property
    def start(self) -> Any:
        return self.build()

    @functools.cached_property
    def traced(self) -> Start:
        """The start as a program sees it."""
        return self.start.traced()

    @functools.cached_property
    def network(self) -> Model:
        """The model as its config builds it."""
        return steps.network_of(self.model, self.image_shape, self.classes)

    @functools.cached_property
    def key(self) -> Array:
        return jr.key(3)

    def outcome(self, start: Start) -> PyTree:
        """Return (the prepared model, the parameters after a step as they are kept)."""
        return _outcome(start, self.network, self.key)

    @functools.cached_property
    def plain(self) -> PyTree:
        """The outcome uncompiled, which would fix what is drawn elsewhere."""
        return _outcome_of(self.traced, self.network, self.key)

    @functools.cached_property
    def repeat(self) -> Fault:
        """How two calls with one key differ."""
        return bits_differ(self.plain, _outcome_of(self.traced, self.network, self.key))


def _parameters(model: Model) -> PyTree:
    return without_state(parameters_of(model))


def _moved(parameters: PyTree) -> PyTree:
    """Return parameters as a step may leave them, each a bit elsewhere."""

    def moved(leaf: Array) -> Array:
        places = jnp.arange(leaf.size, dtype=jnp.float32).reshape(leaf.shape)
        return leaf + jnp.sin(1 + places).astype(leaf.dtype)

    return jax.tree.map(moved, parameters)


def _outcome_of(start: Start, network: Model, key: Array) -> PyTree:
    prepared = start.prepare_whole(network, key=key)
    before = _parameters(prepared)
    return prepared, start.constrain(before, _moved(before))


_outcome = compiled_quickly(_outcome_of)


@compiled_quickly
def _constrained(start: Start, before: PyTree, after: PyTree) -> PyTree:
    return start.constrain(before, after)


def can_be_built(test: StartUnderTest) -> Fault:
    """`build()` returns a start. Without this the others are not looked at."""
    return None if isinstance(test.start, Start) else f"wanted a Start, not {test.start!r}"


def works_under_jit(test: StartUnderTest) -> Fault:
    """Both hooks can be traced; compiled they give what they give plain. The others need it too."""
    with blaming([test.start]):
        try:
            shapes = eqx.filter_eval_shape(_outcome_of, test.traced, test.network, test.key)
        except ContractError:
            return None  # what is no model is said below
        if test.repeat or jax.tree.structure(shapes) != jax.tree.structure(test.plain):
            return None  # and so is what is drawn elsewhere, or has another structure
        return trees_differ("compiled", test.outcome(test.traced), "plain", test.plain)


def keeps_shapes_and_structure(test: StartUnderTest) -> Fault:
    """The prepared model is like the one that came, and what is kept like what was trained."""
    recipe = steps.recipe_with(test.image_shape, start=test.traced)
    with blaming([test.start]):
        checks.check_start(steps.state_of(test.network, recipe), recipe)
    return None


def is_finite(test: StartUnderTest) -> Fault:
    """The prepared parameters, and those that are kept after a step."""
    prepared, kept = test.outcome(test.traced)
    fault = not_finite("prepared parameter", _parameters(prepared))
    return fault or not_finite("kept parameter", kept)


def repeats_for_the_same_key(test: StartUnderTest) -> Fault:
    """All chance comes from the key: one key gives the same parameters, to the bit."""
    return f"two calls with one key differ: {test.repeat}" if test.repeat else None


def heeds_its_traced_numbers(test: StartUnderTest) -> Fault:
    """Each traced number changes some prepared parameter, or one that is kept after a step."""
    return unheeded(test.traced, test.outcome)


def constrains_no_further_what_it_constrained(test: StartUnderTest) -> Fault:
    """What `constrain` allows it leaves as it is: a second call changes nothing but rounding."""
    prepared, kept = test.outcome(test.traced)
    if test.repeat or not_finite("", kept):
        return None
    again = _constrained(test.traced, _parameters(prepared), kept)
    return trees_differ("constrained twice", again, "once", kept)


def is_compiled_once(test: StartUnderTest) -> Fault:
    """One program serves all values of the traced numbers, and a start made anew."""
    outcome = compiled_quickly(eqx.debug.assert_max_traces(max_traces=1)(_outcome_of))
    for factor in (1.0, 0.5):
        outcome(with_other_numbers(test.build().traced(), factor), test.network, test.key)
    return None
