"""What every peer is: the same MLP, with the same Adam, written in one framework.

A peer starts from given weights, so that all of them can be compared step by step and timed epoch
by epoch. Its file holds first the program as a user of the framework writes it (the model, the
loss, the step, the loop over an epoch), and last a small class that gives it this common face.
"""

import dataclasses
import importlib
import importlib.util
from typing import Any, Protocol, SupportsFloat

import jax
import jax.random as jr
import lesson
import numpy as np
from jaxtyping import Float32, Int32, UInt8

from mlp_research.errors import ConfigError

Weights = list[tuple[np.ndarray, np.ndarray]]
"""Of each layer the weight [inputs, outputs] and the bias [outputs]; their type is computed in."""
Code = tuple[tuple[str, ...], ...]
"""What counts as a peer's code: a file and the names in it that do, then the next file."""


class Peer(Protocol):
    """One framework's training of the MLP, started from given weights.

    Adam everywhere: learning rate 1e-3, decays 0.9 and 0.999, epsilon 1e-8 added to the root.
    """

    name: str
    state_lives: str
    """Where parameters and optimizer state are between two steps."""
    randomness: str
    """How chance reaches initialisation and dropout."""
    code: Code

    def place(
        self,
        images: UInt8[np.ndarray, "examples pixels"],
        labels: UInt8[np.ndarray, " examples"],
    ) -> tuple[Any, Any]:
        """Raw pixels and labels as this framework trains on them, on its device."""
        ...

    def step(self, images: Any, labels: Any) -> SupportsFloat:
        """Train on one placed batch; its mean loss before the update, perhaps still on its way."""
        ...

    def train_epoch(
        self, images: Any, labels: Any, order: Int32[np.ndarray, "steps batch"]
    ) -> Float32[np.ndarray, " steps"]:
        """Train on batches of rows of placed data, as one does in this framework; every loss.

        The host waits for the device only at the end.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where a peer is written, and the packages it needs beside this one's own."""

    module: str
    kind: str
    packages: tuple[str, ...] = ()


RAW = "raw JAX"
PEERS = {
    RAW: Entry("raw_jax", "RawJax"),
    "raw JAX, pmap": Entry("data_parallel", "Pmap"),
    "raw JAX, shard_map": Entry("data_parallel", "ShardMap"),
    "this package": Entry("equinox_mlp", "EquinoxMLP"),
    "Flax linen": Entry("flax_linen", "FlaxLinen", ("flax",)),
    "Flax nnx": Entry("flax_nnx", "FlaxNNX", ("flax",)),
    "Haiku": Entry("haiku_mlp", "HaikuMLP", ("haiku",)),
    "PyTorch eager": Entry("torch_eager", "TorchEager", ("torch",)),
    "PyTorch compiled": Entry("torch_compiled", "TorchCompiled", ("torch",)),
}
INSTALL = "python -m pip install -e '.[peers]'"


def start(name: str, weights: Weights) -> Peer:
    """The peer of this name with these weights, before its first step."""
    entry = PEERS[name]
    return getattr(importlib.import_module(entry.module), entry.kind)(weights)


def check_installed() -> None:
    """Raises `ConfigError` where a package of a peer is absent."""
    needed = {package for entry in PEERS.values() for package in entry.packages}
    absent = sorted(name for name in needed if importlib.util.find_spec(name) is None)
    if absent:
        raise ConfigError(f"not installed: {', '.join(absent)}; all of them come by {INSTALL}")


def he_weights(seed: int, precision: str = "float32") -> Weights:
    """The lesson's initial weights (He et al. 2015), on the host, drawn in float32 in any case."""
    with jax.enable_x64(False):
        layers = [jax.device_get(layer) for layer in lesson.init(jr.key(seed)).values()]
    return [
        (layer["weight"].astype(precision), layer["bias"].astype(precision)) for layer in layers
    ]


def sizes_of(weights: Weights) -> list[int]:
    """Inputs, hidden widths, classes."""
    return [len(weights[0][0]), *(len(bias) for _, bias in weights)]
