"""Derivatives of derivatives, timed: of a scalar function, and of logits by an image's pixels."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from benchmarks.timing import Measured, in_turn, medians, readable
from jaxtyping import Array, Float

from mlp_research.models import Model
from mlp_research.shapes import Image

SCALAR_CALLS = 100
"""Calls of a scalar function in one measurement: one alone takes microseconds."""
POINT = 0.5
"""Where tanh is differentiated."""
Row = tuple[str, ...]


def scalar(repeats: int) -> tuple[list[Row], Measured]:
    """(a row for each order: value, closed form, error, operations; the times) of tanh at 0.5."""
    t = math.tanh(POINT)
    s = 1 - t * t
    known = [t, s, -2 * t * s, s * (6 * t * t - 2), s * t * (16 - 24 * t * t)]
    function, point, rows = jax.lax.tanh, jnp.float32(POINT), []
    candidates: dict[str, Callable[[], Any]] = {}
    for order, expected in enumerate(known):
        value, operations = float(function(point)), len(jax.make_jaxpr(function)(point).eqns)
        error = abs(value / expected - 1)
        name = f"derivative {order}" if order else "the function"
        rows.append((name, f"{value:.7f}", f"{expected:.7f}", f"{error:.1e}", str(operations)))
        compiled = jax.jit(function)
        candidates[name] = lambda f=compiled: [f(point) for _ in range(SCALAR_CALLS)]
        function = jax.grad(function)
    times = {
        name: [seconds / SCALAR_CALLS for seconds in measured]
        for name, measured in in_turn(candidates, repeats).items()
    }
    plain, *_, last = medians(times)
    grown = f"from {rows[0][-1]} operation to {rows[-1][-1]}"
    return rows, Measured(
        "tanh and its derivatives, one call",
        times,
        "the function",
        f"grad taken four times of tanh at {POINT} agrees with the closed form to {rows[-1][3]}. "
        f"The program grows {grown}; compiled, a call takes {readable(last)} in place of "
        f"{readable(plain)}.",
    )


def jacobian(model: Model, image: Image, repeats: int) -> Measured:
    """The derivative of each logit by each pixel of one image, in reverse and in forward mode."""
    functions = {
        "grad of one logit": jax.jit(jax.grad(lambda image: model(image)[0])),
        "jacrev": jax.jit(jax.jacrev(model)),
        "jacfwd": jax.jit(jax.jacfwd(model)),
    }
    times = in_turn({name: lambda f=f: f(image) for name, f in functions.items()}, repeats)
    _, reverse, forward = medians(times)
    error = relative_difference(functions["jacfwd"](image), functions["jacrev"](image))
    classes, pixels = functions["jacrev"](image).shape
    return Measured(
        f"Jacobian, {classes} logits by {pixels} pixels",
        times,
        "jacrev",
        f"The Jacobian of {classes} logits by {pixels} pixels takes {readable(reverse)} by jacrev, "
        f"a row for each logit, and {readable(forward)} ({forward / reverse:.3g} times as long) by "
        f"jacfwd, a column for each pixel. They differ by {error:.1e} of the largest entry.",
    )


def hessian(relu: Model, tanh: Model, image: Image, repeats: int) -> Measured:
    """Second derivatives of the logits by the pixels: of ReLU none, of tanh, and along a line."""
    direction = jnp.cos(jnp.arange(len(image), dtype=jnp.float32))
    matrices = {"ReLU": jax.jit(jax.hessian(relu)), "tanh": jax.jit(jax.hessian(tanh))}
    product = jax.jit(lambda image: hessian_product(tanh, image, direction))
    candidates = {name: lambda f=f: f(image) for name, f in matrices.items()}
    times = in_turn(candidates | {"tanh, times a vector": lambda: product(image)}, repeats)
    _, whole, line = medians(times)
    flat, curved = matrices["ReLU"](image), matrices["tanh"](image)
    largest, asymmetry = jnp.abs(curved).max(), relative_difference(curved, curved.mT)
    error = relative_difference(product(image), curved @ direction)
    return Measured(
        f"Hessian, {' x '.join(map(str, curved.shape))}",
        times,
        "tanh",
        f"The largest entry of the logits' Hessian is {jnp.abs(flat).max():.3g} with ReLU, which "
        f"is linear in pieces, and {largest:.3g} with tanh, where it is symmetric to "
        f"{asymmetry:.1e} of it. Its product with a vector takes {readable(line)} by jvp of "
        f"jacrev in place of {readable(whole)} for the matrix, and differs by {error:.1e}.",
    )


def hessian_product(model: Model, image: Image, direction: Image) -> Float[Array, "classes pixels"]:
    """Each logit's Hessian times a direction, without a Hessian: the Jacobian's change along it."""
    return jax.jvp(jax.jacrev(model), (image,), (direction,))[1]


def relative_difference(found: Float[Array, "*shape"], expected: Float[Array, "*shape"]) -> float:
    """The largest difference as a share of the largest entry."""
    return float(jnp.abs(found - expected).max() / jnp.abs(expected).max())
