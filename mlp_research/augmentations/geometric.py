"""Shifts, affine maps and elastic deformations of images."""

import math
from typing import Annotated, Literal

import jax
import jax.numpy as jnp
import jax.random as jr
from jaxtyping import Array, Float
from pydantic import PositiveInt

from mlp_research.augmentations.base import Augmentation, ImageArray, grid_of, sampled
from mlp_research.base_config import Fraction, NonNegativeFloat, PositiveFloat
from mlp_research.parts import TRACED
from mlp_research.shapes import RandomKey


class Shift(Augmentation, frozen=True):
    """The image moved by whole pixels, each distance equally likely; what comes in is 0."""

    kind: Literal["shift"] = "shift"
    pixels: PositiveInt = 2
    """Longest distance up, down, left and right."""

    def augment(self, image: ImageArray, *, key: RandomKey) -> ImageArray:
        grid_of(image)
        start = jr.randint(key, (2,), 0, 2 * self.pixels + 1)
        border = [(self.pixels, self.pixels)] * 2 + [(0, 0)] * (image.ndim - 2)
        places = [start[0], start[1], *[0] * (image.ndim - 2)]
        return jax.lax.dynamic_slice(jnp.pad(image, border), places, image.shape)


class Affine(Augmentation, frozen=True):
    """The image turned, scaled and sheared about its centre, each by a uniform draw."""

    kind: Literal["affine"] = "affine"
    rotation: Annotated[NonNegativeFloat, TRACED] = 15.0
    """Largest angle in degrees, in both directions."""
    scale: Annotated[Fraction, TRACED] = 0.1
    """Largest part by which the image grows or shrinks."""
    shear: Annotated[NonNegativeFloat, TRACED] = 0.1
    """Largest shift of a row, in pixels for each pixel of its distance from the centre."""

    def augment(self, image: ImageArray, *, key: RandomKey) -> ImageArray:
        draws = jr.uniform(key, (3,), minval=-1, maxval=1)
        angle = jnp.deg2rad(self.rotation) * draws[0]
        size, shear = 1 + self.scale * draws[1], self.shear * draws[2]
        rows, columns = grid_of(image)
        cosine, sine = jnp.cos(angle) / size, jnp.sin(angle) / size
        columns = columns + shear * rows
        return sampled(image, cosine * rows - sine * columns, sine * rows + cosine * columns)


class Elastic(Augmentation, frozen=True):
    """Elastic deformation (Simard et al. 2003, section 2), read between pixels in proportion.

    Each pixel is read at a distance alpha * g, where g is a field of uniform draws in [-1, 1],
    smoothed by a Gaussian of sigma; rows and columns have a field each.
    """

    kind: Literal["elastic"] = "elastic"
    alpha: Annotated[NonNegativeFloat, TRACED] = 34.0
    """Factor of the distances, in pixels."""
    sigma: Annotated[PositiveFloat, TRACED] = 4.0
    """Standard deviation of the Gaussian, in pixels; small ones tear the image."""

    def augment(self, image: ImageArray, *, key: RandomKey) -> ImageArray:
        rows, columns = grid_of(image)
        height, width = image.shape[:2]
        draws = uniform_fields(key, (2, width, height))
        # Two products of plain matrices, of which a CPU makes one each for the whole batch.
        smoothed = jnp.swapaxes(draws @ (self.alpha * gaussian(height, self.sigma)), 1, 2)
        down, right = smoothed @ gaussian(width, self.sigma)
        return sampled(image, rows + down, columns + right)


def uniform_fields(key: RandomKey, shape: tuple[int, ...]) -> Float[Array, "*shape"]:
    """Return uniform draws in (-1, 1) of 256 steps: a sum over many needs no finer ones."""
    size = math.prod(shape)
    words = jr.bits(key, (-(-size // 4),), jnp.uint32)
    draws = jax.lax.bitcast_convert_type(words, jnp.uint8).reshape(-1)[:size]
    return (draws.reshape(shape).astype(jnp.float32) + 0.5) / 128 - 1


def gaussian(size: int, sigma: Float[Array, ""] | float) -> Float[Array, "size size"]:
    """Return the matrix that smooths a line of pixels, with nothing beyond its ends."""
    distances = jnp.arange(-8 * size, 8 * size + 1)
    whole = jnp.exp(-0.5 * (distances / sigma) ** 2).sum()
    apart = jnp.arange(size)[:, None] - jnp.arange(size)[None]
    return jnp.exp(-0.5 * (apart / sigma) ** 2) / whole
