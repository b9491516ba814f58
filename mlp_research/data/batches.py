"""Rows of a data set as a step, a chunk of steps or an evaluation takes them."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32, Integer, UInt8

from mlp_research.shapes import HostOrDevice, Images, Labels


class Split(eqx.Module):
    """The rows of one part of a data set, on the host."""

    images: UInt8[np.ndarray, "examples pixels"] | Float32[np.ndarray, "examples pixels"]
    """Flat features: pixels of 0 to 255, or any floats."""
    labels: UInt8[np.ndarray, " examples"] | Int32[np.ndarray, " examples"]
    groups: Integer[np.ndarray, " examples"] | None = None
    """The group of each row, where the data tell it: the writer of each digit."""

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, count: int) -> "Split":
        """Return the first `count` rows."""
        return self[:count]

    def __getitem__(self, rows: slice) -> "Split":
        """Return the rows of a slice."""
        groups = None if self.groups is None else self.groups[rows]
        return Split(self.images[rows], self.labels[rows], groups)


class Batch(eqx.Module):
    """The examples of one optimizer step; with a leading axis, of several steps."""

    images: (
        UInt8[HostOrDevice, "*steps batch pixels"] | Float32[HostOrDevice, "*steps batch pixels"]
    )
    labels: UInt8[HostOrDevice, "*steps batch"] | Int32[HostOrDevice, "*steps batch"]


class Chunk(eqx.Module):
    """Room for K batches, of which the first `count` are real; the others are never trained on."""

    steps: Batch
    count: Int32[HostOrDevice, ""]

    def batch(self, step: Batch) -> Batch:
        """The batch of one step, given that step's part of `steps`."""
        return step


class RowChunk(eqx.Module):
    """A chunk whose pixels lie on the device already: each step holds only its rows."""

    data: Batch
    """All training rows, as one batch."""
    steps: Int32[HostOrDevice, "*steps batch"]
    count: Int32[HostOrDevice, ""]

    def batch(self, step: Int32[Array, " batch"]) -> Batch:
        """The batch of one step, given that step's part of `steps`."""
        images, labels = jnp.asarray(self.data.images), jnp.asarray(self.data.labels)
        return Batch(
            images.at[step].get(mode="promise_in_bounds"),
            labels.at[step].get(mode="promise_in_bounds"),
        )


AnyChunk = Chunk | RowChunk


class MaskedBatch(eqx.Module):
    """An evaluation batch of fixed size; rows where `real` is false are padding."""

    images: Images
    labels: Labels
    real: Bool[HostOrDevice, " batch"]
