"""The mesh: where arrays lie. One device is a mesh of one."""

from collections import Counter
from typing import Any, TypeVar

import equinox as eqx
import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from jaxtyping import PyTree

from mlp_research.data.batches import AnyChunk, MaskedBatch, RowChunk
from mlp_research.errors import ConfigError
from mlp_research.shapes import is_array_or_shape

Tree = TypeVar("Tree")


def device_mesh(data: int | None = None, model: int = 1) -> Mesh:
    """A mesh that spreads batches over its axis `data` and dense layers over its axis `model`.

    By default `data` takes all devices. Raises `ConfigError` where there are fewer than it takes.
    """
    available = jax.device_count()
    size = max(available // model, 1) if data is None else data
    if size * model < available and jax.process_count() > 1:
        raise ConfigError(
            f"mesh.data {size} x mesh.model {model} leaves devices of the {jax.process_count()} "
            f"processes without work: there are {available}"
        )
    if size * model > available:
        raise ConfigError(
            f"mesh.data {size} x mesh.model {model} needs {size * model} devices, but there are "
            f"{available}: use fewer (on a CPU the environment variable "
            f"JAX_NUM_CPU_DEVICES={size * model} makes more)"
        )
    # Auto: under Explicit axes Equinox's filter_shard does not work.
    axes = (AxisType.Auto, AxisType.Auto)
    devices = jax.devices()[: size * model]
    return jax.make_mesh((size, model), ("data", "model"), axes, devices=devices)


def check_divides(mesh: Mesh, batch_size: int, field: str) -> None:
    """Raises `ConfigError` where a batch does not split evenly over the axis `data`."""
    devices = mesh.shape["data"]
    if batch_size % devices:
        below = batch_size // devices * devices
        choices = f"{below} or {below + devices}" if below else f"{devices}"
        raise ConfigError(f"{field} {batch_size} must divide by {devices} devices: use {choices}")


def layouts(mesh: Mesh, tree: Tree) -> Tree:
    """Where each array of a state lies, as a tree of shardings; what is no array is None.

    The weights of the dense layers within one module are spread over the axis `model` by outputs
    and by inputs in turn (Shoeybi et al. 2019, section 3): what a layer by outputs leaves on a
    device is what the next one needs there. An optimizer's moments are trees like the model, and
    lie like it. All else is whole on every device, also a layer that does not divide.
    """
    turns: Counter[tuple] = Counter()

    def layout(path: tuple, node: Any) -> Any:
        specs = None
        if _is_dense(node):
            turn = turns[path[:-1]]
            specs = _dense_specs(mesh, node, turn)
            turns[path[:-1]] = turn + 1 if specs else 0
        whole = PartitionSpec()
        return jax.tree.map(
            lambda leaf: NamedSharding(mesh, specs.get(leaf.ndim, whole) if specs else whole), node
        )

    arrays = eqx.filter(tree, is_array_or_shape)
    return jax.tree_util.tree_map_with_path(layout, arrays, is_leaf=_is_dense)


def undivided(mesh: Mesh, tree: PyTree) -> list[str]:
    """Path and size of each dense layer that is whole on every device of the axis `model`."""
    if mesh.shape["model"] == 1:
        return []

    def is_linear(node: Any) -> bool:
        return isinstance(node, eqx.nn.Linear)

    layers = jax.tree_util.tree_flatten_with_path(layouts(mesh, tree), is_leaf=is_linear)[0]
    return [
        f"{jax.tree_util.keystr(path).lstrip('.')} ({layer.in_features} -> {layer.out_features})"
        for path, layer in layers
        if is_linear(layer) and layer.weight.is_fully_replicated
    ]


def _dense_specs(mesh: Mesh, layer: eqx.nn.Linear, turn: int) -> dict[int, PartitionSpec] | None:
    """How a layer's bias and weight, by their dimensions, are spread, if they can be."""
    outputs, inputs = layer.weight.shape
    divided = inputs if turn % 2 else outputs
    if divided % mesh.shape["model"]:
        return None
    if turn % 2:
        return {1: PartitionSpec(), 2: PartitionSpec(None, "model")}
    return {1: PartitionSpec("model"), 2: PartitionSpec("model")}


def _is_dense(node: Any) -> bool:
    """Return whether a node is a dense layer, or what an optimizer keeps of one as a matrix.

    An optimizer's state may hold another shape there, or, for a layer of another rule, nothing.
    """
    if not isinstance(node, eqx.nn.Linear):
        return False
    return is_array_or_shape(node.weight) and node.weight.ndim == 2


def spread(mesh: Mesh, state: Tree) -> Tree:
    """Inside a compiled function: each array of a state lies where `layouts` says."""
    return eqx.filter_shard(state, layouts(mesh, state))


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def replicate(mesh: Mesh, tree: Tree) -> Tree:
    """Inside a compiled function: each array of the tree is whole on every device."""
    return eqx.filter_shard(tree, replicated(mesh))


def place(tree: Tree, layout: Sharding) -> Tree:
    """The tree with its arrays moved to where they are to lie."""
    arrays, rest = eqx.partition(tree, eqx.is_array)
    return eqx.combine(jax.device_put(arrays, layout), rest)


def template(mesh: Mesh, shapes: Tree) -> Tree:
    """A state by shapes alone that also says where each array is to lie."""
    abstract, static = eqx.partition(shapes, is_array_or_shape)
    placed = jax.tree.map(
        lambda leaf, layout: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=layout),
        abstract,
        layouts(mesh, abstract),
    )
    return eqx.combine(placed, static)


def local_part(mesh: Mesh, batch_size: int) -> slice:
    """The rows of each batch that lie on this process's devices: all it needs to load."""
    layout = NamedSharding(mesh, PartitionSpec("data"))
    parts = layout.addressable_devices_indices_map((batch_size,)).values()
    rows = [rows.indices(batch_size) for part in parts if part for rows in part]
    return slice(min(start for start, *_ in rows), max(stop for _, stop, _ in rows))


def place_chunk(mesh: Mesh, chunk: AnyChunk) -> AnyChunk:
    """Each batch of the chunk, of which this process has its part, spread over the axis `data`."""
    return _placed(mesh, chunk, PartitionSpec(None, "data"))


def place_batch(mesh: Mesh, batch: MaskedBatch) -> MaskedBatch:
    """An evaluation batch, of which this process has its part, spread over the axis `data`."""
    layout = NamedSharding(mesh, PartitionSpec("data"))
    return jax.make_array_from_process_local_data(layout, batch)


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
    layout = NamedSharding(mesh, spread)
    steps = jax.make_array_from_process_local_data(layout, chunk.steps)
    count = jax.device_put(chunk.count, replicated(mesh))
    return eqx.tree_at(lambda chunk: (chunk.steps, chunk.count), chunk, (steps, count))
