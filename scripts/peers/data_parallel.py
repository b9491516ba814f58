"""The lesson's program over several devices: by `jax.pmap`, and by `jax.shard_map`, its successor.

Each device holds the parameters, takes its share of the batch, and averages its gradients with the
others' (`lax.pmean`): the mean over equal shares is the mean over the batch, so all of them take
the single device's step, but for rounding.

Notice the state. `pmap` maps over a leading axis that every argument must have, one slice a device:
the copies are in the shapes. `shard_map` keeps the shapes of one device and says by a
`PartitionSpec` how each array lies on the mesh: P() is whole on every device, P("data") is cut
along its first axis.

Notice the gradients. `shard_map` knows that the parameters are the same everywhere, and the
gradient with respect to such a value is already summed over the devices: a `pmean` after it changes
nothing, and the step is as many times too long as there are devices. Adam all but hides this, for
it divides by the gradients' size. `lax.pcast(..., to="varying")` asks for each device's own.

Of pmap, jax 0.8.0 says in its changelog that it is in maintenance mode and that new code should use
`jax.shard_map`, on which it has been built since. It runs without a warning (tried on 0.10.2 and
0.12.0); its helpers `jax.device_put_replicated` and `jax.device_put_sharded` are gone.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import lesson
import numpy as np
import optax
from jax import Array
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from peer import Code, Weights
from raw_jax import parameters_of

from mlp_research.errors import ConfigError

AXIS = "data"
Outcome = tuple[Any, optax.OptState, Array]
"""Parameters, optimizer state, loss."""
Step = Callable[[lesson.Parameters, optax.OptState, Array, Array], Outcome]


def update(
    parameters: lesson.Parameters,
    state: optax.OptState,
    value: Array,
    gradients: lesson.Parameters,
) -> Outcome:
    """The end of a step on each device, from the loss and gradients of its share of the batch."""
    value, gradients = jax.lax.pmean((value, gradients), AXIS)
    updates, state = lesson.optimizer.update(gradients, state, parameters)
    return optax.apply_updates(parameters, updates), state, value


@functools.partial(jax.pmap, axis_name=AXIS)
def pmap_step(
    parameters: lesson.Parameters, state: optax.OptState, images: Array, labels: Array
) -> Outcome:
    """A step on arrays with a leading axis of devices: images [devices, share, pixels]."""
    value, gradients = jax.value_and_grad(lesson.loss)(parameters, images, labels)
    return update(parameters, state, value, gradients)


def shard_map_step(mesh: Mesh) -> Step:
    """A step on arrays of ordinary shapes: images [batch, pixels], cut along the mesh's axis."""

    def step(
        parameters: lesson.Parameters, state: optax.OptState, images: Array, labels: Array
    ) -> Outcome:
        own = jax.lax.pcast(parameters, AXIS, to="varying")
        value, gradients = jax.value_and_grad(lesson.loss)(own, images, labels)
        return update(parameters, state, value, gradients)

    whole, cut = PartitionSpec(), PartitionSpec(AXIS)
    specs = (whole, whole, cut, cut)
    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=whole))


def check_divides(batch: int, devices: int) -> None:
    """Raises `ConfigError` where the devices' shares of a batch would differ in size."""
    if batch % devices:
        raise ConfigError(f"a batch of {batch} does not divide by {devices} devices")


class Pmap:
    state_lives = "with the caller: a copy for each device, on a leading axis"
    randomness = "a key for each device, on the leading axis"
    code: Code = (
        (lesson.__file__, "Parameters", "optimizer", "forward", "loss"),
        (__file__, "AXIS", "update", "pmap_step"),
    )

    def __init__(self, weights: Weights, devices: int | None = None):
        self.devices = devices or jax.local_device_count()
        self.name = f"raw JAX, pmap over {self.devices}"
        parameters = parameters_of(weights)
        self.parameters, self.state = jax.tree.map(
            lambda leaf: jnp.stack([leaf] * self.devices),
            (parameters, lesson.optimizer.init(parameters)),
        )

    def place(self, images: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
        return lesson.on_device(images, labels)

    def step(self, images: Array, labels: Array) -> Array:
        """Each device's share is sent to it here, from the first."""
        check_divides(len(labels), self.devices)
        shares = images.reshape(self.devices, -1, images.shape[-1])
        share_labels = labels.reshape(self.devices, -1)
        self.parameters, self.state, value = pmap_step(
            self.parameters, self.state, shares, share_labels
        )
        return value[0]

    def train_epoch(self, images: Array, labels: Array, order: np.ndarray) -> np.ndarray:
        losses = [self.step(images[rows], labels[rows]) for rows in jnp.asarray(order)]
        return np.array(jax.device_get(losses))


class ShardMap:
    state_lives = "with the caller: ordinary shapes, whole on every device"
    randomness = "one key, folded with `lax.axis_index`"
    code: Code = (
        (lesson.__file__, "Parameters", "optimizer", "forward", "loss"),
        (__file__, "AXIS", "update", "shard_map_step"),
    )

    def __init__(self, weights: Weights, devices: int | None = None):
        self.devices = devices or jax.local_device_count()
        self.name = f"raw JAX, shard_map over {self.devices}"
        mesh = jax.make_mesh((self.devices,), (AXIS,), (AxisType.Auto,))
        self.whole = NamedSharding(mesh, PartitionSpec())
        self.jitted_step = shard_map_step(mesh)
        parameters = parameters_of(weights)
        self.parameters, self.state = jax.device_put(
            (parameters, lesson.optimizer.init(parameters)), self.whole
        )

    def place(self, images: np.ndarray, labels: np.ndarray) -> tuple[Array, Array]:
        """All rows on every device: each takes its share of a batch from its own copy."""
        return jax.device_put(lesson.on_device(images, labels), self.whole)

    def step(self, images: Array, labels: Array) -> Array:
        check_divides(len(labels), self.devices)
        self.parameters, self.state, value = self.jitted_step(
            self.parameters, self.state, images, labels
        )
        return value

    def train_epoch(self, images: Array, labels: Array, order: np.ndarray) -> np.ndarray:
        rows_of_steps = jax.device_put(order, self.whole)
        losses = [self.step(images[rows], labels[rows]) for rows in rows_of_steps]
        return np.array(jax.device_get(losses))
