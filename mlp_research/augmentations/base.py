"""Augmentations: random changes of the images in training. Each is a part."""

import abc
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from mlp_research.errors import ConfigError
from mlp_research.parts import Part
from mlp_research.prng import example_keys
from mlp_research.shapes import RandomKey, ScaledImages

ImageArray = Float[Array, "*shape"]
"""One image in its own shape, as height x width or height x width x channels; pixels in [0, 1]."""


class Augmentation(Part, abc.ABC, frozen=True):
    """A random change of each image in training. Evaluation sees the images as they are."""

    @abc.abstractmethod
    def augment(self, image: ImageArray, *, key: RandomKey) -> ImageArray:
        """Return one image changed. `key` is the example's own, and all chance comes from it."""

    def batch(
        self, images: ScaledImages, image_shape: tuple[int, ...], *, key: RandomKey
    ) -> ScaledImages:
        """Return a batch changed. `key` is the step's, of the stream "augmentation"."""

        def one(image: Float32[Array, " pixels"], key: RandomKey) -> Float32[Array, " pixels"]:
            return self.augment(image.reshape(image_shape or image.shape), key=key).reshape(-1)

        changed = jax.vmap(one)(images, example_keys(key, len(images)))
        # Compiled apart from the model: one rounding in every program, on any number of devices.
        return jax.lax.optimization_barrier(changed)


class NoAugmentation(Augmentation, frozen=True):
    """Each image as it is."""

    kind: Literal["none"] = "none"

    def augment(self, image: ImageArray, *, key: RandomKey) -> ImageArray:
        return image

    def batch(
        self, images: ScaledImages, image_shape: tuple[int, ...], *, key: RandomKey
    ) -> ScaledImages:
        return images


def grid_of(image: ImageArray) -> tuple[Float32[Array, "height 1"], Float32[Array, "1 width"]]:
    """Return (row, column) of each pixel of an image, counted from its centre.

    Raises `ConfigError` for what is no image, such as a row of a table.
    """
    if image.ndim not in (2, 3):
        raise ConfigError(
            f"an image has 2 or 3 dimensions, but an example of these data has the shape "
            f"{image.shape}: use --augmentation none, or one for rows of this shape"
        )
    rows, columns = (jnp.arange(size) - (size - 1) / 2 for size in image.shape[:2])
    return rows[:, None], columns[None]


def sampled(
    image: ImageArray, rows: Float[Array, "height width"], columns: Float[Array, "height width"]
) -> ImageArray:
    """Return an image read at other places, between the pixels in proportion (bilinear).

    `rows` and `columns` are counted from the centre. Outside the image all is 0.
    """
    height, width = image.shape[:2]
    bordered = jnp.pad(image, [(1, 1), (1, 1), *[(0, 0)] * (image.ndim - 2)])
    flat = bordered.reshape((height + 2) * (width + 2), *image.shape[2:])

    def places(centred: Array, size: int) -> tuple[Array, Array]:
        """Return (index of the border's pixel before, share of the one after)."""
        place = jnp.clip(centred + (size - 1) / 2 + 1, 0, size + 1 - 1e-4)
        before = jnp.floor(place)
        return before.astype(jnp.int32), place - before

    (row, below), (column, right) = places(rows, height), places(columns, width)
    first = row * (width + 2) + column
    corners = (
        (first, (1 - below) * (1 - right)),
        (first + 1, (1 - below) * right),
        (first + width + 2, below * (1 - right)),
        (first + width + 3, below * right),
    )
    trailing = (...,) + (None,) * (image.ndim - 2)
    parts = [
        flat.at[index].get(mode="promise_in_bounds") * share[trailing] for index, share in corners
    ]
    return (parts[0] + parts[1]) + (parts[2] + parts[3])
