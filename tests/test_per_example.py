"""Gradients example by example: the factored way and `vmap` agree, and the estimates are right."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import optax
import pytest
from benchmarks import results_page
from PIL import Image

from mlp_research.analysis import per_example_figures
from mlp_research.analysis.per_example import (
    NotFactoredError,
    clipped_gradient,
    factored_norms,
    gradient_noise_scale,
    mean_gradient,
    per_example_gradients,
    per_example_norms,
)
from mlp_research.data.batches import Batch
from mlp_research.data.inputs import scaled
from mlp_research.errors import ConfigError
from mlp_research.fit import Result, fit
from mlp_research.models import MixerConfig, MLPConfig, ModelConfig, ResidualConfig
from mlp_research.models.base import he_linear
from mlp_research.models.summary import lowered
from mlp_research.objectives import cross_entropy
from mlp_research.terminal.report import Report
from scripts import per_example_gradients as script
from tests.made import TEST_ROWS, own_kinds, small_config, small_execution

IMAGE_SHAPE, PIXELS, CLASSES, EXAMPLES = (8, 8), 64, 5, 11
WIDTH = 12
KINDS = own_kinds(ModelConfig)


class Foreign(eqx.Module):
    """A base for models from outside: an embedding, something of their own, a head."""

    embedding: eqx.nn.Linear
    middle: eqx.nn.Linear
    head: eqx.nn.Linear

    def __init__(self, *, key: Any):
        keys = jr.split(key, 3)
        self.embedding = eqx.nn.Linear(PIXELS, WIDTH, key=keys[0])
        self.middle = eqx.nn.Linear(WIDTH, WIDTH, key=keys[1])
        self.head = eqx.nn.Linear(WIDTH, CLASSES, use_bias=False, key=keys[2])

    def __call__(self, image: Any, /, *, key: Any = None) -> Any:
        return self.head(self.inside(jnp.tanh(self.embedding(image))))

    def inside(self, hidden: Any) -> Any:
        return jnp.tanh(self.middle(hidden))


class Shared(Foreign):
    """The same weights twice."""

    def inside(self, hidden: Any) -> Any:
        return jnp.tanh(self.middle(jnp.tanh(self.middle(hidden))))


class Vmapped(Foreign):
    def inside(self, hidden: Any) -> Any:
        return jax.vmap(self.middle)(jnp.stack([hidden, 2 * hidden])).sum(axis=0)


class Scanned(Foreign):
    def inside(self, hidden: Any) -> Any:
        return jax.lax.scan(lambda h, _: (self.middle(h), None), hidden, None, length=2)[0]


class Reading(Foreign):
    """Multiplies with a dense layer's weight on its own."""

    def inside(self, hidden: Any) -> Any:
        return self.middle.weight.T @ hidden


class Replacing(Foreign):
    """Puts other weights into a dense layer."""

    def inside(self, hidden: Any) -> Any:
        layer = eqx.tree_at(lambda layer: layer.weight, self.middle, jnp.outer(hidden, hidden))
        return layer(hidden)


class Stack(eqx.Module):
    """One layer after another by a scan over their stacked weights; no weight is a matrix."""

    layers: eqx.nn.Linear

    def __init__(self, *, key: Any):
        make = eqx.filter_vmap(lambda key: eqx.nn.Linear(PIXELS, PIXELS, key=key))
        self.layers = make(jr.split(key, 3))

    def __call__(self, image: Any, /, *, key: Any = None) -> Any:
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        step = lambda hidden, layer: (jnp.tanh(eqx.combine(layer, static)(hidden)), None)  # noqa: E731
        return jax.lax.scan(step, image, arrays)[0][:CLASSES]


class Bare(eqx.Module):
    """No dense layer at all."""

    weight: jax.Array

    def __call__(self, image: Any, /, *, key: Any = None) -> Any:
        return self.weight @ image


def foreign(model: Any, key: Any) -> Any:
    return model(key=key)


def of_table(kind: str) -> Any:
    config: Any = KINDS[kind]
    return config(patch_size=2) if kind == "mixer" else config()


def built(config: Any) -> Callable:
    return lambda key: config.build(IMAGE_SHAPE, CLASSES, key=key)


DENSE: dict[str, Callable] = {
    **{kind: built(of_table(kind)) for kind in KINDS},
    "mlp, layer norm": built(MLPConfig(widths=(9, 7), normalisation="layer", dropout=0.4)),
    "mlp, rms norm": built(MLPConfig(widths=(9, 7), normalisation="rms", input_dropout=0.2)),
    "small": built(MLPConfig(widths=(9,), dropout=0.4)),
    "mlp, no hidden layer": built(MLPConfig(widths=())),
    "residual, gated": built(ResidualConfig(width=8, gated=True)),
    "mixer, few wide tokens": built(MixerConfig(patch_size=4, width=6, token_width=80)),
    "eqx.nn.MLP": lambda key: eqx.nn.MLP(PIXELS, CLASSES, 16, 2, key=key),
    "eqx.nn.Linear": lambda key: eqx.nn.Linear(PIXELS, CLASSES, key=key),
    "shared": lambda key: foreign(Shared, key),
}
OTHERS: dict[str, Callable] = {
    "stack": lambda key: foreign(Stack, key),
    "no dense layer": lambda key: Bare(jr.normal(key, (CLASSES, PIXELS))),
}


def made_batch(examples: int = EXAMPLES) -> Batch:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (examples, PIXELS)).astype(np.uint8)
    return Batch(images, random.integers(0, CLASSES, examples).astype(np.uint8))


def example_keys(examples: int = EXAMPLES) -> jax.Array:
    return jr.split(jr.key(1), examples)


def trembling(model: Any) -> Any:
    """The model with noise on every parameter, so that no bias is zero and no scale is one."""
    arrays, rest = eqx.partition(model, eqx.is_inexact_array)
    leaves, structure = jax.tree.flatten(arrays)
    random = np.random.default_rng(2)
    noisy = [leaf + 0.1 * random.normal(size=leaf.shape).astype(np.float32) for leaf in leaves]
    return eqx.combine(structure.unflatten(noisy), rest)


def largest_error(one: Any, other: Any) -> float:
    return float(np.abs(np.asarray(one, np.float64) / np.asarray(other, np.float64) - 1).max())


def assert_close(gradient: Any, wanted: Any) -> None:
    for leaf, right in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        assert np.allclose(leaf, right, rtol=1e-4, atol=1e-6)


# Norms


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * ("mixer" in name))
        for name in (*DENSE, *OTHERS)
    ],
)
def test_factored_norms_are_those_of_vmap(name: str):
    """With a key for each example, where the model has use for one."""
    model = trembling((DENSE | OTHERS)[name](jr.key(0)))

    @eqx.filter_jit
    def both(model: Any, batch: Batch, keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        return per_example_norms(model, batch, keys=keys), factored_norms(model, batch, keys=keys)

    wanted, found = both(model, made_batch(), example_keys())
    assert np.std(wanted) > 1e-3
    assert largest_error(found, wanted) < 1e-5


def test_keys_and_microbatches_do_what_they_say():
    """Randomness is off unless each example has a key; a microbatch changes rounding only."""
    model, batch, keys = DENSE["small"](jr.key(0)), made_batch(), example_keys()
    for norms in (per_example_norms, factored_norms):

        @eqx.filter_jit
        def kinds(model: Any, keys: jax.Array, norms: Callable = norms) -> tuple:
            inferring = eqx.nn.inference_mode(model)
            plain = [norms(model, batch), norms(inferring, batch, keys=keys, microbatch=100)]
            dropped = [norms(model, batch, keys=keys)]
            return plain, [*dropped, norms(model, batch, keys=keys, microbatch=4)]

        plain, dropped = kinds(model, keys)
        assert largest_error(*plain) < 1e-5
        assert largest_error(*dropped) < 1e-5
        assert largest_error(dropped[0], plain[0]) > 1e-2


def test_the_mean_of_the_examples_gradients_is_that_of_the_batch():
    model, batch = trembling(DENSE["mlp, layer norm"](jr.key(0))), made_batch()

    def mean_loss(model: Any) -> Any:
        logits = jax.vmap(lambda image: model(image))(scaled(batch.images))
        each = jax.vmap(lambda z, y: cross_entropy(z, y, jnp.float32(0)))
        return each(logits, jnp.asarray(batch.labels)).mean()

    @eqx.filter_jit
    def gradients(model: Any) -> tuple:
        each = per_example_gradients(model, batch)
        means = jax.tree.map(lambda leaf: leaf.mean(axis=0), each), mean_gradient(model, batch)
        wanted = eqx.filter_grad(mean_loss)(eqx.nn.inference_mode(model))
        norms = jax.vmap(optax.tree.norm)(each), per_example_norms(model, batch)
        return norms, wanted, (*means, mean_gradient(model, batch, microbatch=3))

    norms, wanted, found = gradients(model)
    assert largest_error(*norms) < 1e-5
    for gradient in found:
        assert_close(gradient, wanted)


def test_a_dense_layer_takes_rows_as_vmap_does():
    layer, rows = he_linear(PIXELS, 7, key=jr.key(0)), jr.normal(jr.key(1), (EXAMPLES, PIXELS))
    biased = eqx.tree_at(lambda layer: layer.bias, layer, jnp.arange(7.0))
    for one in (biased, eqx.tree_at(lambda layer: layer.bias, layer, None)):
        assert np.allclose(one.rows(rows), jax.vmap(one)(rows), rtol=1e-5, atol=1e-5)


HIDING = "middle: this dense layer is called inside a vmap, scan, cond"
TOUCHING = "middle: the model uses the weights of this dense layer other than by calling it"


@pytest.mark.parametrize(
    ("model", "message"),
    [(Vmapped, HIDING), (Scanned, HIDING), (Reading, TOUCHING), (Replacing, TOUCHING)],
)
def test_a_layer_whose_inputs_are_hidden_is_named_with_the_way_that_works(
    model: Callable, message: str
):
    hidden, batch = model(key=jr.key(0)), made_batch(3)
    with pytest.raises(NotFactoredError, match=re.escape(message)) as caught:
        factored_norms(hidden, batch)
    assert "take per_example_norms" in str(caught.value)
    assert eqx.filter_eval_shape(per_example_norms, hidden, batch).shape == (3,)


def test_a_microbatch_of_none_is_refused():
    with pytest.raises(ConfigError, match="microbatch is 0"):
        factored_norms(DENSE["mlp, no hidden layer"](jr.key(0)), made_batch(), microbatch=0)


# Memory


def temporary_bytes(function: Callable, model: Any, batch: Batch) -> int:
    analysis: Any = lowered(function, model, batch).compile().memory_analysis()
    return analysis.temp_size_in_bytes


def clipped_by_vmap(model: Any, batch: Batch, bound: Any = 1.0) -> Any:
    """The mean of the clipped gradients from the gradients themselves."""
    gradients = per_example_gradients(model, batch)
    norms = jax.vmap(optax.tree.norm)(gradients)
    weights = 1 / jnp.maximum(1, norms / bound)
    mean = lambda leaf: jnp.tensordot(weights, leaf, 1) / len(norms)  # noqa: E731
    return jax.tree.map(mean, gradients)


def test_no_example_has_a_gradient_of_its_own_in_memory():
    """4096 examples of the default perceptron; their gradients would take 3.9 GB.

    The norms by `vmap` take no more memory than the factored ones where XLA fuses the outer
    products into their sum, as on a CPU: of them, only the time is longer.
    """
    model = MLPConfig().build((28, 28), 10, key=jr.key(0))
    batch = Batch(np.zeros((4096, 784), np.uint8), np.zeros(4096, np.uint8))
    gradients = 4 * 4096 * 235_146
    norms = temporary_bytes(factored_norms, model, batch)
    clipped = temporary_bytes(lambda m, b: clipped_gradient(m, b, 1.0), model, batch)
    by_vmap = temporary_bytes(clipped_by_vmap, model, batch)
    figures = f"norms {norms:,}, clipped {clipped:,}, clipped by vmap {by_vmap:,} bytes"
    assert by_vmap > gradients, figures
    assert norms < gradients / 100 and clipped < gradients / 100, figures
    small = temporary_bytes(lambda m, b: factored_norms(m, b, microbatch=256), model, batch)
    assert small < norms / 4, f"{small:,} of {figures}"


# Clipping and noise


def test_clipping_is_that_of_the_gradients_themselves_and_counts_exactly():
    model, batch = trembling(DENSE["mixer, few wide tokens"](jr.key(0))), made_batch()

    @eqx.filter_jit
    def each_way(model: Any, bound: jax.Array) -> tuple:
        return clipped_gradient(model, batch, bound), clipped_by_vmap(model, batch, bound)

    norms = np.sort(eqx.filter_jit(per_example_norms)(model, batch))
    for over in (0, EXAMPLES // 2, EXAMPLES):
        edges = np.concatenate([[0], norms, [2 * norms[-1]]])
        bound = edges[EXAMPLES - over : EXAMPLES - over + 2].mean()
        clipped, wanted = each_way(model, jnp.float32(bound))
        assert (norms > bound).sum() == over
        assert clipped.fraction == np.float32(over / EXAMPLES)
        assert_close(clipped.gradient, wanted)


def test_clipping_in_microbatches_changes_rounding_only():
    model, batch = DENSE["mlp, rms norm"](jr.key(0)), made_batch()
    each = eqx.filter_jit(clipped_gradient)
    whole, parts = each(model, batch, 5.0), each(model, batch, 5.0, microbatch=4)
    assert 0 < whole.fraction < 1 and parts.fraction == whole.fraction
    assert_close(parts.gradient, whole.gradient)


def test_a_bound_that_is_not_positive_is_refused():
    with pytest.raises(ConfigError, match="bound is 0"):
        clipped_gradient(DENSE["mlp"](jr.key(0)), made_batch(), 0.0)


def test_the_noise_scale_is_made_of_unbiased_estimates():
    """Gradients drawn from a normal distribution of known mean and covariance, again and again."""
    random, examples, trials = np.random.default_rng(0), 4, 20_000
    mean, spread = np.array([1.0, -2.0, 0.5]), np.array([[2, 0, 0], [1, 1, 0], [0, -1, 3.0]])
    gradients = mean + random.normal(size=(trials, examples, 3)) @ spread.T
    norms = np.linalg.norm(gradients, axis=2)
    norm_of_mean = np.linalg.norm(gradients.mean(axis=1), axis=1)
    found = [gradient_noise_scale(*each) for each in zip(norms, norm_of_mean, strict=True)]
    truth = {"trace": np.trace(spread @ spread.T), "squared_norm": mean @ mean}
    for name, wanted in truth.items():
        values = np.array([getattr(each, name) for each in found])
        error = values.std() / np.sqrt(trials)
        assert abs(values.mean() - wanted) < 4 * error, name
        assert error < wanted / 50
    assert found[0].scale == (
        found[0].trace / found[0].squared_norm if found[0].squared_norm > 0 else np.inf
    )


def test_a_gradient_lost_in_its_noise_has_an_infinite_noise_scale():
    assert gradient_noise_scale(np.ones(4), 0.0).scale == np.inf
    equal = gradient_noise_scale(np.ones(4), 1.0)
    assert (equal.trace, equal.squared_norm, equal.scale) == (0, 1, 0)
    with pytest.raises(ConfigError, match="at least 2"):
        gradient_noise_scale(np.ones(1), 1.0)


# The script


@pytest.fixture(scope="module")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    quiet = Report(quiet=True)
    return fit(small_config(), small_execution(data_dir), run_dir=run_dir, report=quiet)


def test_the_script_says_which_images_and_why(
    trained: Result,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(results_page, "DOCUMENT", tmp_path / "results.md")
    words = ("--examples", "6", "--microbatch", "32", "--mesh.data", "1", "--no-compile-cache")
    script.main([str(trained.run_dir), *words, "--record"])
    printed = capsys.readouterr().out
    rows = re.findall(r"^  (initialisation|after one epoch|the end) +(\d+) ", printed, re.MULTILINE)
    assert rows == [("initialisation", "0"), ("after one epoch", "12"), ("the end", "24")]
    wrong = 100 * (1 - trained.summary["test"]["correct"] / TEST_ROWS)
    assert f"of all {wrong:.2f} %" in printed
    assert "Which: " in printed and "Why: " in printed
    written = (tmp_path / "results.md").read_text()
    assert "| the end | 24 |" in written and "Why: " in written
    for name in ("largest_gradients.png", "gradient_norms.png"):
        assert f"({name})" in written
        assert (tmp_path / name).read_bytes() == (trained.run_dir / name).read_bytes()
        with Image.open(tmp_path / name) as picture:
            assert np.asarray(picture).std() > 5


def test_the_answer_follows_the_numbers():
    random = np.random.default_rng(0)
    sizes, losses = random.uniform(1, 2, 300), random.uniform(1, 2, 300)

    def moment(norms: np.ndarray) -> script.Moment:
        nothing = np.zeros(300)
        noise = gradient_noise_scale(np.ones(4), 1.0)
        return script.Moment("", 0, norms, nothing, losses, nothing, norms, noise)

    assert script.partner(moment(sizes), sizes) == "the size of the image (rank correlation 1.00)"
    assert script.partner(moment(losses**2), sizes) == "the loss (rank correlation 1.00)"
    assert script.partner(moment(random.uniform(size=300)), sizes).startswith("neither the loss")
    assert list(script.largest(losses)) == list(np.argsort(losses)[:-4:-1])


def test_the_loss_is_exact_where_a_probability_rounds_to_one():
    logits = np.array([[40, 0, -1e4], [0, 40, 0], [1, 1, 1]], np.float32)
    found = script.losses(logits, np.array([0, 0, 2], np.uint8))
    assert np.allclose(found, [np.exp(-40.0), 40, np.log(3)], rtol=1e-12, atol=0)


def test_no_image_is_refused(trained: Result):
    with pytest.raises(ConfigError, match="--examples is 0"):
        script.main([str(trained.run_dir), "--examples", "0"])


@pytest.mark.parametrize("values", [np.zeros(9), np.array([0, 1e-30, *[3.0] * 7])])
def test_gradients_of_zero_are_drawn_without_a_fault(values: np.ndarray, tmp_path: Path):
    points = per_example_figures.Points("at 1 $ or 2 $", values, values, values > 1)
    per_example_figures.gradient_norms(tmp_path / "norms.png", [points] * 2)
    with Image.open(tmp_path / "norms.png") as picture:
        assert picture.width > 500
