"""What says that arrays are those that were saved: path, dtype, shape and CRC-32 of each."""

import json
import zlib
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PyTree

from mlp_research.shapes import is_shape
from mlp_research.system import processes


def by_path(tree: PyTree) -> dict[str, Any]:
    """Path -> leaf: all that is saved. What in a tree holds no array cannot make it not fit."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def fingerprint(tree: PyTree) -> dict[str, list]:
    """Path -> [dtype, shape, CRC-32 of the bytes] of each array; shapes alone have no CRC-32."""
    return {path: described(leaf) for path, leaf in by_path(tree).items()}


def described(leaf: Any) -> list:
    """Return [dtype, shape, CRC-32 of the bytes] of an array; a shape alone has no CRC-32."""
    known = [str(leaf.dtype), list(leaf.shape)]
    if is_shape(leaf):
        return known
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jr.key_data(leaf)
    return [*known, zlib.crc32(np.ascontiguousarray(processes.on_host(leaf)).tobytes())]


def differences(saved: dict[str, list], wanted: dict[str, list]) -> list[str]:
    """One line for each path at which dtype or shape are not those that are wanted."""
    return [
        f"{path}: saved {_short(saved.get(path))}, wanted {_short(wanted.get(path))}"
        for path in sorted(saved.keys() | wanted.keys())
        if (saved.get(path) or [])[:2] != wanted.get(path)
    ]


def _short(described: list | None) -> str:
    return f"{described[0]}{described[1]}" if described else "nothing"


def crc32_of_json(value: dict) -> int:
    """The CRC-32 of a value as JSON, whatever the order of its names."""
    return zlib.crc32(json.dumps(value, sort_keys=True).encode())
