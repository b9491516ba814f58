"""Rows of a data set as a step, a chunk of steps or an evaluation takes them."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, UInt8

from mlp_research.shapes import HostOrDevice


class Split(eqx.Module):
    """The rows of one part of a data set, on the host."""

    images: UInt8[np.ndarray, "examples pixels"]
    labels: UInt8[np.ndarray, " examples"]

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, count: int) -> "Split":
        """The first `count` rows."""
        return Split(self.images[:count], self.labels[:count])


class Batch(eqx.Module):
    """The examples of one optimizer step; with a leading axis, of several steps."""

    images: UInt8[HostOrDevice, "*steps batch pixels"]
    labels: UInt8[HostOrDevice, "*steps batch"]


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

    images: UInt8[HostOrDevice, "batch pixels"]
    labels: UInt8[HostOrDevice, " batch"]
    real: Bool[HostOrDevice, " batch"]
