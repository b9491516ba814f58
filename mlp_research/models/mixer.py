"""The MLP-Mixer: a multilayer perceptron across patches, another across channels."""

from math import gcd, prod
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.random as jr
from jaxtyping import Array, Float
from pydantic import Field, PositiveInt

from mlp_research.errors import ConfigError
from mlp_research.models.base import (
    Dense,
    ModelConfig,
    Norm,
    Normalisation,
    he_linear,
    layer_keys,
    norm_layer,
)
from mlp_research.shapes import RandomKey

Tokens = Float[Array, "tokens channels"]


class FeedForward(eqx.Module):
    """W_2 dropout(gelu(W_1 x + b_1)) + b_2 for each row x."""

    inner: Dense
    outer: Dense
    dropout: eqx.nn.Dropout

    def __call__(
        self, rows: Float[Array, "rows size"], /, *, key: RandomKey | None = None
    ) -> Float[Array, "rows size"]:
        hidden = jax.nn.gelu(self.inner.rows(rows))
        return self.outer.rows(self.dropout(hidden, key=key))


class MixerBlock(eqx.Module):
    """U = X + mix_tokens(norm(X)), each channel apart;  Y = U + mix_channels(norm(U)), each token.

    Tolstikhin et al. 2021, eq. 1.
    """

    token_norm: Norm
    mix_tokens: FeedForward
    channel_norm: Norm
    mix_channels: FeedForward

    def __call__(self, tokens: Tokens, /, *, key: RandomKey | None = None) -> Tokens:
        token_key, channel_key = layer_keys(key, 2)
        normed = jax.vmap(self.token_norm)(tokens)
        tokens = tokens + self.mix_tokens(normed.T, key=token_key).T
        normed = jax.vmap(self.channel_norm)(tokens)
        return tokens + self.mix_channels(normed, key=channel_key)


class Mixer(eqx.Module):
    """X = W patches + b;  blocks;  logits = W mean over tokens of norm(X) + b."""

    embedding: Dense
    blocks: tuple[MixerBlock, ...]
    norm: Norm
    head: Dense
    image_shape: tuple[int, ...] = eqx.field(static=True)
    """Height and width, and channels where there are several."""
    patch_size: int = eqx.field(static=True)

    @property
    def pixels(self) -> int:
        return prod(self.image_shape)

    @property
    def classes(self) -> int:
        return self.head.weight.shape[-2]

    def __call__(
        self, image: Float[Array, " {self.pixels}"], /, *, key: RandomKey | None = None
    ) -> Float[Array, " {self.classes}"]:
        tokens = self.embedding.rows(self.patches(image))
        for block, block_key in zip(self.blocks, layer_keys(key, len(self.blocks)), strict=True):
            tokens = block(tokens, key=block_key)
        return self.head(jax.vmap(self.norm)(tokens).mean(axis=0))

    def patches(self, image: Float[Array, " {self.pixels}"]) -> Float[Array, "tokens patch"]:
        """The image's square patches, row by row, each flat."""
        size, (height, width, *channels) = self.patch_size, self.image_shape
        grid = image.reshape(height // size, size, width // size, size, *channels)
        return grid.swapaxes(1, 2).reshape(-1, size * size * prod(channels))


class MixerConfig(ModelConfig, frozen=True):
    """An MLP-Mixer (Tolstikhin et al. 2021)."""

    kind: Literal["mixer"] = "mixer"
    patch_size: PositiveInt = 7
    """Height and width of a patch; it must divide both of the image's."""
    width: PositiveInt = 64
    """Channels of each patch."""
    blocks: PositiveInt = 2
    """Mixer blocks."""
    token_width: PositiveInt = 32
    """Hidden units of the perceptron across patches."""
    channel_width: PositiveInt = 128
    """Hidden units of the perceptron across channels."""
    normalisation: Normalisation = "rms"
    """Normalisation before each perceptron and the pooling; the paper takes layer."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Probability that a hidden unit of either perceptron is dropped in training."""

    def build(self, image_shape: tuple[int, ...], classes: int, *, key: RandomKey) -> Mixer:
        """Raises `ConfigError` where the patches do not tile the image."""
        self._check_tiles(image_shape)
        height, width, *channels = image_shape
        tokens = height * width // self.patch_size**2
        embedding_key, head_key, *block_keys = jr.split(key, self.blocks + 2)
        return Mixer(
            embedding=he_linear(self.patch_size**2 * prod(channels), self.width, key=embedding_key),
            blocks=tuple(self._block(tokens, key=block_key) for block_key in block_keys),
            norm=norm_layer(self.normalisation, self.width),
            head=he_linear(self.width, classes, gain=1, key=head_key),
            image_shape=image_shape,
            patch_size=self.patch_size,
        )

    def _check_tiles(self, image_shape: tuple[int, ...]) -> None:
        if len(image_shape) not in (2, 3):
            raise ConfigError(
                f"model mixer cuts images into patches, but an example has the shape {image_shape}:"
                " use --model mlp or residual"
            )
        height, width, *_ = image_shape
        common = gcd(height, width)
        if common % self.patch_size:
            fitting = ", ".join(str(size) for size in range(1, common + 1) if common % size == 0)
            raise ConfigError(
                f"model.patch_size is {self.patch_size}, but images are {height} x {width}: "
                f"it must divide both, so use one of {fitting}"
            )

    def _block(self, tokens: int, *, key: RandomKey) -> MixerBlock:
        token_key, channel_key = jr.split(key)
        return MixerBlock(
            token_norm=norm_layer(self.normalisation, self.width),
            mix_tokens=self._feed_forward(tokens, self.token_width, key=token_key),
            channel_norm=norm_layer(self.normalisation, self.width),
            mix_channels=self._feed_forward(self.width, self.channel_width, key=channel_key),
        )

    def _feed_forward(self, size: int, hidden: int, *, key: RandomKey) -> FeedForward:
        """Its output starts with a variance of about 1 / (2 x blocks), the number of branches."""
        inner_key, outer_key = jr.split(key)
        return FeedForward(
            inner=he_linear(size, hidden, key=inner_key),
            outer=he_linear(hidden, size, gain=1 / (2 * self.blocks), key=outer_key),
            dropout=eqx.nn.Dropout(self.dropout),
        )
