"""What every model is made of: the interface, the config's base, initialisation, dropout keys."""

import abc
from collections.abc import Callable
from typing import Any, Literal, Protocol, get_args, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float

from mlp_research.models.state import BATCH
from mlp_research.parts import Part
from mlp_research.shapes import RandomKey


@runtime_checkable
class Model(Protocol):
    """A pytree called on one flat image in [0, 1]; it returns the logits of its classes.

    `key` is needed only in training mode and only by models with randomness. `eqx.nn.MLP` is one.
    """

    def __call__(self, image: Array, /, *, key: RandomKey | None = None) -> Array: ...


class ModelConfig(Part, abc.ABC, frozen=True):
    """An architecture as plain numbers; `build` makes the model."""

    @abc.abstractmethod
    def build(self, image_shape: tuple[int, ...], classes: int, *, key: RandomKey) -> Any:
        """Return a new model for examples of this shape, which it is given flat.

        A model with state is made by `eqx.nn.make_with_state`, and returned as (model, state).
        """


Activation = Literal["relu", "gelu", "silu", "tanh"]

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": jax.nn.relu,
    "gelu": jax.nn.gelu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}
assert set(ACTIVATIONS) == set(get_args(Activation))


Normalisation = Literal["none", "layer", "rms"]
Norm = eqx.nn.Identity | eqx.nn.LayerNorm | eqx.nn.RMSNorm


def norm_layer(kind: Normalisation, size: int) -> Norm:
    """Layer norm (Ba et al. 2016), or RMS norm, which has no bias (Zhang and Sennrich 2019)."""
    match kind:
        case "none":
            return eqx.nn.Identity()
        case "layer":
            return eqx.nn.LayerNorm(size)
        case "rms":
            return eqx.nn.RMSNorm(size, use_bias=False)


class BatchNorm(eqx.nn.StatefulLayer):
    """Batch normalisation (Ioffe and Szegedy 2015), over the global batch.

    In training by mean and variance of the batch, in evaluation by their running means. Written so
    that XLA rounds it alike in each program, which `eqx.nn.BatchNorm` is not: with that, members on
    several CPU devices are their single runs to rounding only.
    """

    weight: Float[Array, " size"]
    bias: Float[Array, " size"]
    running: eqx.nn.StateIndex
    """Running mean and variance."""
    momentum: float
    """What they keep in each step."""
    epsilon: float
    inference: bool

    def __init__(self, size: int, *, momentum: float = 0.9, epsilon: float = 1e-5):
        self.weight, self.bias = jnp.ones(size), jnp.zeros(size)
        self.running = eqx.nn.StateIndex((jnp.zeros(size), jnp.ones(size)))
        self.momentum, self.epsilon, self.inference = momentum, epsilon, False

    def __call__(
        self, x: Float[Array, " size"], state: eqx.nn.State, /
    ) -> tuple[Float[Array, " size"], eqx.nn.State]:
        mean, variance = state.get(self.running)
        centred = x - mean
        if not self.inference:
            batch_mean = jax.lax.pmean(x, BATCH)
            centred = x - batch_mean
            batch_variance = jax.lax.pmean(jnp.square(centred), BATCH)
            kept, new = self.momentum, 1 - self.momentum
            running = kept * mean + new * batch_mean, kept * variance + new * batch_variance
            state, variance = state.set(self.running, running), batch_variance
        scale = self.weight * jax.lax.rsqrt(variance + self.epsilon)
        return centred * scale + self.bias, state


class Dense(eqx.nn.Linear):
    """W x + b of one vector, or of each row of a matrix."""

    def rows(self, rows: Float[Array, "rows inputs"]) -> Float[Array, "rows outputs"]:
        """`jax.vmap(self)(rows)`, but its gradient takes half the time on a CPU."""
        outputs = rows @ self.weight.T
        return outputs if self.bias is None else outputs + self.bias[None]


def he_linear(inputs: int, outputs: int, *, gain: float = 2, key: RandomKey) -> Dense:
    """A dense layer with weights of variance gain / inputs and zero bias.

    A gain of 2 keeps the second moment through ReLU (He et al. 2015, eq. 10), 1 where no
    nonlinearity follows.
    """
    structure_key, weight_key = jr.split(key)
    linear = eqx.filter_eval_shape(Dense, inputs, outputs, key=structure_key)
    weight = jnp.sqrt(gain / inputs) * jr.normal(weight_key, (outputs, inputs))
    return eqx.tree_at(
        lambda layer: (layer.weight, layer.bias), linear, (weight, jnp.zeros(outputs))
    )


def layer_keys(key: RandomKey | None, layers: int) -> list[RandomKey | None]:
    """One dropout key for each layer, or none for each where there is no key."""
    return [None] * layers if key is None else list(jr.split(key, layers))
