"""Augmentations, data, starts, a model with state and a probe, as a researcher writes them."""

# pyright: reportIncompatibleVariableOverride=false, reportArgumentType=false
# pyright: reportAttributeAccessIssue=false

import math
from typing import Annotated, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np

from mlp_research import (
    TRACED,
    Augmentation,
    BatchNorm,
    DataConfig,
    Fraction,
    ModelConfig,
    PositiveFloat,
    Probe,
    Rows,
    Start,
)


class Wobble(Augmentation, frozen=True):
    """Elastic deformation (Simard et al. 2003) of grey images."""

    kind: Literal["wobble"] = "wobble"
    alpha: Annotated[PositiveFloat, TRACED] = 3.0
    sigma: Annotated[PositiveFloat, TRACED] = 1.0

    def augment(self, image, *, key):
        def smoothing(places):
            return jax.nn.softmax(-(((places[:, None] - places[None]) / self.sigma) ** 2) / 2)

        noise = jr.uniform(key, (2, *image.shape), minval=-1)
        rows, columns = (jnp.arange(size) for size in image.shape)
        across = jnp.swapaxes(noise @ smoothing(columns), 1, 2)
        down, right = self.alpha * jnp.swapaxes(across @ smoothing(rows), 1, 2)
        places = [rows[:, None] + down, columns[None] + right]
        return jax.scipy.ndimage.map_coordinates(image, places, order=1)


class Erasing(Augmentation, frozen=True):
    """A random rectangle of the image set to 0 (Zhong et al. 2020)."""

    kind: Literal["erasing"] = "erasing"
    size: Annotated[Fraction, TRACED] = 0.5

    def augment(self, image, *, key):
        centre = jr.uniform(key, (2,))
        places = [(jnp.arange(size) + 0.5) / size for size in image.shape]
        inside = [abs(place - c) < self.size / 2 for place, c in zip(places, centre, strict=True)]
        return jnp.where(inside[0][:, None] & inside[1][None], 0.0, image)


class Colours(DataConfig, frozen=True):
    """RGB images in one .npz with names of its own."""

    kind: Literal["colours"] = "colours"

    def read(self, directory):
        with np.load(directory / "colours.npz") as file:
            train = Rows(file["images"], file["labels"])
            return train, Rows(file["new_images"], file["new_labels"])


class Table(DataConfig, frozen=True):
    """Two tables of floats with a header; the class stands in the last column."""

    kind: Literal["table"] = "table"

    def read(self, directory):
        def rows(name):
            table = np.loadtxt(directory / name, delimiter=",", skiprows=1, dtype=np.float32)
            return Rows(table[:, :-1], table[:, -1].astype(np.int32))

        return rows("train.csv"), rows("test.csv")


class Scaled(Start, frozen=True):
    """The seed's weights times a factor, for lazy training (Chizat et al. 2019)."""

    kind: Literal["scaled"] = "scaled"
    factor: Annotated[PositiveFloat, TRACED] = 8.0

    def prepare(self, model, *, key):
        weights, rest = eqx.partition(model, eqx.is_inexact_array)
        return eqx.combine(jax.tree.map(lambda leaf: self.factor * leaf, weights), rest)


class Masked(Start, frozen=True):
    """A random share of each matrix is 0 and stays so (Frankle and Carbin 2019)."""

    kind: Literal["masked"] = "masked"
    kept: Annotated[Fraction, TRACED] = 0.5

    def prepare(self, model, *, key):
        def masked(leaf):
            return jnp.where(jr.bernoulli(key, self.kept, leaf.shape), leaf, 0.0)

        return jax.tree.map(lambda leaf: masked(leaf) if jnp.ndim(leaf) == 2 else leaf, model)

    def constrain(self, before, after):
        return jax.tree.map(
            lambda old, new: jnp.where(old == 0, 0.0, new) if new.ndim == 2 else new, before, after
        )


class Normed(eqx.Module):
    """A hidden layer with batch normalisation (Ioffe and Szegedy 2015)."""

    layers: tuple

    def __init__(self, pixels, classes, *, key):
        first_key, last_key = jr.split(key)
        first = eqx.nn.Linear(pixels, 8, key=first_key)
        last = eqx.nn.Linear(8, classes, key=last_key)
        self.layers = (first, BatchNorm(8), last)

    def __call__(self, image, state, *, key=None):
        hidden, state = self.layers[1](self.layers[0](image), state)
        return self.layers[2](jax.nn.relu(hidden)), state


class NormedConfig(ModelConfig, frozen=True):
    """The config of `Normed`."""

    kind: Literal["normed"] = "normed"

    def build(self, image_shape, classes, *, key):
        return eqx.nn.make_with_state(Normed)(math.prod(image_shape), classes, key=key)


class DeadUnits(Probe, frozen=True):
    """The share of each hidden layer's units that are 0 for all rows."""

    kind: Literal["dead-units"] = "dead-units"

    def measure(self, model, data):
        hidden, shares = data.images, {}
        for number, layer in enumerate(model.layers[:-1]):
            hidden = jax.nn.relu(jax.vmap(layer)(hidden))
            shares[f"dead_units.{number}"] = (hidden.max(axis=0) <= 0).mean()
        return shares
