"""What an augmentation promises; `testing.check_augmentation` asks.

One that draws nothing, such as a fixed filter, does not promise to draw another change for another
key: leave that out by `without`.
"""

import dataclasses
import functools
from collections.abc import Callable
from math import prod
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float32

from mlp_research.augmentations import Augmentation
from mlp_research.parts import blaming
from mlp_research.prng import step_key
from mlp_research.programs import checks
from mlp_research.system import sharding
from mlp_research.testing import steps
from mlp_research.testing.promises import (
    Fault,
    bits_differ,
    compiled_quickly,
    differs,
    not_finite,
    unheeded,
    with_other_numbers,
)
from mlp_research.testing.steps import EXAMPLES

STEPS = 4
"""Steps of a chunk, each with a key of its own."""
HALF = EXAMPLES // 2

Images = Float32[Array, "batch pixels"]


@dataclasses.dataclass(frozen=True)
class AugmentationUnderTest:
    """A way to make the augmentation, and what several promises look at."""

    build: Callable[[], Any]
    image_shape: tuple[int, ...]

    @functools.cached_property
    def augmentation(self) -> Any:
        return self.build()

    @functools.cached_property
    def traced(self) -> Augmentation:
        """The augmentation as a program sees it."""
        return self.augmentation.traced()

    @functools.cached_property
    def images(self) -> Images:
        return jr.uniform(jr.key(0), (EXAMPLES, prod(self.image_shape)))

    @functools.cached_property
    def key(self) -> Array:
        """Root of the keys of all steps."""
        return jr.key(1)

    def changed(self, images: Images, step: int = 0) -> Images:
        """Return a batch as the augmentation changes it in a step."""
        return _changed(self.traced, images, self.image_shape, self.key, jnp.int32(step))

    def outcome(self, augmentation: Augmentation) -> list[Images]:
        """Return the batch as it is changed in each of some steps."""
        arguments = self.images, self.image_shape, self.key
        return [_changed(augmentation, *arguments, jnp.int32(step)) for step in range(STEPS)]

    @functools.cached_property
    def repeat(self) -> Fault:
        """How two calls with one key differ. Nothing is compiled, which would fix what is drawn."""
        arguments = self.traced, self.images, self.image_shape, self.key, 0
        return bits_differ(_change(*arguments), _change(*arguments))


def _change(
    augmentation: Augmentation, images: Images, image_shape: tuple[int, ...], key: Array, step: Any
) -> Images:
    return augmentation.batch(images, image_shape, key=step_key(key, jnp.int32(step)))


# Both optimised, as a run's own program is: rounding may differ only there.
_changed = eqx.filter_jit(_change)


@eqx.filter_jit
def _chunk(
    augmentation: Augmentation, images: Images, image_shape: tuple[int, ...], key: Array
) -> Float32[Array, "steps batch pixels"]:
    """Return the batch as it is changed in each step of a chunk, as training loops over them."""

    def step(_: None, number: Array) -> tuple[None, Images]:
        return None, _change(augmentation, images, image_shape, key, number)

    return jax.lax.scan(step, None, jnp.arange(STEPS))[1]


def can_be_built(test: AugmentationUnderTest) -> Fault:
    """`build()` returns an augmentation. Without this the others are not looked at."""
    if not isinstance(test.augmentation, Augmentation):
        return f"wanted an Augmentation, not {test.augmentation!r}"
    return None


def keeps_shape_and_dtype(test: AugmentationUnderTest) -> Fault:
    """Of one image and of a batch, by shapes alone; the others need it too."""
    recipe = steps.recipe_with(test.image_shape, augmentation=test.traced)
    state = steps.state_of(steps.network_of(steps.MODEL, test.image_shape, 2), recipe)
    with blaming([test.augmentation]):
        checks.check_augmentation(state, recipe, steps.random_batch(prod(test.image_shape), 2))
        came = eqx.filter_eval_shape(
            _change, test.traced, test.images, test.image_shape, test.key, 0
        )
    found, wanted = checks.described(came), checks.described(test.images)
    return None if found == wanted else f"a batch of {wanted} becomes {found}"


def is_finite(test: AugmentationUnderTest) -> Fault:
    """Of random images, black ones and white ones."""
    random = test.images
    kinds = {"random": random, "black": jnp.zeros_like(random), "white": jnp.ones_like(random)}
    wrong = [name for name, images in kinds.items() if not_finite("", test.changed(images))]
    return f"what becomes of {' and '.join(wrong)} images is not finite" if wrong else None


def repeats_for_the_same_key(test: AugmentationUnderTest) -> Fault:
    """All chance comes from the key: one key gives the same pixels, to the bit."""
    return f"two calls with one key differ: {test.repeat}" if test.repeat else None


def draws_another_change_for_another_key(test: AugmentationUnderTest) -> Fault:
    """Some pixel of a batch differs from step to step. Leave it out for what draws nothing."""
    first, *others = test.outcome(test.traced)
    if not any(bits_differ(first, other) for other in others):
        return (
            f"{STEPS} keys gave the same images: draw from `key`, or where nothing is to be drawn "
            "use without=('draws_another_change_for_another_key',)"
        )
    return None


def does_not_depend_on_the_rest_of_the_batch(test: AugmentationUnderTest) -> Fault:
    """What becomes of an image is decided by its own key, whatever stands beside it.

    To the bit among other neighbours, and but for rounding in a batch of another size.
    """
    if test.repeat:  # what is drawn elsewhere is said there
        return None
    whole, others = test.changed(test.images), test.images.at[HALF:].set(0)
    fault = bits_differ(test.changed(others)[:HALF], whole[:HALF])
    if fault:
        return f"an image changes otherwise among other neighbours: {fault}"
    smaller = test.changed(test.images[:HALF])
    return differs(f"in a batch of {HALF}", smaller, f"of {EXAMPLES}", whole[:HALF])


def is_the_same_on_two_devices(test: AugmentationUnderTest) -> Fault:
    """A batch spread over two devices has the same pixels, to the bit. Asked where two are."""
    if jax.device_count() == 1 or test.repeat:
        return None
    mesh = sharding.device_mesh(2)
    augmentation, key, step = sharding.place(
        (test.traced, test.key, jnp.int32(0)), sharding.replicated(mesh)
    )
    images = jax.device_put(test.images, NamedSharding(mesh, PartitionSpec("data")))
    spread = _changed(augmentation, images, test.image_shape, key, step)
    fault = bits_differ(test.changed(test.images), spread)
    return f"over two devices {fault}" if fault else None


def is_compiled_once(test: AugmentationUnderTest) -> Fault:
    """One program serves all values of the traced numbers, and an augmentation made anew."""
    change = compiled_quickly(eqx.debug.assert_max_traces(max_traces=1)(_change))
    for step, factor in enumerate((1.0, 0.5)):
        augmentation = with_other_numbers(test.build().traced(), factor)
        change(augmentation, test.images, test.image_shape, test.key, jnp.int32(step))
    return None


def heeds_its_traced_numbers(test: AugmentationUnderTest) -> Fault:
    """Each traced number changes some pixel in some step."""
    return unheeded(test.traced, test.outcome)


def is_the_same_in_a_chunk(test: AugmentationUnderTest) -> Fault:
    """A step within a compiled loop over steps has the pixels of the step alone, to the bit."""
    if test.repeat:
        return None
    chunk = _chunk(test.traced, test.images, test.image_shape, test.key)
    fault = bits_differ(test.changed(test.images, STEPS - 1), chunk[STEPS - 1])
    return f"step {STEPS - 1} of a chunk is not the step alone: {fault}" if fault else None
