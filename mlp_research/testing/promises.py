"""Promises: functions from a thing under test to a fault or None, and a report of all faults."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PyTree

from mlp_research.errors import ConfigError
from mlp_research.models import parameters_of, without_state

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
    name: str,
    promises: Mapping[str, Callable[[Subject], Fault]],
    subject: Subject,
    *,
    without: Collection[str] = (),
    foundations: int = 1,
) -> None:
    """Raise `ContractBroken` with all that is broken. A promise that raises is broken too.

    The others stand on the first, or on the first `foundations`: where one of these is broken, what
    comes after is not looked at. Raise `ConfigError` where there is no promise of a name in
    `without`, the promises that are left out.
    """
    unknown = [left_out for left_out in without if left_out not in promises]
    if unknown:
        raise ConfigError(
            f"without names {', '.join(unknown)}, which is no promise of {name}: the promises are "
            f"{', '.join(promises)}"
        )
    first = list(promises)[:foundations]
    broken: dict[str, str] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a promise that concerns one turns it into an error
        for promise, function in promises.items():
            fault = None if promise in without else _fault_of(function, subject)
            if fault:
                broken[promise] = fault
                if promise in first:
                    break
    if broken:
        raise ContractBroken(name, broken, len(promises) - len(set(without)))


def _fault_of(promise: Callable[[Subject], Fault], subject: Subject) -> Fault:
    """Return what a promise says, or what it raises; a `ConfigError` speaks for itself."""
    try:
        return promise(subject)
    except Exception as error:
        kind = "" if isinstance(error, ConfigError) else f"{type(error).__name__}: "
        return f"{kind}{' '.join(str(error).split()):.600}"


def compiled_quickly(function: Callable, *, donate: str = "none") -> Callable:
    """`eqx.filter_jit`, but unoptimised: a program of a check runs seldom."""
    jit: Any = eqx.filter_jit  # whose type knows no options
    return jit(function, donate=donate, compiler_options={"xla_backend_optimization_level": 0})


def named_arrays(tree: PyTree) -> dict[str, Any]:
    """The arrays of a pytree by their paths."""
    leaves = jax.tree_util.tree_flatten_with_path(eqx.filter(tree, eqx.is_array))[0]
    return {_named(path): _readable(leaf) for path, leaf in leaves}


def _readable(leaf: Any) -> Any:
    """Random keys as the numbers they are made of."""
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jr.key_data(leaf) if is_key else leaf


def named_parameters(model: PyTree) -> dict[str, np.ndarray]:
    """The parameters of a model by their paths, on the host; its state is none of them."""
    arrays = named_arrays(without_state(parameters_of(model)))
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


def other_traced_numbers(part: Any) -> Iterator[tuple[str, Any]]:
    """Return (path, the part with another value there) for the traced numbers of a traced part.

    Each gets half its value, and 0.3, as half of a tiny number may be lost in rounding.
    """
    for path, number in named_arrays(part).items():
        for value in dict.fromkeys((0.5 * float(number) or 0.3, 0.3)):
            if np.isfinite(value) and value != float(number):
                yield path, _with_number(part, path, value)


def _with_number(part: Any, path: str, value: float) -> Any:
    return jax.tree_util.tree_map_with_path(
        lambda place, leaf: jnp.float32(value) if _named(place) == path else leaf, part
    )


def _named(path: Any) -> str:
    return jax.tree_util.keystr(path).lstrip(".")


def unheeded(
    part: Any, outcome: Callable[[Any], PyTree], but: Callable[[str], bool] = lambda path: False
) -> Fault:
    """Say which traced numbers of a part, `but` for some, make no difference to its outcome."""
    before, heeded = outcome(part), {}
    for path, other in other_traced_numbers(part):
        if not but(path) and not heeded.get(path):
            heeded[path] = trees_differ("", before, "", outcome(other)) is not None
    deaf = [path for path, heard in heeded.items() if not heard]
    return f"another {', '.join(deaf)} makes no difference: is it read from self?" if deaf else None


def with_other_numbers(part: Any, factor: float) -> Any:
    """Return a traced part with all its traced numbers multiplied by a factor."""
    return jax.tree.map(lambda number: number * jnp.float32(factor), part)
