"""A small step that a part under test stands in: its recipe, its state and a batch of rows."""

import dataclasses
from typing import Any

import jax.random as jr
import numpy as np

from mlp_research.config import Config
from mlp_research.data.batches import Batch
from mlp_research.data.inputs import Inputs
from mlp_research.models import MLPConfig, Model, ModelConfig, whole
from mlp_research.optimizers import SGDConfig
from mlp_research.prng import StepKeys
from mlp_research.programs.base import recipe_of
from mlp_research.step import Recipe, TrainState, init_state

EXAMPLES = 8
MODEL = MLPConfig(widths=(4,))
IMAGE_SHAPE, CLASSES = (2, 3), 3


def recipe_with(image_shape: tuple[int, ...], **parts: Any) -> Recipe:
    """Return what a step of plain descent needs, with these traced parts in it."""
    base = recipe_of(Config(model=MODEL, optimizer=SGDConfig()), 1, Inputs(image_shape))
    return dataclasses.replace(base, **parts)


def network_of(
    config: ModelConfig, image_shape: tuple[int, ...], classes: int, seed: int = 0
) -> Model:
    """Return a new model, with its state where it has one."""
    return whole(config.build(image_shape, classes, key=jr.key(seed)))


def state_of(network: Model, recipe: Recipe) -> TrainState:
    return init_state(network, recipe, keys=StepKeys(jr.key(1), jr.key(2)))


def random_batch(pixels: int, classes: int) -> Batch:
    """Return rows of random pixels with random labels."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (EXAMPLES, pixels), dtype=np.uint8)
    return Batch(images, random.integers(0, classes, EXAMPLES, dtype=np.uint8))
