"""Promises: functions from a thing under test to a fault or None, and a report of all faults."""

import warnings
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PyTree

Fault = str | None
"""What is wrong, in words, or None where the promise is kept."""

Subject = TypeVar("Subject")


class ContractBroken(AssertionError):
    """Every broken promise of a thing, by name; `broken` maps each name to its explanation."""

    def __init__(self, subject: str, broken: Mapping[str, str], promises: int):
        self.broken = dict(broken)
        lines = [f"  {name}: {explanation}" for name, explanation in self.broken.items()]
        head = f"{subject} breaks {len(lines)} of {promises} promises:"
        super().__init__("\n".join([head, *lines]))


def check_promises(
    name: str, promises: Mapping[str, Callable[[Subject], Fault]], subject: Subject
) -> None:
    """Raises `ContractBroken` with all that is broken. A promise that raises is broken too.

    The others stand on the first: where it is broken, they are not looked at.
    """
    broken: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a promise that concerns one turns it into an error
        for promise, function in promises.items():
            try:
                fault = function(subject)
            except Exception as error:
                fault = f"{type(error).__name__}: {' '.join(str(error).split()):.400}"
            if fault:
                broken[promise] = fault
                if len(broken) == 1 and promise == next(iter(promises)):
                    break
    if broken:
        raise ContractBroken(name, broken, len(promises))


def compiled_quickly(function: Callable, *, donate: str = "none") -> Callable:
    """`eqx.filter_jit`, but unoptimised: a program of a check runs seldom."""
    jit: Any = eqx.filter_jit  # whose type knows no options
    return jit(function, donate=donate, compiler_options={"xla_backend_optimization_level": 0})


def named_arrays(tree: PyTree) -> dict[str, Any]:
    """The arrays of a pytree by their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(eqx.filter(tree, eqx.is_array))[0]
    return {jax.tree_util.keystr(path).lstrip("."): _readable(leaf) for path, leaf in leaves}


def _readable(leaf: Any) -> Any:
    """Random keys as the numbers they are made of."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jr.key_data(leaf) if is_key else leaf


def parameters_of(tree: PyTree) -> dict[str, np.ndarray]:
    """The floating-point arrays of a pytree by their paths, on the host."""
    arrays = named_arrays(eqx.filter(tree, eqx.is_inexact_array))
    return {path: np.asarray(leaf) for path, leaf in arrays.items()}


def not_finite(kind: str, tree: PyTree) -> Fault:
    faults = [path for path, leaf in named_arrays(tree).items() if not np.isfinite(leaf).all()]
    return f"the {kind} of {', '.join(faults)} is not finite" if faults else None


def differs(one_name: str, one: Any, other_name: str, other: Any) -> Fault:
    """Whether two arrays differ by more than rounding, and where most."""
    one, other = np.asarray(one), np.asarray(other)
    if one.shape != other.shape:
        return f"{one_name} its shape is {one.shape}, {other_name} {other.shape}"
    scale = np.abs(other).max(initial=1.0)
    if np.allclose(one, other, 1e-4, 1e-5 * scale, equal_nan=True):
        return None
    most = np.unravel_index(np.argmax(np.abs(one - other)), one.shape)
    place = f"[{', '.join(map(str, most))}]"
    return f"{one_name} {place} is {one[most]:.5g}, {other_name} {other[most]:.5g}"


def trees_differ(one_name: str, one: PyTree, other_name: str, other: PyTree) -> Fault:
    """The first array in which two trees of one structure differ by more than rounding."""
    others = named_arrays(other)
    for path, leaf in named_arrays(one).items():
        fault = differs(f"in {path} {one_name}", leaf, other_name, others[path])
        if fault:
            return fault
    return None


def bits_differ(one: PyTree, other: PyTree) -> Fault:
    """The first array of two trees of one structure that does not hold the same bits."""
    others = named_arrays(other)
    for path, leaf in named_arrays(one).items():
        if _bits(leaf) != _bits(others[path]):
            return f"{path} is {short(others[path])} and was {short(leaf)}"
    return None


def _bits(leaf: Any) -> tuple[str, tuple[int, ...], bytes]:
    array = np.asarray(leaf)
    return str(array.dtype), array.shape, array.tobytes()


def short(values: Any) -> str:
    """An array's first numbers."""
    shown = ", ".join(f"{value:.4g}" for value in np.ravel(values)[:4])
    return f"[{shown}{', ...' if values.size > 4 else ''}]"
