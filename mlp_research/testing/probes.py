"""What a probe promises; `testing.check_probe` asks."""

import dataclasses
import functools
from collections.abc import Callable
from math import prod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from mlp_research import step
from mlp_research.data.batches import Batch
from mlp_research.models import Model, ModelConfig, without_state
from mlp_research.objectives import Measured
from mlp_research.parts import blaming
from mlp_research.probes import NoProbe, Probe
from mlp_research.programs import checks
from mlp_research.step import Recipe, TrainState
from mlp_research.testing import steps
from mlp_research.testing.promises import (
    Fault,
    bits_differ,
    compiled_quickly,
    not_finite,
    unheeded,
    with_other_numbers,
)


@dataclasses.dataclass(frozen=True)
class ProbeUnderTest:
    """A way to make the probe, and what several promises look at."""

    build: Callable[[], Any]
    model: ModelConfig
    image_shape: tuple[int, ...]
    classes: int

    @functools.cached_property
    def probe(self) -> Any:
        return self.build()

    def network(self, seed: int) -> Model:
        """Return a model of its own, that nobody has written into."""
        return steps.network_of(self.model, self.image_shape, self.classes, seed)

    @functools.cached_property
    def batch(self) -> Batch:
        return steps.random_batch(prod(self.image_shape), self.classes)

    def recipe(self, probe: Probe) -> Recipe:
        """Return what a step needs, with the traced probe."""
        return steps.recipe_with(self.image_shape, probes=probe)

    def outcome(self, probe: Probe, seed: int = 0) -> dict[str, Measured]:
        """Return what each hook measures of a model."""
        return _looked_at(self.network(seed), self.recipe(probe), self.batch)

    def plain(self, seed: int) -> dict[str, Measured]:
        """Return what each hook measures, uncompiled, which would fix what is drawn."""
        return _look(self.network(seed), self.recipe(self.probe.traced()), self.batch)

    @functools.cached_property
    def looks(self) -> list[dict[str, Measured]]:
        """What is measured of one model twice, and of another one."""
        return [self.plain(seed) for seed in (0, 0, 1)]

    @functools.cached_property
    def other_names(self) -> Fault:
        """How the names of one look differ from those of another."""
        first, *others = (_names(look) for look in self.looks)
        for other in others:
            if other != first:
                return f"{', '.join(sorted(first ^ other))} not in each of {len(self.looks)} calls"
        return None

    @functools.cached_property
    def repeat(self) -> Fault:
        """How two looks at one model differ, where their names do not."""
        return None if self.other_names else bits_differ(*self.looks[:2])


def _names(look: dict[str, Measured]) -> set[str]:
    return {f"{name} of {hook}" for hook, measured in look.items() for name in measured}


def _look(model: Model, recipe: Recipe, batch: Batch) -> dict[str, Measured]:
    """Return what a probe measures of a model and of a step that moves each parameter."""
    before = recipe.optimizer.trained(without_state(model))
    after = jax.tree.map(lambda leaf: leaf + 0.0625, before)
    pair = jax.lax.optimization_barrier((before, after))
    return {
        "measure": step.probe_step(model, recipe, batch),
        "measure_step": recipe.probes.measure_step(*pair),
    }


_looked_at = compiled_quickly(_look)


@compiled_quickly  # optimised, XLA may round a small sum otherwise in a loop
def _members(models: Model, recipe: Recipe, batch: Batch) -> dict[str, Measured]:
    """Return what is measured of each of many models, one after the other."""
    arrays, static = eqx.partition(models, eqx.is_array)
    return jax.lax.map(lambda each: _look(eqx.combine(each, static), recipe, batch), arrays)


@eqx.filter_jit  # optimised, as a run's own program is: what is fused may round otherwise
def _trained(state: TrainState, recipe: Recipe, batch: Batch) -> TrainState:
    return step.train_step(state, recipe, batch)[0]


def can_be_built(test: ProbeUnderTest) -> Fault:
    """`build()` returns a probe. Without this the others are not looked at."""
    return None if isinstance(test.probe, Probe) else f"wanted a Probe, not {test.probe!r}"


def gives_scalars_by_names_of_their_own(test: ProbeUnderTest) -> Fault:
    """Both hooks, by shapes alone; the others need it too."""
    recipe = test.recipe(test.probe.traced())
    with blaming([test.probe]):
        checks.check_probe(steps.state_of(test.network(0), recipe), recipe, test.batch)
    return None


def gives_the_same_names_each_time(test: ProbeUnderTest) -> Fault:
    """Of one model or another: each is a column of metrics.jsonl."""
    return test.other_names


def repeats_itself(test: ProbeUnderTest) -> Fault:
    """One model gives the same numbers, to the bit. A probe is given no key."""
    return f"two looks at one model differ: {test.repeat}" if test.repeat else None


def does_not_train(test: ProbeUnderTest) -> Fault:
    """A step that is looked at is, to the bit, the step without a probe; a model stays as it is."""
    states = []
    for probe in (NoProbe().traced(), test.probe.traced()):
        recipe = test.recipe(probe)
        states.append(_trained(steps.state_of(test.network(0), recipe), recipe, test.batch))
    fault = bits_differ(*states)
    if fault:
        return f"the step with the probe is another one than without: {fault}"
    model = test.network(0)
    _look(model, test.recipe(test.probe.traced()), test.batch)
    fault = bits_differ(test.network(0), model)
    return f"it wrote into the model that it looked at: {fault}" if fault else None


def is_finite_at_the_start(test: ProbeUnderTest) -> Fault:
    """Each number of a new model and of its first step is finite: metrics.jsonl holds no other."""
    return not_finite("measurement", test.outcome(test.probe.traced()))


def works_for_members(test: ProbeUnderTest) -> Fault:
    """Among many models of one program each gives the numbers of the model alone, to the bit.

    Both are compiled unoptimised. Where members are batched, as on a GPU, by shapes alone.
    """
    models, recipe = [test.network(seed) for seed in (0, 1)], test.recipe(test.probe.traced())
    stacked = jax.tree.map(
        lambda *leaves: jnp.stack(leaves) if eqx.is_array(leaves[0]) else leaves[0], *models
    )
    members = _members(stacked, recipe, test.batch)
    eqx.filter_eval_shape(
        eqx.filter_vmap(_look, in_axes=(eqx.if_array(0), None, None)), stacked, recipe, test.batch
    )
    if test.other_names or test.repeat:  # which is said there
        return None

    def of(member: int) -> dict[str, Measured]:
        return jax.tree.map(lambda values: values[member], members)

    for seed in (0, 1):
        fault = bits_differ(test.outcome(test.probe.traced(), seed), of(seed))
        if fault:
            return f"among members, of one after the other, {fault} alone"
    return None


def is_compiled_once(test: ProbeUnderTest) -> Fault:
    """One program serves all values of the traced numbers, and a probe made anew."""
    look = compiled_quickly(eqx.debug.assert_max_traces(max_traces=1)(_look))
    for factor in (1.0, 0.5):
        recipe = test.recipe(with_other_numbers(test.build().traced(), factor))
        look(test.network(0), recipe, test.batch)
    return None


def heeds_its_traced_numbers(test: ProbeUnderTest) -> Fault:
    """Each traced number changes something that is measured."""

    def outcome(probe: Probe) -> dict[str, Measured]:
        return test.outcome(probe)

    return unheeded(test.probe.traced(), outcome)
