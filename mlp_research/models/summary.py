"""What a model is made of and what a step of it costs, found without training anything."""

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import PyTree

from mlp_research.models import Model, parameters_of, with_model, without_state
from mlp_research.shapes import RandomKey, is_array_or_shape, is_trained


@dataclasses.dataclass(frozen=True)
class Layer:
    """One part of a model that holds parameters itself."""

    path: str
    kind: str
    output: str
    """Shape of what it returns for one example; nothing where only its weights are used."""
    parameters: int


def layers(model: Model, pixels: int, key: RandomKey) -> list[Layer]:
    """The layers of a model in the order of its pytree, their outputs traced on one image."""
    network = eqx.nn.inference_mode(without_state(model))
    outputs: list[list[str]] = []

    def is_layer(part: Any) -> bool:
        return part is not network and _holds_parameters(part)

    def watch(part: Any) -> Any:
        if not is_layer(part):
            return part
        outputs.append([])
        return _recording(part, outputs[-1])

    image = jax.ShapeDtypeStruct((pixels,), jnp.float32)
    watched = with_model(model, jax.tree.map(watch, network, is_leaf=is_layer))
    whole = _shape(eqx.filter_eval_shape(lambda m, x, k: m(x, key=k), watched, image, key))
    found = [
        (path, part)
        for path, part in jax.tree_util.tree_flatten_with_path(network, is_leaf=is_layer)[0]
        if is_layer(part)
    ]
    rows = [
        Layer(_path(path), type(part).__name__, "; ".join(seen), count(part))
        for (path, part), seen in zip(found, outputs, strict=True)
    ]
    own = count(model) - sum(row.parameters for row in rows)
    return [*rows, Layer("", type(network).__name__, whole, own)] if own or not rows else rows


def _recording(layer: Any, outputs: list[str]) -> Any:
    """The layer, but noting the shape of what each call returns; still an instance of its class."""

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = type(layer).__call__(self, *args, **kwargs)
        shape = ", ".join(_shape(leaf) for leaf in jax.tree.leaves(_without_state(result)))
        if shape not in outputs:
            outputs.append(shape)
        return result

    name = type(layer).__name__
    module: Any = type(type(layer))
    recording = module(name, (type(layer),), {"__call__": call})
    copy = object.__new__(recording)
    for field in dataclasses.fields(layer):
        object.__setattr__(copy, field.name, getattr(layer, field.name))
    return copy


def count(tree: PyTree) -> int:
    """Return how many numbers are trained."""
    return sum(leaf.size for leaf in jax.tree.leaves(parameters_of(tree)))


def _holds_parameters(part: Any) -> bool:
    """Whether a module has an array among its own fields, not only in modules within it."""
    return isinstance(part, eqx.Module) and any(
        is_trained(getattr(part, field.name, None)) for field in dataclasses.fields(part)
    )


def _without_state(result: Any) -> Any:
    """Return what a layer returns, but for the state of a model."""
    if not isinstance(result, tuple):
        return result
    return [part for part in result if not isinstance(part, eqx.nn.State)]


def _path(path: tuple) -> str:
    return jax.tree_util.keystr(path).lstrip(".")


def _shape(array: Any) -> str:
    return "x".join(map(str, array.shape)) or "scalar"


def lowered(function: Callable, *arguments: Any) -> jax.stages.Lowered:
    """A pure function traced for arguments of which only the shapes are needed."""

    def outputs(dynamic: PyTree) -> PyTree:
        return eqx.filter(function(*eqx.combine(dynamic, static)), eqx.is_array)

    dynamic, static = eqx.partition(arguments, is_array_or_shape)
    return jax.jit(outputs).lower(dynamic)


def operations(program: jax.stages.Lowered) -> float:
    """Floating-point operations of one call, by XLA's own count before it optimises."""
    analysis: Any = program.cost_analysis()
    return float(analysis["flops"])


def largest_rate(size: int = 1024, calls: int = 5) -> float:
    """Floating-point operations a second of a large float32 matrix product, measured now."""
    matrix = jnp.ones((size, size), jnp.float32)
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()
    seconds = []
    for _ in range(calls):
        started = time.perf_counter()
        product(matrix, matrix).block_until_ready()
        seconds.append(time.perf_counter() - started)
    return 2 * size**3 / min(seconds)
