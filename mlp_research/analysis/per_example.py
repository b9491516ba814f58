"""Gradients example by example: whole, their norms alone, clipped, and the noise they make.

The loss is the cross-entropy without smoothing. Randomness is off unless a key is given for each
example. With `microbatch`, so many examples are worked on at once: the memory is bounded, and the
results change by rounding only. All but `gradient_noise_scale` can be compiled.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
from jax.extend.core import get_opaque_trace_state
from jaxtyping import Array, Float, Integer, PyTree

from mlp_research.data.batches import Batch
from mlp_research.data.inputs import RawImages, scaled
from mlp_research.errors import ConfigError, Failure
from mlp_research.models import Model, mixes_examples
from mlp_research.models.base import Dense
from mlp_research.objectives import cross_entropy
from mlp_research.shapes import HostOrDevice, RandomKey, RandomKeys, Scalar


class NotFactoredError(Failure, TypeError):
    """A dense layer is used in a way that hides its inputs: which layer, and what to do."""


class ClippedGradient(eqx.Module):
    """The mean of the examples' clipped gradients, and the share of them that were clipped."""

    gradient: PyTree
    fraction: Scalar


@dataclasses.dataclass(frozen=True)
class NoiseScale:
    """How much the gradient of one example scatters about the true gradient G."""

    trace: float
    """Estimate of tr(Sigma), the variance of one example's gradient over all coordinates."""
    squared_norm: float
    """Estimate of |G|^2; where the noise is large, it may be negative."""

    @property
    def scale(self) -> float:
        """tr(Sigma) / |G|^2, in examples: the batch whose noise is as large as its gradient.

        Infinite where |G|^2 cannot be told from zero.
        """
        return self.trace / self.squared_norm if self.squared_norm > 0 else np.inf


def per_example_gradients(model: Model, batch: Batch, *, keys: RandomKeys | None = None) -> PyTree:
    """The gradient of each example's loss, with a leading axis: examples x parameters numbers."""
    model, examples = _prepared(model, batch, keys)
    return jax.vmap(lambda each: _gradient(model, each))(examples)


def per_example_norms(
    model: Model, batch: Batch, *, keys: RandomKeys | None = None, microbatch: int | None = None
) -> Float[Array, " batch"]:
    """The norm of each example's gradient by differentiating each: any model will do."""
    model, examples = _prepared(model, batch, keys)
    return _each(lambda each: optax.tree.norm(_gradient(model, each)), examples, microbatch)


def factored_norms(
    model: Model, batch: Batch, *, keys: RandomKeys | None = None, microbatch: int | None = None
) -> Float[Array, " batch"]:
    """The norm of each example's gradient, where no example has a gradient of its dense layers.

    The gradient of a dense layer's weight is sum_t d_t x_t^T over its inputs x_t, where d_t is the
    gradient of its output: its squared norm needs no more than the products of these vectors
    (Goodfellow 2015; Rochette et al. 2019 for weights used more than once). Other parameters are
    differentiated directly, and so are `eqx.nn.Linear` whose weight is no matrix, as in a stack of
    layers. Raises `NotFactoredError` where the inputs of a dense layer cannot be had.
    """
    model, examples = _prepared(model, batch, keys)
    return _each(lambda each: jnp.sqrt(_squared_norm(model, each)), examples, microbatch)


def mean_gradient(
    model: Model,
    batch: Batch,
    *,
    weights: Float[Array, " batch"] | None = None,
    keys: RandomKeys | None = None,
    microbatch: int | None = None,
) -> PyTree:
    """The gradient of the mean loss; with weights, of the mean of weight x loss."""
    model, examples = _prepared(model, batch, keys)

    @eqx.filter_grad
    def gradient(model: Model) -> Scalar:
        def loss(example: _Example) -> Scalar:
            return _loss(model, example)

        # Else the backward pass would keep what was computed of all examples.
        loss = loss if microbatch is None else jax.checkpoint(loss)
        losses = _each(loss, examples, microbatch)
        return losses.mean() if weights is None else (weights * losses).mean()

    return gradient(model)


def clipped_gradient(
    model: Model,
    batch: Batch,
    bound: float | Scalar,
    *,
    keys: RandomKeys | None = None,
    microbatch: int | None = None,
) -> ClippedGradient:
    """The mean of g / max(1, |g| / bound) over the examples' gradients g (Abadi et al. 2016).

    By factored norms and one weighted backward pass. Raises `ConfigError` for a number as a bound
    that is not above 0; a traced bound goes unchecked.
    """
    if isinstance(bound, float | int) and not bound > 0:
        raise ConfigError(f"the bound is {bound}: a gradient can be clipped at a norm > 0 only")
    norms = factored_norms(model, batch, keys=keys, microbatch=microbatch)
    weights = jnp.minimum(1, bound / norms)
    gradient = mean_gradient(model, batch, weights=weights, keys=keys, microbatch=microbatch)
    return ClippedGradient(gradient, (norms > bound).mean(dtype=jnp.float32))


def gradient_noise_scale(norms: Float[HostOrDevice, " batch"], norm_of_mean: Any) -> NoiseScale:
    """The simple noise scale (McCandlish et al. 2018, equation 2.9), in float64 on the host.

    From the norms of n examples' gradients and the norm of their mean. Both parts are unbiased
    (appendix A.1 with batches of 1 and of n); their ratio is not. Raises `ConfigError` for n < 2.
    """
    examples = len(norms)
    if examples < 2:
        raise ConfigError(f"{examples} gradient has no scatter: give the norms of at least 2")
    of_one = float((np.asarray(norms, np.float64) ** 2).mean())
    of_all = float(norm_of_mean) ** 2
    trace = (of_one - of_all) / (1 - 1 / examples)
    return NoiseScale(trace, (examples * of_all - of_one) / (examples - 1))


class _Example(eqx.Module):
    """All examples, and under `vmap` one of them."""

    image: RawImages
    label: Integer[Array, " batch"]
    key: RandomKeys | None


def _prepared(model: Model, batch: Batch, keys: RandomKeys | None) -> tuple[Model, _Example]:
    if mixes_examples(model, scaled(batch.images[0]), jr.key(0)):
        raise ConfigError(
            "an example has no gradient of its own in this model: in training its batch statistics "
            "join all examples of a batch. Use a model without them, such as one with "
            "--model.normalisation layer"
        )
    examples = _Example(jnp.asarray(batch.images), jnp.asarray(batch.labels), keys)
    return eqx.nn.inference_mode(model) if keys is None else model, examples


def _each(function: Callable[[_Example], Array], examples: _Example, microbatch: int | None) -> Any:
    if microbatch is None:
        return jax.vmap(function)(examples)
    if microbatch < 1:
        raise ConfigError(f"microbatch is {microbatch}: at least one example is worked on at once")
    return jax.lax.map(function, examples, batch_size=min(microbatch, len(examples.label)))


def _loss(model: Model, example: _Example) -> Scalar:
    logits = model(scaled(example.image), key=example.key)
    return cross_entropy(logits, example.label, jnp.float32(0))


def _gradient(model: Model, example: _Example) -> PyTree:
    return eqx.filter_grad(_loss)(model, example)


def _squared_norm(model: Model, example: _Example) -> Float[Array, ""]:
    """The squared norm of the gradient of one example."""
    dense, others = eqx.partition(model, _is_dense, is_leaf=_is_dense)
    trained, static = eqx.partition(others, eqx.is_inexact_array)
    named, structure = jax.tree_util.tree_flatten_with_path(dense, is_leaf=_is_dense)
    layers = [layer for _, layer in named]
    names = [jax.tree_util.keystr(path).lstrip(".") or "the model" for path, _ in named]

    def loss(tape: _Tape, trained: PyTree) -> Scalar:
        tapped = [_Tapped(layer, index, tape) for index, layer in enumerate(tape.shown)]
        parts = (structure.unflatten(tapped), trained, static)
        return _loss(eqx.combine(*parts, is_leaf=_is_dense), example)

    def untapped(shown: list[eqx.nn.Linear]) -> Scalar:
        tapes.append(_Tape(layers, shown, names, None))
        return loss(tapes[0], trained)

    def tapped(taps: list[Array], trained: PyTree) -> tuple[Scalar, list[Array]]:
        tape = _Tape(layers, layers, names, taps)
        return loss(tape, trained), tape.inputs

    tapes: list[_Tape] = []
    _check_unread(jax.make_jaxpr(untapped)(layers).jaxpr, layers, names)
    users, shapes = tapes[0].users, tapes[0].shapes
    taps = [jnp.zeros(shape.shape, shape.dtype) for shape in shapes]
    (deltas, rest), inputs = jax.grad(tapped, argnums=(0, 1), has_aux=True)(taps, trained)
    squares = [optax.tree.norm(rest, squared=True)]
    for index in sorted(set(users)):
        uses = [number for number, user in enumerate(users) if user == index]
        deltas_of, inputs_of = (
            jnp.concatenate([jnp.atleast_2d(vectors[number]) for number in uses])
            for vectors in (deltas, inputs)
        )
        squares += _layer_squares(deltas_of, inputs_of, layers[index].bias is not None)
    return jnp.maximum(sum(squares), 0)


def _layer_squares(
    deltas: Float[Array, "rows outputs"], inputs: Float[Array, "rows inputs"], has_bias: bool
) -> list[Float[Array, ""]]:
    """|sum_t d_t x_t^T|^2 over the rows t, and |sum_t d_t|^2 for a bias.

    The first is sum_ts (d_t . d_s)(x_t . x_s). With many rows these products need more room than
    the sum of d_t x_t^T itself (Bu et al. 2022, arXiv:2205.10683), which is then taken.
    """
    (rows, outputs), size = deltas.shape, inputs.shape[1]
    if 2 * rows**2 <= outputs * size:
        weight = ((deltas @ deltas.T) * (inputs @ inputs.T)).sum()
    else:
        weight = jnp.square(deltas.T @ inputs).sum()
    return [weight, jnp.square(deltas.sum(axis=0)).sum()] if has_bias else [weight]


def _is_dense(node: Any) -> bool:
    """Whether a node is known to compute W x + b: subclasses may compute what they like."""
    if type(node) in (eqx.nn.Linear, Dense):
        return eqx.is_inexact_array(node.weight) and node.weight.ndim == 2
    return isinstance(node, _Tapped)


class _Tape:
    """What goes in and out at the dense layers while the loss of one example is traced."""

    def __init__(
        self, layers: list[eqx.nn.Linear], shown: list[eqx.nn.Linear], names: list[str], taps: Any
    ):
        """`layers` compute; `shown` hold the weights that the model finds in their place."""
        self.layers, self.shown, self.names, self.taps = layers, shown, names, taps
        self.users: list[int] = []
        self.inputs: list[Array] = []
        self.shapes: list[jax.ShapeDtypeStruct] = []
        self._trace = get_opaque_trace_state()

    def play(self, layer: "_Tapped", inputs: Array, compute: Callable[..., Array]) -> Array:
        """The layer's output plus a tap, a zero whose gradient is that of the output."""
        name, shown = self.names[layer.index], self.shown[layer.index]
        if get_opaque_trace_state() != self._trace:
            raise NotFactoredError(
                f"{name}: this dense layer is called inside a vmap, scan, cond, jit or checkpoint "
                "of the model's own, which hides its inputs: take per_example_norms, or write "
                "layer.rows(rows) for jax.vmap(layer)(rows)"
            )
        if layer.weight is not shown.weight or layer.bias is not shown.bias:
            raise NotFactoredError(_TOUCHED.format(name))
        outputs = compute(self.layers[layer.index], inputs)
        tap = 0 if self.taps is None else self.taps[len(self.users)]
        self.users.append(layer.index)
        self.inputs.append(inputs)
        self.shapes.append(jax.ShapeDtypeStruct(outputs.shape, outputs.dtype))
        return outputs + tap


class _Tapped(Dense):
    """A dense layer that plays through a tape."""

    index: int = eqx.field(static=True)
    tape: _Tape = eqx.field(static=True)

    def __init__(self, layer: eqx.nn.Linear, index: int, tape: _Tape):
        self.weight, self.bias, self.use_bias = layer.weight, layer.bias, layer.use_bias
        self.in_features, self.out_features = layer.in_features, layer.out_features
        self.index, self.tape = index, tape

    def __call__(self, x: Array, *, key: RandomKey | None = None) -> Array:
        return self.tape.play(self, x, lambda layer, x: layer(x))

    def rows(self, rows: Float[Array, "rows inputs"]) -> Float[Array, "rows outputs"]:
        return self.tape.play(self, rows, Dense.rows)


_TOUCHED = (
    "{}: the model uses the weights of this dense layer other than by calling it, so that inputs "
    "and outputs alone do not make its gradient: take per_example_norms"
)


def _check_unread(jaxpr: Any, layers: list[eqx.nn.Linear], names: list[str]) -> None:
    """Raises `NotFactoredError` where a trace uses the weights that the model is shown."""
    used = {id(variable) for equation in jaxpr.eqns for variable in equation.invars}
    variables = iter(jaxpr.invars)
    for layer, name in zip(layers, names, strict=True):
        if any(id(next(variables)) in used for _ in jax.tree.leaves(layer)):
            raise NotFactoredError(_TOUCHED.format(name))
