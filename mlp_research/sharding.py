"""The mesh: where arrays lie. One device is a mesh of one."""

from typing import Any, TypeVar

import equinox as eqx
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from mlp_research.frozen import ConfigError
from mlp_research.shapes import AnyChunk, MaskedBatch, RowChunk

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
    """Inside a compiled function: each array of the tree is whole on every device."""
    return eqx.filter_shard(tree, replicated(mesh))


def place(tree: Tree, placement: Sharding) -> Tree:
    """The tree with its arrays moved to where they are to lie."""
    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, placement), rest)


def place_chunk(mesh: Mesh, chunk: AnyChunk) -> AnyChunk:
    """Each batch of the chunk spread over the axis `data`."""
    return _placed(mesh, chunk, PartitionSpec(None, "data"))


def place_batch(mesh: Mesh, batch: MaskedBatch) -> MaskedBatch:
    """The rows of an evaluation batch spread over the axis `data`."""
    return jax.device_put(batch, NamedSharding(mesh, PartitionSpec("data")))


def member_mesh() -> Mesh:
    """A mesh of all devices whose axis `member` holds the members of one program."""
    return jax.make_mesh((jax.device_count(),), ("member",), (AxisType.Auto,))


def over_members(mesh: Mesh) -> NamedSharding:
    """The leading axis spread over the axis `member`."""
    return NamedSharding(mesh, PartitionSpec("member"))


def place_member_chunk(mesh: Mesh, chunk: RowChunk) -> RowChunk:
    """The rows of each lane on its device."""
    return _placed(mesh, chunk, PartitionSpec("member"))


def _placed(mesh: Mesh, chunk: AnyChunk, spread: PartitionSpec) -> Any:
    steps = jax.device_put(chunk.steps, NamedSharding(mesh, spread))
    count = jax.device_put(chunk.count, replicated(mesh))
    return eqx.tree_at(lambda chunk: (chunk.steps, chunk.count), chunk, (steps, count))
