"""The residual multilayer perceptron."""

from collections.abc import Callable
from math import prod
from typing import Annotated, Literal

import equinox as eqx
import jax.random as jr
from jaxtyping import Array, Float
from pydantic import Field, PositiveInt

from mlp_research.models.base import (
    ACTIVATIONS,
    Activation,
    ModelConfig,
    Norm,
    Normalisation,
    he_linear,
    layer_keys,
    norm_layer,
)
from mlp_research.shapes import RandomKey


class ResidualBlock(eqx.Module):
    """h + W_2 dropout(activation(W_1 norm(h))), biases left out here.

    With a gate V, h + W_2 dropout(activation(W_1 norm(h)) * V norm(h)); with SiLU this is SwiGLU
    (Shazeer 2020, eq. 6).
    """

    norm: Norm
    inner: eqx.nn.Linear
    gate: eqx.nn.Linear | None
    outer: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    activation: Callable[[Array], Array] = eqx.field(static=True)

    def __call__(
        self, stream: Float[Array, " width"], /, *, key: RandomKey | None = None
    ) -> Float[Array, " width"]:
        normed = self.norm(stream)
        hidden = self.activation(self.inner(normed))
        if self.gate is not None:
            hidden = hidden * self.gate(normed)
        return stream + self.outer(self.dropout(hidden, key=key))


class ResidualMLP(eqx.Module):
    """h_0 = W_0 x + b_0,  h_l = block_l(h_{l-1}),  logits = W norm(h_L) + b.

    Blocks with the norm first, so that the sum from input to logits stays plain (He et al. 2016;
    Xiong et al. 2020).
    """

    embedding: eqx.nn.Linear
    blocks: tuple[ResidualBlock, ...]
    norm: Norm
    head: eqx.nn.Linear

    @property
    def pixels(self) -> int:
        return self.embedding.weight.shape[-1]

    @property
    def classes(self) -> int:
        return self.head.weight.shape[-2]

    def __call__(
        self, image: Float[Array, " {self.pixels}"], /, *, key: RandomKey | None = None
    ) -> Float[Array, " {self.classes}"]:
        stream = self.embedding(image)
        for block, block_key in zip(self.blocks, layer_keys(key, len(self.blocks)), strict=True):
            stream = block(stream, key=block_key)
        return self.head(self.norm(stream))


class ResidualConfig(ModelConfig, frozen=True):
    """A residual multilayer perceptron whose branches together start as large at any depth.

    Each starts with a variance of about 1 / blocks, as in GPT-2 (Radford et al. 2019, section 2.3).
    """

    kind: Literal["residual"] = "residual"
    width: PositiveInt = 128
    """Size of the stream that the blocks add to."""
    blocks: PositiveInt = 2
    """Residual blocks."""
    expansion: PositiveInt = 2
    """Hidden units of a block for each unit of the stream."""
    gated: bool = False
    """Multiply the hidden units by a linear gate, half as many parameters again (Shazeer 2020)."""
    activation: Activation = "silu"
    """The nonlinearity of each block; with a gate, silu makes SwiGLU and gelu GEGLU."""
    normalisation: Normalisation = "rms"
    """Normalisation before each block and before the last layer."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.2
    """Probability that a hidden unit of a block is dropped in training."""

    def build(self, image_shape: tuple[int, ...], classes: int, *, key: RandomKey) -> ResidualMLP:
        embedding_key, head_key, *block_keys = jr.split(key, self.blocks + 2)
        return ResidualMLP(
            embedding=he_linear(prod(image_shape), self.width, key=embedding_key),
            blocks=tuple(self._block(key=block_key) for block_key in block_keys),
            norm=norm_layer(self.normalisation, self.width),
            head=he_linear(self.width, classes, gain=1, key=head_key),
        )

    def _block(self, *, key: RandomKey) -> ResidualBlock:
        inner_key, gate_key, outer_key = jr.split(key, 3)
        hidden = self.expansion * self.width
        return ResidualBlock(
            norm=norm_layer(self.normalisation, self.width),
            inner=he_linear(self.width, hidden, key=inner_key),
            gate=he_linear(self.width, hidden, gain=1, key=gate_key) if self.gated else None,
            outer=he_linear(hidden, self.width, gain=1 / self.blocks, key=outer_key),
            dropout=eqx.nn.Dropout(self.dropout),
            activation=ACTIVATIONS[self.activation],
        )
