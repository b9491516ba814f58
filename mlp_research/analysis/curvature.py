"""The curvature of the mean loss, by products with vectors: no matrix of it is ever formed.

Two matrices: the Hessian of the mean cross-entropy, and its generalised Gauss-Newton part
J^T H_L J, which drops the model's own curvature and is positive semidefinite. Parameters, vectors
and products are pytrees like the model. Lanczos' algorithm (1950) is matfree's.
"""

from collections.abc import Callable
from typing import Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.tree_util import Partial
from jaxtyping import Array, Float, PyTree
from matfree import decomp, stochtrace

from mlp_research.data.batches import Batch
from mlp_research.errors import ConfigError, Failure
from mlp_research.models import Model, parameter_mask
from mlp_research.objectives import cross_entropy
from mlp_research.shapes import RandomKey

FIRST_DEPTH = 30
"""Lanczos steps of the first attempt at eigenvalues; each further one takes twice as many."""

Matrix = Literal["hessian", "gauss-newton"]
MatrixProduct = Callable[[PyTree], PyTree]
"""From a vector to its product with a symmetric matrix; the arrays of one that is a pytree are
arguments of what is compiled here, which so serves every state of a model."""


class CurvatureError(Failure, ArithmeticError):
    """A curvature that cannot be had: not finite, or not to the tolerance."""


def partition(model: Model) -> tuple[PyTree, PyTree]:
    """(parameters, all else) of a model, randomness off. Parameters are its inexact arrays."""
    return eqx.partition(eqx.nn.inference_mode(model), parameter_mask(model))


def count(like: PyTree) -> int:
    """The number of parameters."""
    return sum(leaf.size for leaf in jax.tree.leaves(like))


def logits(parameters: PyTree, static: PyTree, batch: Batch) -> Float[Array, "batch classes"]:
    """The logits of a model in two parts as `partition` makes them."""
    model = eqx.combine(parameters, static)
    # As the steps scale pixels, but in float64 where the parameters are.
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(parameters))
    images = jnp.asarray(batch.images, dtype)
    images = images / 255 if batch.images.dtype == np.uint8 else images
    return jax.vmap(lambda image: model(image))(images)


def mean_loss(parameters: PyTree, static: PyTree, batch: Batch) -> Float[Array, ""]:
    """Mean cross-entropy in nats, without the smoothing of labels and the decay of training."""
    return _mean_cross_entropy(logits(parameters, static, batch), batch)


def hessian_vector_product(
    model: Model, batch: Batch, vector: PyTree, *, microbatch: int | None = None
) -> PyTree:
    """The Hessian of the mean loss times a vector (Pearlmutter 1994), forward over reverse.

    Where the loss has kinks (ReLU), the Hessian almost everywhere. With `microbatch`, only so many
    examples are in memory at once; it must divide the batch.
    """
    parameters, static = partition(model)

    def product(part: Batch) -> PyTree:
        gradient = jax.grad(lambda parameters: mean_loss(parameters, static, part))
        return jax.jvp(gradient, (parameters,), (vector,))[1]

    return _mean_over_parts(product, vector, batch, microbatch)


def gauss_newton_vector_product(
    model: Model, batch: Batch, vector: PyTree, *, microbatch: int | None = None
) -> PyTree:
    """J^T H_L J times a vector (Schraudolph 2002): J of the logits, H_L of the mean loss at them.

    `microbatch` as for `hessian_vector_product`.
    """
    parameters, static = partition(model)

    def product(part: Batch) -> PyTree:
        def outputs(parameters: PyTree) -> Float[Array, "batch classes"]:
            return logits(parameters, static, part)

        gradient = jax.grad(lambda logits: _mean_cross_entropy(logits, part))
        here, pushed = jax.jvp(outputs, (parameters,), (vector,))
        curved = jax.jvp(gradient, (here,), (pushed,))[1]
        return jax.vjp(outputs, parameters)[1](curved)[0]

    return _mean_over_parts(product, vector, batch, microbatch)


PRODUCTS = {"hessian": hessian_vector_product, "gauss-newton": gauss_newton_vector_product}


class Curvature(eqx.Module):
    """A matrix of a model's mean loss over a batch, as a function of a vector."""

    model: Model
    batch: Batch
    matrix: Matrix = eqx.field(static=True, default="hessian")
    microbatch: int | None = eqx.field(static=True, default=None)
    """Examples in memory at once; by default all."""

    @property
    def parameters(self) -> PyTree:
        """What a vector is like."""
        return partition(self.model)[0]

    def __call__(self, vector: PyTree) -> PyTree:
        product = PRODUCTS[self.matrix]
        return product(self.model, self.batch, vector, microbatch=self.microbatch)


class Eigenpairs(eqx.Module):
    """The largest eigenvalues of a matrix, falling, with what tells how good they are."""

    values: Float[Array, " k"]
    vectors: PyTree[Float[Array, "k ..."]]
    """Of length one; each leaf is like the parameters', with a leading axis."""
    residuals: Float[Array, " k"]
    """||A v - l v|| / |l|, from the product itself; an eigenvalue lies within |l| times it."""
    depth: int = eqx.field(static=True)
    """Lanczos steps that were needed."""


def top_eigenvalues(
    product: MatrixProduct,
    like: PyTree,
    k: int,
    *,
    key: RandomKey,
    tolerance: float = 1e-4,
    deepest: int = 480,
) -> Eigenpairs:
    """The k algebraically largest eigenvalues, the first of which is called sharpness.

    Lanczos with full reorthogonalisation, whose depth doubles until all residuals are at most
    `tolerance`, and an eigenvalue's own error about the square of it. Of a multiple eigenvalue one
    copy is found. Raises `CurvatureError` where `deepest`, the most vectors in memory, is too few.
    """
    size = count(like)
    if not 1 <= k <= size:
        raise ConfigError(f"{k} eigenvalues of {size} parameters: ask for 1 to {size}")
    deepest = min(max(deepest, k), size)
    depth = min(max(FIRST_DEPTH, 2 * k), deepest)
    pairs = _lanczos_pairs(product, like, key, k, depth)
    while np.max(pairs.residuals) > tolerance and depth < deepest:
        depth = min(2 * depth, deepest)
        pairs = _lanczos_pairs(product, like, key, k, depth)
    _check_finite(pairs.residuals)
    worst = int(np.argmax(pairs.residuals))
    if pairs.residuals[worst] <= tolerance:
        return pairs
    raise CurvatureError(
        f"eigenvalue {worst + 1} of {k} is {pairs.values[worst]:.3g}, its residual "
        f"{pairs.residuals[worst]:.2g} after {depth} Lanczos steps, not {tolerance:g}: allow more "
        "steps or a larger tolerance; if it is zero but for rounding, ask for fewer eigenvalues"
    )


class Estimate(eqx.Module):
    """A mean over random probes and its standard error."""

    mean: Float[Array, ""]
    standard_error: Float[Array, ""]

    @classmethod
    def of(cls, samples: Float[Array, " probes"]) -> "Estimate":
        return cls(samples.mean(), samples.std(ddof=1) / jnp.sqrt(1.0 * len(samples)))


def trace(product: MatrixProduct, like: PyTree, *, key: RandomKey, probes: int = 32) -> Estimate:
    """The trace of a matrix by as many products as probes, random signs (Hutchinson 1990)."""
    samples = _over_probes(_quadratic_form, product, like, key, probes)
    _check_finite(samples)
    return Estimate.of(samples)


class SpectralDensity(eqx.Module):
    """The eigenvalues' distribution as weighted points, one set for each probe."""

    nodes: Float[Array, "probes depth"]
    weights: Float[Array, "probes depth"]
    """Share of all eigenvalues at each node; each probe's add up to one."""

    def moment(self, order: int) -> Estimate:
        """The mean of the eigenvalues' powers: order 1 is trace / parameters."""
        return Estimate.of((self.weights * self.nodes**order).sum(axis=1))

    def smoothed(self, grid: Float[Array, " points"], width: float) -> Float[Array, " points"]:
        """The density on a grid, each node spread to a Gaussian of this standard deviation."""
        distances = (grid[:, None, None] - self.nodes[None]) / width
        bells = jnp.exp(-(distances**2) / 2) / (width * jnp.sqrt(2 * jnp.pi))
        return (self.weights[None] * bells).sum(axis=2).mean(axis=1)


def spectral_density(
    product: MatrixProduct, like: PyTree, *, key: RandomKey, probes: int = 4, depth: int = 64
) -> SpectralDensity:
    """Stochastic Lanczos quadrature (Lin, Saad and Yang 2016; Ghorbani et al. 2019).

    The extreme nodes are close to the extreme eigenvalues, and never beyond them.
    """
    if not 1 <= depth <= count(like):
        raise ConfigError(f"depth is {depth}: it must be 1 to {count(like)}, the parameters")
    nodes, weights = _over_probes(Partial(_quadrature, depth), product, like, key, probes)
    _check_finite(nodes)
    return SpectralDensity(nodes, weights)


@eqx.filter_jit
def _lanczos_pairs(
    product: MatrixProduct, like: PyTree, key: RandomKey, k: int, depth: int
) -> Eigenpairs:
    """The k largest Ritz pairs of a Krylov space."""
    flat, unravel = ravel_pytree(like)

    def multiply(vector: Float[Array, " parameters"]) -> Float[Array, " parameters"]:
        return ravel_pytree(product(unravel(vector)))[0]

    start = jr.normal(key, flat.shape, flat.dtype)
    basis, values, small_vectors = _tridiagonal(multiply, start, depth)
    values = values[::-1][:k]
    vectors = small_vectors[:, ::-1][:, :k].T @ basis
    vectors = vectors / jnp.linalg.norm(vectors, axis=1, keepdims=True)
    errors = jax.lax.map(multiply, vectors) - values[:, None] * vectors
    residuals = jnp.linalg.norm(errors, axis=1) / jnp.abs(values)
    return Eigenpairs(values, jax.vmap(unravel)(vectors), residuals, depth)


_quadratic_form = stochtrace.monte_carlo_trace()


def _quadrature(depth: int, product: MatrixProduct, start: PyTree) -> tuple[Array, Array]:
    """(nodes, weights) of one probe."""
    _, nodes, small_vectors = _tridiagonal(product, start, depth)
    return nodes, small_vectors[0] ** 2


def _tridiagonal(product: MatrixProduct, start: PyTree, depth: int) -> tuple[PyTree, Array, Array]:
    """(Lanczos vectors, eigenvalues of the tridiagonal matrix rising, its eigenvectors)."""
    lanczos = decomp.tridiag_sym(depth, reortho="full", custom_vjp=False)
    basis, tridiagonal, *_ = lanczos(product, start)
    return basis, *jnp.linalg.eigh(tridiagonal)


@eqx.filter_jit
def _over_probes(
    function: Callable, product: MatrixProduct, like: PyTree, key: RandomKey, probes: int
) -> PyTree[Float[Array, "probes ..."]]:
    """A function of the product and random signs, one probe after the other: memory for one."""
    if probes < 2:
        raise ConfigError(f"probes is {probes}: a standard error needs at least 2")
    sample = stochtrace.sampler_signs(like, num=1)

    def at_probe(key: RandomKey) -> PyTree:
        return function(product, jax.tree.map(lambda leaf: leaf[0], sample(key)))

    return jax.lax.map(at_probe, jr.split(key, probes))


def _mean_cross_entropy(logits: Float[Array, "batch classes"], batch: Batch) -> Float[Array, ""]:
    labels, smoothing = jnp.asarray(batch.labels), jnp.float32(0)
    return jax.vmap(cross_entropy, in_axes=(0, 0, None))(logits, labels, smoothing).mean()


def _mean_over_parts(
    product: Callable[[Batch], PyTree], like: PyTree, batch: Batch, microbatch: int | None
) -> PyTree:
    """The mean of the products over a batch's equal parts, one part after the other."""
    if microbatch is None:
        return product(batch)
    examples = len(batch.labels)
    if microbatch < 1 or examples % microbatch:
        raise ConfigError(
            f"{examples} examples cannot be taken {microbatch} at a time: use a divisor of them"
        )
    shape = (examples // microbatch, microbatch)
    parts = jax.tree.map(lambda leaf: jnp.reshape(leaf, (*shape, *leaf.shape[1:])), batch)

    def add(total: PyTree, part: Batch) -> tuple[PyTree, None]:
        return jax.tree.map(jnp.add, total, product(part)), None

    total, _ = jax.lax.scan(add, jax.tree.map(jnp.zeros_like, like), parts)
    return jax.tree.map(lambda leaf: leaf / shape[0], total)


def _check_finite(values: Array) -> None:
    if not np.isfinite(values).all():
        raise CurvatureError(
            "the curvature is not finite: the parameters or the loss are not, or the matrix is zero"
        )
