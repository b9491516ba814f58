"""Every shape of the package, said once.

Dimension names: `pixels` = height x width of one flat image, `classes`, `batch` = the global batch,
`examples` = rows of a split, `steps` = optimizer steps.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32, Integer, Key, PyTree, UInt8

HostOrDevice = Array | np.ndarray


Image = Float[Array, " pixels"]
"""One flat image, scaled to [0, 1]: what a model is called on."""


Label = Integer[Array, ""]
"""The index of one example's class."""


Logits = Float[Array, " classes"]
"""Unnormalised log-probabilities of one example."""


Images = UInt8[HostOrDevice, "batch pixels"] | Float32[HostOrDevice, "batch pixels"]
"""Flat rows of features as the data hold them: pixels of 0 to 255, or any floats."""


ScaledImages = Float32[Array, "batch pixels"]
"""Flat images as a model is called on them: pixels in [0, 1], or the floats of the data."""


Labels = UInt8[HostOrDevice, " batch"] | Int32[HostOrDevice, " batch"]
"""Class indices: one byte each where there are at most 256 classes."""


Scalar = Float32[Array, ""]


Counter = Int32[Array, ""]


RandomKey = Key[Array, ""]


RandomKeys = Key[Array, " batch"]


def is_shape(leaf: Any) -> bool:
    """Whether a leaf is an array by its shape alone."""
    return isinstance(leaf, jax.ShapeDtypeStruct)


def is_array_or_shape(leaf: Any) -> bool:
    return eqx.is_array(leaf) or is_shape(leaf)


def is_trained(leaf: Any) -> bool:
    """Return whether a leaf is a parameter: a floating-point array, or one by its shape alone."""
    return eqx.is_inexact_array(leaf) or (is_shape(leaf) and jnp.issubdtype(leaf, jnp.inexact))


def named_leaves(tree: PyTree) -> list[tuple[str, Any]]:
    """Return (path, leaf) of each leaf: `layers[0].weight`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path).lstrip("."), leaf) for path, leaf in leaves]


def is_below(path: str, name: str) -> bool:
    """Return whether a path is that of `name` or of a part of it."""
    return path == name or path.startswith((f"{name}.", f"{name}["))


def strongly_typed(tree: PyTree) -> PyTree:
    """Return a tree of arrays without JAX's weak types, which would make a second trace."""
    return jax.tree.map(
        lambda leaf: jax.lax.convert_element_type(leaf, jnp.result_type(leaf)), tree
    )


def where_given(wanted: PyTree, tree: PyTree) -> PyTree:
    """Return a tree with None in place of each leaf that is None in the other tree."""
    return jax.tree.map(
        lambda one, leaf: None if one is None else leaf, wanted, tree, is_leaf=lambda x: x is None
    )
