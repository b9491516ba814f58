"""Every model computes its equation, starts at the right scale, and refuses what cannot be."""

from collections.abc import Callable
from math import erf
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from mlp_research.errors import ConfigError
from mlp_research.models import MixerConfig, MLPConfig, ModelConfig, ResidualConfig
from mlp_research.models.base import he_linear, norm_layer
from mlp_research.shapes import is_shape
from tests.made import own_kinds

IMAGE_SHAPE, CLASSES = (6, 4), 3
KINDS = own_kinds(ModelConfig)
Array64 = np.ndarray


# The equations once more, in numpy and float64


def activate(kind: str, values: Array64) -> Array64:
    match kind:
        case "relu":
            return np.maximum(values, 0)
        case "tanh":
            return np.tanh(values)
        case "silu":
            return values / (1 + np.exp(-values))
        case _:  # jax.nn.gelu is the tanh approximation of Hendrycks and Gimpel 2016
            return values / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (values + 0.044715 * values**3)))


def dense(layer: eqx.nn.Linear, values: Array64) -> Array64:
    assert layer.bias is not None
    return values @ np.asarray(layer.weight, np.float64).T + np.asarray(layer.bias, np.float64)


def normalise(kind: str, norm: Any, values: Array64) -> Array64:
    """Over the last axis."""
    if kind == "none":
        return values
    if kind == "rms":
        scaled = values / np.sqrt((values**2).mean(-1, keepdims=True) + 1e-5)
        return scaled * np.asarray(norm.weight, np.float64)
    centred = values - values.mean(-1, keepdims=True)
    scaled = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5)
    return scaled * np.asarray(norm.weight, np.float64) + np.asarray(norm.bias, np.float64)


def mlp(config: MLPConfig, model: Any, image: Array64) -> Array64:
    hidden = image
    for layer, norm in zip(model.layers[:-1], model.norms, strict=True):
        hidden = activate(
            config.activation, normalise(config.normalisation, norm, dense(layer, hidden))
        )
    return dense(model.layers[-1], hidden)


def residual(config: ResidualConfig, model: Any, image: Array64) -> Array64:
    stream = dense(model.embedding, image)
    for block in model.blocks:
        normed = normalise(config.normalisation, block.norm, stream)
        hidden = activate(config.activation, dense(block.inner, normed))
        if config.gated:
            hidden = hidden * dense(block.gate, normed)
        stream = stream + dense(block.outer, hidden)
    return dense(model.head, normalise(config.normalisation, model.norm, stream))


def mixer(config: MixerConfig, model: Any, image: Array64) -> Array64:
    (height, width), size = IMAGE_SHAPE, config.patch_size
    picture = image.reshape(height, width)
    tokens = np.stack(
        [
            picture[top : top + size, left : left + size].ravel()
            for top in range(0, height, size)
            for left in range(0, width, size)
        ]
    )

    def mix(part: Any, rows: Array64) -> Array64:
        return dense(part.outer, activate("gelu", dense(part.inner, rows)))

    tokens = dense(model.embedding, tokens)
    for block in model.blocks:
        normed = normalise(config.normalisation, block.token_norm, tokens)
        tokens = tokens + mix(block.mix_tokens, normed.T).T
        normed = normalise(config.normalisation, block.channel_norm, tokens)
        tokens = tokens + mix(block.mix_channels, normed)
    pooled = normalise(config.normalisation, model.norm, tokens).mean(0)
    return dense(model.head, pooled)


EQUATIONS: list[tuple[ModelConfig, Callable]] = [
    *[(MLPConfig(widths=(7, 5), normalisation=kind), mlp) for kind in ("none", "layer", "rms")],
    *[(MLPConfig(widths=(7,), activation=kind), mlp) for kind in ("gelu", "silu", "tanh")],
    (MLPConfig(widths=()), mlp),
    *[(ResidualConfig(width=6, gated=gated), residual) for gated in (False, True)],
    (ResidualConfig(width=6, blocks=3, expansion=1, normalisation="layer"), residual),
    (ResidualConfig(width=6, normalisation="none", activation="gelu"), residual),
    (MixerConfig(patch_size=2, width=5, token_width=4, channel_width=7), mixer),
    (MixerConfig(patch_size=1, width=5, blocks=1, normalisation="layer"), mixer),
    (MixerConfig(patch_size=2, width=5, normalisation="none"), mixer),
]


def by_shapes(config: ModelConfig, image_shape: tuple[int, int], classes: int) -> Any:
    return eqx.filter_eval_shape(lambda: config.build(image_shape, classes, key=jr.key(0)))


def filled(config: ModelConfig) -> Any:
    """A model whose parameters, biases and scales too, are random; made without a compiler."""
    generator = np.random.default_rng(1)

    def fill(leaf: Any) -> Any:
        if not is_shape(leaf):
            return leaf
        return jnp.asarray(generator.normal(size=leaf.shape) / 2, jnp.float32)

    return jax.tree.map(fill, by_shapes(config, IMAGE_SHAPE, CLASSES))


@pytest.mark.parametrize(
    ("config", "equation"), EQUATIONS, ids=[f"{c.kind}{i}" for i, (c, _) in enumerate(EQUATIONS)]
)
def test_a_model_computes_its_equation(config: ModelConfig, equation: Callable):
    model = eqx.nn.inference_mode(filled(config))
    images = np.random.default_rng(0).uniform(size=(5, 24)).astype(np.float32)
    logits = np.asarray(eqx.filter_jit(eqx.filter_vmap(model))(images), np.float64)
    wanted = np.stack([equation(config, model, image.astype(np.float64)) for image in images])
    assert np.abs(logits - wanted).max() <= 1e-5 * max(1, np.abs(wanted).max())


def test_every_kind_of_the_package_has_an_equation_here():
    assert {config.kind for config, _ in EQUATIONS} == set(KINDS)


# Dropout


@pytest.mark.parametrize(
    ("config", "part"),
    [
        (MLPConfig(widths=(400,), dropout=0.3), "a hidden layer"),
        (MLPConfig(widths=(400,), input_dropout=0.3), "the image"),
    ],
    ids=["hidden", "input"],
)
def test_dropout_drops_its_share_and_keeps_the_mean(config: MLPConfig, part: str):
    """With weights of one, a layer's output is the sum of what was kept, divided by 1 - p."""
    model = config.build((20, 20), CLASSES, key=jr.key(0))
    ones = jax.tree.map(
        lambda leaf: np.full(leaf.shape, leaf.ndim == 2, np.float32),
        eqx.filter(model, eqx.is_inexact_array),
    )
    model, image = eqx.combine(ones, model), np.full(400, 1 / 400, np.float32)
    each = eqx.filter_jit(eqx.filter_vmap(lambda key: model(jnp.asarray(image), key=key)[0]))
    outputs = each(jr.split(jr.key(1), 50))
    kept = np.asarray(outputs) / 400 * 0.7
    assert abs(kept.mean() - 0.7) < 5 * np.sqrt(0.7 * 0.3 / 400 / 50), part
    assert kept.std() > 0


# Initialisation


@pytest.mark.parametrize("gain", [2.0, 1.0, 0.25])
def test_a_dense_layer_starts_with_the_variance_of_its_gain(gain: float):
    layer = he_linear(300, 400, gain=gain, key=jr.key(0))
    assert layer.bias is not None
    weights = np.asarray(layer.weight)
    # The variance of n normal numbers scatters by sqrt(2 / n) of itself.
    assert abs(weights.var() * 300 / gain - 1) < 5 * np.sqrt(2 / weights.size)
    assert not np.any(layer.bias)


def test_the_plain_perceptron_starts_from_its_keys_as_it_always_did():
    model = MLPConfig().build((28, 28), 10, key=jr.key(3))
    sizes, keys = (784, 256, 128, 10), jr.split(jr.key(3), 3)
    for layer, inputs, outputs, key in zip(model.layers, sizes, sizes[1:], keys, strict=False):
        weight = jnp.sqrt(2 / inputs) * jr.normal(jr.split(key)[1], (outputs, inputs))
        assert np.asarray(layer.weight).tobytes() == np.asarray(weight).tobytes()


@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("gated", [False, True])
def test_a_residual_stream_starts_at_a_scale_that_depth_does_not_change(blocks: int, gated: bool):
    """Standard-normal images make a stream of variance two; all branches together add about one."""
    config = ResidualConfig(width=64, blocks=blocks, gated=gated, dropout=0)

    @eqx.filter_jit
    def growth(key, images):
        model = config.build((10, 10), CLASSES, key=key)
        embedded = jax.vmap(model.embedding)(images)
        stream = embedded
        for block in model.blocks:
            stream = jax.vmap(lambda row, block=block: block(row))(stream)
        return (embedded**2).mean(), ((stream - embedded) ** 2).mean()

    start, added = map(float, growth(jr.key(0), jr.normal(jr.key(1), (200, 100))))
    assert 1 < start < 3
    assert 0.1 < added < 3


@pytest.mark.parametrize(("kind", "arrays"), [("none", 0), ("layer", 2), ("rms", 1)])
def test_a_normalisation_starts_as_the_published_one(kind: Any, arrays: int):
    values = jr.normal(jr.key(0), (50,)) * 3 + 1
    norm = norm_layer(kind, 50)
    assert len(jax.tree.leaves(eqx.filter(norm, eqx.is_array))) == arrays
    wanted = {
        "none": values,
        "layer": (values - values.mean()) / values.std(),
        "rms": values / jnp.sqrt((values**2).mean()),
    }[kind]
    assert np.allclose(norm(values), wanted, atol=1e-4)


# What every model tells of itself, and what is refused


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_a_model_knows_its_pixels_and_classes_by_shapes_alone(config: Any):
    shapes = by_shapes(config(), (28, 14), 7)
    assert (shapes.pixels, shapes.classes) == (392, 7)


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_every_dense_layer_is_an_equinox_linear(config: Any):
    """Per-example norms and tensor parallelism find dense layers by this structure."""
    model = by_shapes(config(), (28, 28), 10)
    linear = [
        leaf
        for layer in jax.tree.leaves(model, is_leaf=lambda node: isinstance(node, eqx.nn.Linear))
        if isinstance(layer, eqx.nn.Linear)
        for leaf in (layer.weight, layer.bias)
    ]
    matrices = [leaf for leaf in jax.tree.leaves(model) if is_shape(leaf) and leaf.ndim == 2]
    assert matrices
    assert all(any(matrix is leaf for leaf in linear) for matrix in matrices)


@pytest.mark.parametrize("config", KINDS.values(), ids=KINDS)
def test_a_picture_that_is_not_flat_is_refused_with_the_way_to_flatten_it(
    config: Any,
):
    model = by_shapes(config(), (28, 28), 10)
    with pytest.raises(TypeError, match=r"float32\[28,28\].*784.*reshape"):
        model(jnp.zeros((28, 28)), key=jr.key(1))


@pytest.mark.parametrize(
    ("image_shape", "patch_size", "fitting"),
    [((28, 28), 5, "1, 2, 4, 7, 14, 28"), ((28, 14), 28, "1, 2, 7, 14"), ((9, 4), 3, "1")],
)
def test_patches_that_do_not_tile_the_image_are_refused_with_sizes_that_do(
    image_shape: tuple[int, int], patch_size: int, fitting: str
):
    with pytest.raises(ConfigError) as caught:
        MixerConfig(patch_size=patch_size).build(image_shape, CLASSES, key=jr.key(0))
    height, width = image_shape
    message = str(caught.value)
    assert f"model.patch_size is {patch_size}" in message
    assert f"{height} x {width}" in message
    assert message.endswith(f"use one of {fitting}")


@pytest.mark.parametrize(
    ("config", "field", "value"),
    [
        (MLPConfig, "input_dropout", 1.0),
        (ResidualConfig, "normalisation", "batch"),
        (ResidualConfig, "blocks", 0),
        (ResidualConfig, "expansion", 0),
        (ResidualConfig, "dropout", -0.1),
        (MixerConfig, "patch_size", 0),
        (MixerConfig, "token_width", 0),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_name_and_value(
    config: Any, field: str, value: Any
):
    with pytest.raises(ConfigError, match=f"{field} is .*{value}"):
        config(**{field: value})


def test_exact_and_approximate_gelu_differ_so_that_the_equation_above_means_something():
    exact = [x / 2 * (1 + erf(x / np.sqrt(2))) for x in np.linspace(-3, 3, 50)]
    assert np.abs(activate("gelu", np.linspace(-3, 3, 50)) - exact).max() > 1e-4
