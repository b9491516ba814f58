"""The mesh: where arrays lie. One device is a mesh of one."""

from typing import TypeVar

import equinox as eqx
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mlp_research.frozen import ConfigError
from mlp_research.shapes import AnyChunk, MaskedBatch

Tree = TypeVar("Tree")


def data_mesh(devices: int | None) -> Mesh:
    """A mesh whose axis `data` has this many devices, by default all there are.

    Raises `ConfigError` where there are fewer.
    """
    available = jax.device_count()
    size = available if devices is None else devices
    if size > available:
        raise ConfigError(
            f"mesh.data is {size}, but there are {available} devices: use at most {available} "
            f"(on a CPU the environment variable JAX_NUM_CPU_DEVICES={size} makes more)"
        )
    # Auto: under Explicit axes Equinox's filter_shard does not work.
    return jax.make_mesh((size,), ("data",), (AxisType.Auto,), devices=jax.devices()[:size])


def check_divides(mesh: Mesh, batch_size: int, field: str) -> None:
    """Raises `ConfigError` where a batch does not split evenly over the axis `data`."""
    devices = mesh.shape["data"]
    if batch_size % devices:
        below = batch_size // devices * devices
        choices = f"{below} or {below + devices}" if below else f"{devices}"
        raise ConfigError(f"{field} {batch_size} must divide by {devices} devices: use {choices}")


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def replicate(mesh: Mesh, tree: Tree) -> Tree:
    """The tree with each array whole on every device; inside a compiled function, a constraint."""
    return eqx.filter_shard(tree, replicated(mesh))


def place_chunk(mesh: Mesh, chunk: AnyChunk) -> AnyChunk:
    """Each batch of the chunk spread over the axis `data`."""
    steps = jax.device_put(chunk.steps, NamedSharding(mesh, PartitionSpec(None, "data")))
    count = jax.device_put(chunk.count, replicated(mesh))
    return eqx.tree_at(lambda chunk: (chunk.steps, chunk.count), chunk, (steps, count))


def place_batch(mesh: Mesh, batch: MaskedBatch) -> MaskedBatch:
    """The rows of an evaluation batch spread over the axis `data`."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))
