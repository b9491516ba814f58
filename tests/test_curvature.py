"""Curvature without a matrix, held against the dense matrices of small models."""

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from jaxtyping import Array

from mlp_research.analysis import curvature
from mlp_research.analysis.curvature import Curvature, CurvatureError, Matrix
from mlp_research.config import Config
from mlp_research.data.batches import Batch
from mlp_research.errors import ConfigError
from mlp_research.models import MixerConfig, MLPConfig, Model, ResidualConfig
from mlp_research.optimizers import SGDConfig
from mlp_research.optimizers.schedules import LinearConfig
from tests import processes
from tests.test_pulse import call

MATRICES: tuple[Matrix, ...] = ("hessian", "gauss-newton")
SHAPE, CLASSES, EXAMPLES = (4, 3), 3, 48
TOLERANCES = {"float32": 1e-4, "float64": 1e-9}
MODELS = {
    "mlp": MLPConfig(widths=(6,), dropout=0.5),
    "normalised mlp": MLPConfig(widths=(6,), normalisation="layer", activation="tanh"),
    "residual": ResidualConfig(width=6, blocks=1),
    "mixer": MixerConfig(patch_size=1, width=4, blocks=1),
}


@contextlib.contextmanager
def precision(dtype: str) -> Iterator[None]:
    with jax.enable_x64(dtype == "float64"):
        yield


def made_batch(examples: int = EXAMPLES) -> Batch:
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (examples, SHAPE[0] * SHAPE[1])).astype(np.uint8)
    return Batch(images, random.integers(0, CLASSES, examples).astype(np.uint8))


def cast(model: Any, dtype: Any) -> Any:
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    return eqx.combine(jax.tree.map(lambda leaf: leaf.astype(dtype), parameters), static)


def moved(model: Any) -> Any:
    """The model with parameters that are all different from their initial values, biases too."""
    parameters, static = eqx.partition(model, eqx.is_inexact_array)
    flat, unravel = ravel_pytree(parameters)
    noise = np.random.default_rng(1).normal(size=flat.shape)
    return eqx.combine(unravel(flat + 0.3 * jnp.asarray(noise, flat.dtype)), static)


def smooth_model(dtype: str = "float32", widths: tuple[int, ...] = (8, 6)) -> Model:
    """179 parameters, and a loss with two derivatives everywhere. Same numbers in any precision."""
    with precision("float32"):
        config = MLPConfig(widths=widths, activation="tanh")
        model = moved(config.build(SHAPE, CLASSES, key=jr.key(0)))
    with precision(dtype):
        return cast(model, dtype)


def oracle(model: Model, batch: Batch, matrix: Matrix) -> np.ndarray:
    """The dense matrix in float64, from its definition."""
    with precision("float64"):
        parameters, static = eqx.partition(
            eqx.nn.inference_mode(cast(model, "float64")), eqx.is_inexact_array
        )
        flat, unravel = ravel_pytree(parameters)
        images = np.asarray(batch.images) / 255
        targets = jax.nn.one_hot(batch.labels, CLASSES, dtype="float64")

        def logits(flat: Array) -> Array:
            return jax.vmap(eqx.combine(unravel(flat), static))(jnp.asarray(images))

        def loss(flat: Array) -> Array:
            return -(targets * jax.nn.log_softmax(logits(flat))).sum(axis=1).mean()

        if matrix == "hessian":
            return np.asarray(jax.jit(jax.hessian(loss))(flat))
        jacobian = np.asarray(jax.jit(jax.jacobian(logits))(flat))
        chances = np.asarray(jax.nn.softmax(logits(flat)))
        inner = np.stack([np.diag(p) - np.outer(p, p) for p in chances]) / len(chances)
        return np.einsum("bip,bij,bjq->pq", jacobian, inner, jacobian)


@functools.cache
def smooth_oracle(matrix: Matrix) -> np.ndarray:
    return oracle(smooth_model(), made_batch(), matrix)


def dense(product: Curvature) -> np.ndarray:
    """The matrix whose products are taken, column by column."""
    flat, unravel = ravel_pytree(product.parameters)
    columns = jax.jit(
        jax.vmap(lambda column: ravel_pytree(product(unravel(column)))[0], out_axes=1)
    )
    return np.asarray(columns(jnp.eye(flat.size, dtype=flat.dtype)))


def distance(found: Any, expected: Any) -> float:
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("matrix", MATRICES)
def test_products_are_those_of_the_dense_matrix(matrix: Matrix, dtype: str):
    model, batch = smooth_model(dtype), made_batch()
    expected = smooth_oracle(matrix)
    with precision(dtype):
        found = dense(Curvature(model, batch, matrix))
    assert found.dtype == dtype
    assert distance(found, expected) < TOLERANCES[dtype]
    assert distance(found, found.T) < TOLERANCES[dtype]


def test_hessian_and_gauss_newton_differ_and_only_one_is_semidefinite():
    with precision("float64"):
        hessian, gauss_newton = (
            dense(Curvature(smooth_model("float64"), made_batch(), matrix)) for matrix in MATRICES
        )
    assert np.linalg.eigvalsh(hessian)[0] < -1e-2
    assert np.linalg.eigvalsh(gauss_newton)[0] > -1e-12
    assert distance(hessian, gauss_newton) > 0.1


@pytest.mark.parametrize("matrix", MATRICES)
def test_softmax_regression_has_its_closed_form(matrix: Matrix):
    """The mean of (diag p - p p^T) kron x x^T, where x ends with a one for the bias."""
    batch = made_batch()
    with precision("float64"):
        model = smooth_model("float64", widths=())
        images = jnp.asarray(batch.images / 255)
        chances = np.asarray(jax.nn.softmax(jax.vmap(model)(images)))
        inputs = np.hstack([np.asarray(images), np.ones((EXAMPLES, 1))])
        terms = zip(chances, inputs, strict=True)
        terms = [np.kron(np.diag(p) - np.outer(p, p), np.outer(x, x)) for p, x in terms]
        expected = np.mean(terms, axis=0)
        found = dense(Curvature(model, batch, matrix))
    # The package's order is all weights, then all biases; that of kron is a class after the other.
    pixels = inputs.shape[1] - 1
    at = np.arange(CLASSES * (pixels + 1)).reshape(CLASSES, pixels + 1)
    order = np.concatenate([at[:, :-1].ravel(), at[:, -1]])
    assert distance(found, expected[np.ix_(order, order)]) < 1e-12


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name == "mixer"))
        for name in (*MODELS, "eqx.nn.MLP")
    ],
)
def test_every_model_has_products_and_its_randomness_is_off(name: str):
    """Against central differences of the gradient, in float64."""
    batch = made_batch(10)
    pixels = SHAPE[0] * SHAPE[1]
    if name == "eqx.nn.MLP":
        model: Any = eqx.nn.MLP(pixels, CLASSES, 6, 1, jnp.tanh, key=jr.key(0))
    else:
        model = MODELS[name].build(SHAPE, CLASSES, key=jr.key(0))
    with precision("float64"):
        model = moved(cast(model, "float64"))
        parameters, static = curvature.partition(model)
        flat, unravel = ravel_pytree(parameters)
        direction = jnp.asarray(np.random.default_rng(2).normal(size=flat.shape))

        @jax.jit
        def gradient(flat: Array) -> Array:
            return jax.grad(lambda at: curvature.mean_loss(unravel(at), static, batch))(flat)

        up, down = gradient(flat + 1e-5 * direction), gradient(flat - 1e-5 * direction)
        vector = unravel(direction)
        found = eqx.filter_jit(curvature.hessian_vector_product)(model, batch, vector)
        assert jax.tree.structure(found) == jax.tree.structure(parameters)
        assert distance(ravel_pytree(found)[0], (up - down) / 2e-5) < 1e-6
        found = eqx.filter_jit(curvature.gauss_newton_vector_product)(model, batch, vector)
        assert jax.tree.structure(found) == jax.tree.structure(parameters)
        # v^T J^T H_L J v, where J v is the difference of the logits.
        logits = [
            np.asarray(curvature.logits(unravel(flat + sign * 1e-5 * direction), static, batch))
            for sign in (1, 0, -1)
        ]
        pushed, chances = (logits[0] - logits[2]) / 2e-5, np.asarray(jax.nn.softmax(logits[1]))
        expected = ((chances * pushed**2).sum(axis=1) - (chances * pushed).sum(axis=1) ** 2).mean()
        assert abs(direction @ ravel_pytree(found)[0] / expected - 1) < 1e-6


@pytest.mark.parametrize("matrix", MATRICES)
def test_microbatches_change_memory_and_not_the_product(matrix: Matrix):
    batch = made_batch(4096)
    model = smooth_model()
    vector = jax.tree.map(jnp.cos, curvature.partition(model)[0])
    memory, products = [], []
    for microbatch in (None, 64):
        product = Curvature(model, batch, matrix, microbatch)
        compiled = jax.jit(lambda vector, at=product: at(vector)).lower(vector).compile()
        analysis = compiled.memory_analysis()
        assert analysis is not None
        memory.append(analysis.temp_size_in_bytes)
        products.append(ravel_pytree(compiled(vector))[0])
    assert distance(products[1], products[0]) < 1e-5
    assert memory[1] < memory[0] / 4


def test_microbatches_of_unequal_size_are_refused():
    product = Curvature(smooth_model(), made_batch(), "hessian", 7)
    with pytest.raises(ConfigError, match="48 examples cannot be taken 7 at a time"):
        product(product.parameters)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("matrix", MATRICES)
def test_the_ten_largest_eigenvalues_are_those_of_the_dense_matrix(matrix: Matrix, dtype: str):
    model, batch = smooth_model(dtype), made_batch()
    expected = smooth_oracle(matrix)
    with precision(dtype):
        product = Curvature(model, batch, matrix)
        tolerance = {"float32": 1e-4, "float64": 1e-7}[dtype]
        pairs = curvature.top_eigenvalues(
            product, product.parameters, 10, key=jr.key(0), tolerance=tolerance
        )
        flat = [
            ravel_pytree(jax.tree.map(lambda leaf, index=index: leaf[index], pairs.vectors))[0]
            for index in range(10)
        ]
        vectors = np.stack(flat).astype(np.float64)
    assert pairs.values.dtype == dtype
    values = np.asarray(pairs.values, np.float64)
    np.testing.assert_allclose(values, np.linalg.eigvalsh(expected)[::-1][:10], rtol=1e-4)
    assert np.abs(vectors @ vectors.T - np.eye(10)).max() < 10 * TOLERANCES[dtype]
    residuals = np.linalg.norm(vectors @ expected - values[:, None] * vectors, axis=1) / values
    assert residuals.max() < tolerance + 1e-5 * (dtype == "float32")


def diagonal(entries: Array) -> curvature.MatrixProduct:
    return lambda vector: entries * vector


def test_the_reported_residual_is_the_true_one():
    """At so small a depth that the residual is far from rounding."""
    entries = jnp.linspace(0.0, 1.0, 400)
    pairs = curvature.top_eigenvalues(
        diagonal(entries), entries, 3, key=jr.key(0), tolerance=1.0, deepest=30
    )
    errors = entries[None] * pairs.vectors - pairs.values[:, None] * pairs.vectors
    true = jnp.linalg.norm(errors, axis=1) / pairs.values
    assert true[0] > 1e-3
    np.testing.assert_allclose(pairs.residuals, true, rtol=1e-3)


def test_depth_grows_until_the_residual_is_small_enough():
    entries = jnp.linspace(0.0, 1.0, 400)
    tolerances = (1.0, 1e-2, 1e-4)
    found = [
        curvature.top_eigenvalues(diagonal(entries), entries, 3, key=jr.key(0), tolerance=tolerance)
        for tolerance in tolerances
    ]
    assert found[0].depth == 30 < found[1].depth < found[2].depth <= 400
    for pairs, tolerance in zip(found, tolerances, strict=True):
        assert pairs.residuals.max() <= tolerance


def test_largest_means_largest_and_not_farthest_from_zero():
    entries = jnp.asarray([-10.0, 2.0, -7.0, 1.0, 0.5, -0.1])
    pairs = curvature.top_eigenvalues(diagonal(entries), entries, 3, key=jr.key(0))
    np.testing.assert_allclose(pairs.values, [2.0, 1.0, 0.5], rtol=1e-5)


def test_an_eigenvalue_that_was_not_reached_is_refused():
    entries = jnp.linspace(0.0, 1.0, 400)
    with pytest.raises(CurvatureError, match=r"residual .* after 40 Lanczos steps, not 1e-05"):
        curvature.top_eigenvalues(
            diagonal(entries), entries, 3, key=jr.key(0), tolerance=1e-5, deepest=40
        )


def test_what_cannot_be_asked_for_is_refused():
    entries = jnp.arange(1.0, 5.0)
    with pytest.raises(ConfigError, match="5 eigenvalues of 4 parameters"):
        curvature.top_eigenvalues(diagonal(entries), entries, 5, key=jr.key(0))
    with pytest.raises(ConfigError, match="depth is 5"):
        curvature.spectral_density(diagonal(entries), entries, key=jr.key(0), depth=5)
    with pytest.raises(ConfigError, match="probes is 1"):
        curvature.trace(diagonal(entries), entries, key=jr.key(0), probes=1)


def test_a_curvature_that_is_not_finite_is_refused():
    model = jax.tree.map(
        lambda leaf: leaf * jnp.nan if eqx.is_array(leaf) else leaf, smooth_model(widths=())
    )
    product = Curvature(model, made_batch())
    for measure in (
        lambda: curvature.trace(product, product.parameters, key=jr.key(0)),
        lambda: curvature.top_eigenvalues(product, product.parameters, 2, key=jr.key(0)),
        lambda: curvature.spectral_density(product, product.parameters, key=jr.key(0), depth=4),
    ):
        with pytest.raises(CurvatureError, match="not finite"):
            measure()


def standard_error(matrix: np.ndarray, probes: int) -> float:
    """Of the trace by random signs, whose products are 1 on the diagonal: Hutchinson's theorem."""
    return np.sqrt(2 * ((matrix**2).sum() - (np.diag(matrix) ** 2).sum()) / probes)


@pytest.mark.parametrize("matrix", MATRICES)
def test_the_trace_and_its_standard_error_are_those_of_the_dense_matrix(matrix: Matrix):
    model, batch = smooth_model(), made_batch()
    expected = smooth_oracle(matrix)
    product = Curvature(model, batch, matrix)
    for probes, doubt in ((64, 0.4), (64 * 16, 0.1)):
        found = curvature.trace(product, product.parameters, key=jr.key(0), probes=probes)
        said = float(found.standard_error)
        assert abs(said / standard_error(expected, probes) - 1) < doubt
        assert abs(float(found.mean) - np.trace(expected)) < 3 * said


@pytest.mark.parametrize("matrix", MATRICES)
def test_the_densitys_moments_and_shape_are_those_of_the_dense_spectrum(matrix: Matrix):
    model, batch = smooth_model(), made_batch()
    expected = smooth_oracle(matrix)
    eigenvalues = np.linalg.eigvalsh(expected)
    product = Curvature(model, batch, matrix)
    density = curvature.spectral_density(
        product, product.parameters, key=jr.key(0), probes=256, depth=24
    )
    for order in (1, 2, 3):
        moment, said = density.moment(order), float(density.moment(order).standard_error)
        of_trace = standard_error(np.linalg.matrix_power(expected, order), 256)
        assert abs(said / (of_trace / len(expected)) - 1) < 0.25
        assert abs(float(moment.mean) - np.mean(eigenvalues**order)) < 3 * said
    width = 0.1 * eigenvalues[-1]
    grid = np.linspace(eigenvalues[0] - 4 * width, eigenvalues[-1] + 4 * width, 400)
    bells = np.exp(-(((grid[:, None] - eigenvalues[None]) / width) ** 2) / 2)
    expected = bells.mean(axis=1) / (width * np.sqrt(2 * np.pi))
    found = np.asarray(density.smoothed(jnp.asarray(grid, jnp.float32), width))
    assert np.abs(found - expected).sum() < 0.02 * expected.sum()
    assert abs(found.sum() * (grid[1] - grid[0]) - 1) < 1e-3


def test_a_second_state_of_a_model_compiles_nothing():
    traces = []

    class Counted(eqx.Module):
        product: Curvature

        def __call__(self, vector: Any) -> Any:
            traces.append(1)
            return self.product(vector)

    def measure(model: Model) -> None:
        product = Counted(Curvature(model, made_batch()))
        like = product.product.parameters
        curvature.trace(product, like, key=jr.key(0))
        curvature.top_eigenvalues(product, like, 2, key=jr.key(0))
        curvature.spectral_density(product, like, key=jr.key(0), depth=8)

    model = smooth_model()
    measure(model)
    before = len(traces)
    measure(jax.tree.map(lambda leaf: 1.01 * leaf if eqx.is_array(leaf) else leaf, model))
    assert len(traces) == before > 0


def test_the_script_leaves_pictures_and_numbers_that_agree(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    data_dir: Path,
):
    run_dir = tmp_path / "run"
    small = ("--data.dir", data_dir, "--data.validation", 40, "--mesh.data", 1)
    words = ("--model.widths", 8, "--train.batch-size", 20, "--train.epochs", 3)
    call(monkeypatch, "train", *small, *words, "--run-dir", run_dir)
    capsys.readouterr()
    words = ("--mesh.data", 1, "--top", 3, "--depth", 20)
    call(monkeypatch, "curvature", run_dir, *words, "--points", 4)
    printed = capsys.readouterr().out
    for name in ("spectrum.png", "sharpness.png"):
        assert (run_dir / name).stat().st_size > 10_000
    numbers = json.loads((run_dir / "curvature.json").read_text())
    assert [point["step"] for point in numbers["sharpness"]] == [0, 10, 20, 30]
    assert [spectrum["step"] for spectrum in numbers["spectra"]] == [0, 30]
    assert numbers["examples"] == 200 and numbers["parameters"] == 131
    for spectrum, point in zip(numbers["spectra"], numbers["sharpness"][::3], strict=True):
        assert spectrum["loss"] == point["loss"]
        assert abs(spectrum["eigenvalues"][0] / point["hessian"] - 1) < 1e-5
        assert f"{spectrum['eigenvalues'][0]:.5g}" in printed
        assert np.shape(spectrum["nodes"]) == np.shape(spectrum["weights"]) == (4, 20)
    call(monkeypatch, "curvature", run_dir, *words, "--matrix", "gauss-newton", "--points", 2)
    numbers = json.loads((run_dir / "curvature-gauss-newton.json").read_text())
    point = numbers["sharpness"][-1]
    assert abs(numbers["spectra"][1]["eigenvalues"][0] / point["gauss-newton"] - 1) < 1e-5


def test_only_plain_gradient_descent_has_a_threshold():
    script = processes.load_script("curvature")

    def threshold(**fields: Any) -> float | None:
        return script.threshold(Config(**fields))

    assert threshold(optimizer=SGDConfig(learning_rate=0.05, momentum=0.0)) == 40
    assert threshold() is None
    assert threshold(optimizer=SGDConfig(momentum=0.9)) is None
    assert threshold(optimizer=SGDConfig(momentum=0.0, clip_norm=1.0)) is None
    linear = LinearConfig()
    assert threshold(optimizer=SGDConfig(momentum=0.0), schedule=linear) is None
