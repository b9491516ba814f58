"""A small made data set, experiments on it, and a model that witnesses what it is trained on."""

import struct
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import Array

from mlp_research.config import Config, Execution, TrainConfig
from mlp_research.data import IdxConfig
from mlp_research.models import MLPConfig, ModelConfig
from mlp_research.parts import Part
from mlp_research.programs.single import Experiment
from mlp_research.step import StepMetrics, TrainState

TRAIN_ROWS, VALIDATION_ROWS, TEST_ROWS, CLASSES = 200, 40, 70, 3


def write_idx(path: Path, array: np.ndarray) -> None:
    header = struct.pack(f">{1 + array.ndim}I", 0x0800 + array.ndim, *array.shape)
    path.write_bytes(header + array.tobytes())


def write_data(directory: Path) -> Path:
    """Three classes of 4 x 3 images, 240 training rows and 70 test rows.

    The first two pixels of an image spell its row, so that a model can tell which it was shown.
    """
    random = np.random.default_rng(0)
    patterns = random.integers(0, 256, (CLASSES, 12))
    for part, rows in (("train", TRAIN_ROWS + VALIDATION_ROWS), ("t10k", TEST_ROWS)):
        labels = random.integers(0, CLASSES, rows).astype(np.uint8)
        labels[:CLASSES] = np.arange(CLASSES)
        images = (0.6 * patterns[labels] + random.integers(0, 100, (rows, 12))).astype(np.uint8)
        images[:, 0], images[:, 1] = np.divmod(np.arange(rows), 256)
        write_idx(directory / f"{part}-images-idx3-ubyte", images.reshape(rows, 4, 3))
        write_idx(directory / f"{part}-labels-idx1-ubyte", labels)
    return directory


def small_config(*, seed: int = 0, epochs: int = 2, batch_size: int = 16, **fields: Any) -> Config:
    """A config for the made data, with dropout: 12 steps an epoch."""
    defaults = {
        "data": IdxConfig(validation=VALIDATION_ROWS),
        "model": MLPConfig(widths=(8, 6), dropout=0.3),
        "train": TrainConfig(epochs=epochs, batch_size=batch_size),
    }
    return Config(seed=seed, **(defaults | fields))


def small_execution(data_dir: Path, **fields: Any) -> Execution:
    defaults = {
        "data_dir": data_dir,
        "mesh_data": 1,
        "steps_per_call": 5,
        "evaluation_batch_size": 16,
    }
    return Execution(**(defaults | fields))


def initial_state(experiment: Experiment) -> Any:
    return eqx.filter_jit(experiment.init)()


def train_through(
    experiment: Experiment, state: TrainState | None = None
) -> tuple[Any, dict[str, np.ndarray]]:
    """The state after the whole plan, and each metric of every step."""
    state = initial_state(experiment) if state is None else state
    assert state is not None
    position = int(state.step)
    plan, collected = experiment.chunk_plan(position), []
    for index, chunk in enumerate(experiment.chunks(position)):
        state, metrics = experiment.train_steps(state, experiment.recipe, chunk)
        count = plan.span(index)[1]
        collected.append(jax.tree.map(lambda values, n=count: np.asarray(values)[:n], metrics))
    return state, joined(collected)


def joined(chunks: list[StepMetrics]) -> dict[str, np.ndarray]:
    """Each metric of all steps, from the metrics of chunk after chunk."""
    names = ("loss", "correct", "gradient_norm", "clipped", "learning_rate")
    each = [
        {name: getattr(metrics, name) for name in names} | metrics.measured | metrics.probed
        for metrics in chunks
    ]
    return {name: np.concatenate([values[name] for values in each]) for name in each[0]}


def own_kinds(family: type[Part]) -> dict[str, Any]:
    """The kinds of a family that the package defines; test modules may have added others."""
    return {
        kind: found
        for kind, found in sorted(family.kinds.items())
        if found.__module__.startswith("mlp_research.")
    }


def arrays_of(tree: Any) -> list[np.ndarray]:
    """All arrays of a pytree on the host, keys as their data."""
    return [
        np.asarray(jr.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)
        for leaf in jax.tree.leaves(eqx.filter(tree, eqx.is_array))
    ]


def assert_bitwise(left: Any, right: Any) -> None:
    """Two pytrees hold the same bits."""
    for one, other in zip(arrays_of(left), arrays_of(right), strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape and one.tobytes() == other.tobytes()


MASK_BITS = 64
"""So many that no two masks are equal by chance."""
Sighting = tuple[int, bytes]
"""The row of an example and the dropout mask it was given."""
sightings: list[Sighting] = []


class Witness(eqx.Module):
    """Softmax regression with dropout on its input that reports each row and mask it is given."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __call__(self, image: Array, /, *, key: Array | None = None) -> Array:
        mask = self.dropout(jnp.ones(MASK_BITS), key=key)
        if not self.dropout.inference:
            jax.debug.callback(_report, image, mask)
        return self.linear(image * mask[: len(image)])


def _report(image: np.ndarray, mask: np.ndarray) -> None:
    high, low = np.rint(np.asarray(image[:2]) * 255).astype(int)
    sightings.append((int(256 * high + low), (np.asarray(mask) > 0).tobytes()))


class WitnessConfig(ModelConfig, frozen=True):
    kind: Literal["witness"] = "witness"

    def build(self, image_shape: tuple[int, ...], classes: int, *, key: Array) -> Witness:
        pixels = image_shape[0] * image_shape[1]
        return Witness(eqx.nn.Linear(pixels, classes, key=key), eqx.nn.Dropout(0.5))


def witnessed(experiment: Experiment) -> tuple[TrainState, dict[str, np.ndarray], list[Sighting]]:
    """Final state, metrics and sightings of a whole run; sorted, as devices report in any order."""
    sightings.clear()
    state, metrics = train_through(experiment)
    jax.effects_barrier()
    return state, metrics, sorted(sightings)


def sightings_of(experiment: Experiment) -> list[Sighting]:
    return witnessed(experiment)[2]
