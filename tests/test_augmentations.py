"""Augmentations are what the papers say, and draw from a stream of their own."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from scipy import ndimage

from mlp_research.augmentations import Affine, Augmentation, Elastic, NoAugmentation, Shift
from mlp_research.augmentations.geometric import uniform_fields
from mlp_research.config import StreamsConfig
from mlp_research.data import IdxConfig
from mlp_research.data.datasets import DEFAULT_DIRECTORY, load
from mlp_research.errors import ConfigError
from mlp_research.programs.base import stream_keys
from mlp_research.programs.single import Experiment
from tests.made import own_kinds, small_config, small_execution

IMAGES = load(DEFAULT_DIRECTORY, IdxConfig()).test.images[:40].reshape(-1, 28, 28) / 255.0
KEYS = [jr.key(number) for number in range(len(IMAGES))]


def smoothed(field: np.ndarray, sigma: float) -> np.ndarray:
    """Return a field smoothed in float64, with nothing beyond its ends."""
    return ndimage.gaussian_filter(field, sigma, mode="constant", truncate=10)


def read_at(image: np.ndarray, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
    """Return an image read between its pixels in proportion, in float64; outside all is 0."""
    return ndimage.map_coordinates(image, [rows, columns], order=1, mode="grid-constant")


@pytest.mark.parametrize(("alpha", "sigma"), [(34.0, 4.0), (8.0, 2.0), (60.0, 6.0)])
def test_elastic_equals_the_reference_in_float64(alpha: float, sigma: float):
    part: Any = Elastic(alpha=alpha, sigma=sigma).traced()
    augment = jax.jit(lambda image, key: part.augment(image, key=key))
    rows, columns = np.indices((28, 28))
    for image, key in zip(IMAGES, KEYS, strict=True):
        drawn = np.asarray(uniform_fields(key, (2, 28, 28)), np.float64)
        down, right = (alpha * smoothed(field.T, sigma) for field in drawn)
        wanted = read_at(image, rows + down, columns + right)
        np.testing.assert_allclose(augment(jnp.float32(image), key), wanted, rtol=0, atol=1e-4)
        assert np.abs(wanted - image).max() > 0.05


def test_elastic_draws_are_uniform():
    draws = np.stack([np.asarray(uniform_fields(key, (2, 27, 29))) for key in KEYS]).ravel()
    assert draws.size == 40 * 2 * 27 * 29 and np.abs(draws).max() < 1
    assert abs(draws.mean()) < 0.01 and abs(draws.var() - 1 / 3) < 0.005
    counts = np.histogram(draws, bins=16, range=(-1, 1))[0]
    assert np.abs(counts / counts.mean() - 1).max() < 0.08


def test_affine_equals_the_reference_in_float64():
    part: Any = Affine(rotation=20, scale=0.2, shear=0.3).traced()
    augment = jax.jit(lambda image, key: part.augment(image, key=key))
    rows, columns = np.indices((28, 28)) - 13.5
    for image, key in zip(IMAGES, KEYS, strict=True):
        turn, size, shear = np.asarray(jr.uniform(key, (3,), minval=-1, maxval=1), np.float64)
        angle, factor = np.deg2rad(20 * turn), 1 + 0.2 * size
        sheared = columns + 0.3 * shear * rows
        down = (np.cos(angle) * rows - np.sin(angle) * sheared) / factor
        right = (np.sin(angle) * rows + np.cos(angle) * sheared) / factor
        wanted = read_at(image, down + 13.5, right + 13.5)
        np.testing.assert_allclose(augment(jnp.float32(image), key), wanted, rtol=0, atol=1e-4)


def test_shift_moves_by_each_distance_equally_often():
    image = jnp.zeros((9, 7)).at[4, 3].set(1)
    moved = jax.vmap(lambda key: Shift(pixels=2).augment(image, key=key))(jr.split(jr.key(0), 5000))
    counts = np.asarray(moved.sum(axis=0))
    assert counts.sum() == 5000 and np.count_nonzero(counts) == 25
    assert np.abs(counts[2:7, 1:6] / 200 - 1).max() < 0.3


@pytest.mark.parametrize("kind", own_kinds(Augmentation))
def test_colours_move_together(kind: str):
    part: Any = Augmentation.chosen(kind).traced()
    grey = jnp.float32(IMAGES[0])
    colours = part.augment(jnp.stack([grey, 0.5 * grey, grey], axis=-1), key=KEYS[1])
    alone = part.augment(grey, key=KEYS[1])
    wanted = np.stack([alone, 0.5 * alone, alone], axis=-1)
    np.testing.assert_allclose(colours, wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", sorted(own_kinds(Augmentation).keys() - {"none"}))
def test_a_row_of_a_table_is_refused_in_a_sentence(kind: str):
    part: Any = Augmentation.chosen(kind).traced()
    with pytest.raises(ConfigError, match=r"an example of these data has the shape \(13,\)"):
        part.augment(jnp.zeros(13), key=KEYS[0])


def pixels_of(config: Any, data_dir: Path) -> np.ndarray:
    """Return what the first step trains on."""
    run = Experiment.of(config, small_execution(data_dir))
    key = stream_keys(config).steps.at(jnp.int32(0)).augmentation
    return np.asarray(run.recipe.training_images(run.data.train.images[:16], key=key))


def test_the_stream_augmentation_changes_the_pixels_and_nothing_else(data_dir: Path):
    base = small_config(augmentation=Shift(pixels=1))
    other = base.model_copy(update={"streams": StreamsConfig(augmentation=7)})
    one, two = stream_keys(base), stream_keys(other)
    assert jnp.array_equal(jr.key_data(one.steps.dropout), jr.key_data(two.steps.dropout))
    assert jnp.array_equal(jr.key_data(one.model), jr.key_data(two.model))
    assert other.stream_seed("order") == base.stream_seed("order")
    assert not np.array_equal(pixels_of(base, data_dir), pixels_of(other, data_dir))
    assert np.array_equal(pixels_of(base, data_dir), pixels_of(base, data_dir))


def test_evaluation_sees_the_images_as_they_are(data_dir: Path):
    plain, moved = (
        Experiment.of(small_config(augmentation=part), small_execution(data_dir))
        for part in (NoAugmentation(), Shift(pixels=2))
    )
    model = plain.init().model
    assert plain.evaluate(model, plain.data.test) == moved.evaluate(model, moved.data.test)
