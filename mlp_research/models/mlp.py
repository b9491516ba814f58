"""The multilayer perceptron."""

from collections.abc import Callable
from itertools import pairwise
from math import prod
from typing import Annotated, Any, Literal

import equinox as eqx
import jax.random as jr
from jaxtyping import Array, Float
from pydantic import Field, PositiveInt

from mlp_research.models.base import (
    ACTIVATIONS,
    Activation,
    BatchNorm,
    ModelConfig,
    Norm,
    he_linear,
    layer_keys,
    norm_layer,
)
from mlp_research.shapes import RandomKey


class MLP(eqx.Module):
    """h_0 = dropout(x),  h_l = dropout(activation(norm(W_l h_{l-1} + b_l))),  l = 1 ... L - 1.

    logits = W_L h_{L-1} + b_L. The normalisation stands before the activation (Ba et al. 2016).
    """

    layers: tuple[eqx.nn.Linear, ...]
    norms: tuple[Norm | BatchNorm, ...]
    dropout: eqx.nn.Dropout
    input_dropout: eqx.nn.Dropout
    activation: Callable[[Array], Array] = eqx.field(static=True)

    @property
    def pixels(self) -> int:
        return self.layers[0].weight.shape[-1]

    @property
    def classes(self) -> int:
        return self.layers[-1].weight.shape[-2]

    def __call__(
        self, image: Float[Array, " {self.pixels}"], /, *, key: RandomKey | None = None
    ) -> Float[Array, " {self.classes}"]:
        *hidden_layers, last = self.layers
        *hidden_keys, image_key = layer_keys(key, len(self.layers))
        hidden = self.input_dropout(image, key=image_key)
        for layer, norm, layer_key in zip(hidden_layers, self.norms, hidden_keys, strict=True):
            assert not isinstance(norm, BatchNorm)
            hidden = self.dropout(self.activation(norm(layer(hidden))), key=layer_key)
        return last(hidden)


class BatchNormMLP(MLP):
    """The multilayer perceptron with batch normalisation (Ioffe and Szegedy 2015)."""

    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        image: Float[Array, " {self.pixels}"],
        state: eqx.nn.State,
        /,
        *,
        key: RandomKey | None = None,
    ) -> tuple[Float[Array, " {self.classes}"], eqx.nn.State]:
        *hidden_layers, last = self.layers
        *hidden_keys, image_key = layer_keys(key, len(self.layers))
        hidden = self.input_dropout(image, key=image_key)
        for layer, norm, layer_key in zip(hidden_layers, self.norms, hidden_keys, strict=True):
            assert isinstance(norm, BatchNorm)
            hidden, state = norm(layer(hidden), state)
            hidden = self.dropout(self.activation(hidden), key=layer_key)
        return last(hidden), state


class MLPConfig(ModelConfig, frozen=True):
    """A multilayer perceptron with He initialisation (He et al. 2015)."""

    kind: Literal["mlp"] = "mlp"
    widths: tuple[PositiveInt, ...] = (256, 128)
    """Hidden widths, one for each hidden layer; none makes softmax regression."""
    activation: Activation = "relu"
    """The nonlinearity after each hidden layer."""
    normalisation: Literal["none", "layer", "rms", "batch"] = "none"
    """Normalisation of each hidden layer before its nonlinearity."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a hidden unit is dropped in training (Srivastava et al. 2014)."""
    input_dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Probability that a pixel is dropped in training; Srivastava et al. 2014 took 0.2."""

    def build(self, image_shape: tuple[int, ...], classes: int, *, key: RandomKey) -> Any:
        """Return an `MLP`; with batch normalisation a `BatchNormMLP` and its state."""
        if self.normalisation == "batch":
            norms = [BatchNorm(width) for width in self.widths]
            make = eqx.nn.make_with_state(BatchNormMLP)
        else:
            norms = [norm_layer(self.normalisation, width) for width in self.widths]
            make = MLP
        sizes = (prod(image_shape), *self.widths, classes)
        keys = jr.split(key, len(sizes) - 1)
        return make(
            layers=tuple(
                he_linear(inputs, outputs, key=layer_key)
                for (inputs, outputs), layer_key in zip(pairwise(sizes), keys, strict=True)
            ),
            norms=tuple(norms),
            dropout=eqx.nn.Dropout(self.dropout),
            input_dropout=eqx.nn.Dropout(self.input_dropout),
            activation=ACTIVATIONS[self.activation],
        )
