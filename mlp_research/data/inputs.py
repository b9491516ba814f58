"""From raw features, as the rows hold them, to the float32 numbers that a model is called on."""

from collections.abc import Iterator

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt8

from mlp_research.data.batches import Split
from mlp_research.data.idx import rows_of
from mlp_research.shapes import HostOrDevice

_ROWS = 2**13  # Rows that are added up at once.

RawImages = UInt8[HostOrDevice, "*batch pixels"] | Float32[HostOrDevice, "*batch pixels"]
"""Flat rows of features: pixels of 0 to 255, or any floats."""


def scaled(images: RawImages) -> Float32[Array, "*batch pixels"]:
    """Return pixels of 0 to 255 in [0, 1], and floats as they are."""
    numbers = jnp.asarray(images, jnp.float32)
    return numbers / 255 if images.dtype == np.uint8 else numbers


class Inputs(eqx.Module):
    """How the features of a data set become a model's inputs. Fixed before a run."""

    image_shape: tuple[int, ...] = eqx.field(static=True, default=())
    """Shape of one example: (28, 28), (32, 32, 3), or (13,) for a row of a table."""
    mean: Float32[HostOrDevice, " pixels"] | None = None
    """Of each feature over the training rows, where the inputs are standardised."""
    deviation: Float32[HostOrDevice, " pixels"] | None = None

    def standardised(
        self, images: Float32[Array, "*batch pixels"]
    ) -> Float32[Array, "*batch pixels"]:
        """Return scaled images less their mean, over their deviation, where that is wanted."""
        if self.mean is None or self.deviation is None:
            return images
        return (images - self.mean) / self.deviation

    def __call__(self, images: RawImages) -> Float32[Array, "*batch pixels"]:
        """Return what a model is called on in evaluation."""
        return self.standardised(scaled(images))


def inputs_of(train: Split, image_shape: tuple[int, ...], normalize: bool) -> Inputs:
    """Return the inputs of a data set; with `normalize`, standardised by its training rows.

    A feature that never varies is only centred.
    """
    if not normalize:
        return Inputs(image_shape)
    mean = np.asarray(sum(each.sum(axis=0) for each in _pieces(train))) / len(train)
    squares = np.asarray(sum(((each - mean) ** 2).sum(axis=0) for each in _pieces(train)))
    deviation = np.sqrt(squares / len(train))
    varied = np.where(deviation > 0, deviation, 1)
    return Inputs(image_shape, mean.astype(np.float32), varied.astype(np.float32))


def _pieces(train: Split) -> Iterator[np.ndarray]:
    """Stream the scaled rows in float64, some at a time."""
    for first in range(0, len(train), _ROWS):
        rows = np.arange(first, min(first + _ROWS, len(train)))
        yield np.asarray(scaled(rows_of(train.images, rows)), np.float64)
