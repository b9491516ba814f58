"""The edges of what can be computed: exact, finite, or refused with the step that was at fault."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlp_research.checkpoints.checkpoint import Checkpoints
from mlp_research.config import Config, EvaluationConfig, Execution, TrainConfig
from mlp_research.data import IdxConfig
from mlp_research.data.idx import DataError
from mlp_research.errors import ConfigError
from mlp_research.fit import fit
from mlp_research.models import MixerConfig, MLPConfig, ModelConfig, ResidualConfig
from mlp_research.objectives import CrossEntropy, cross_entropy, is_correct
from mlp_research.optimizers import AdamConfig, LionConfig, OptimizerConfig, SGDConfig
from mlp_research.programs.single import Experiment
from mlp_research.run import NonFiniteError
from mlp_research.terminal.report import Report
from tests.made import (
    TEST_ROWS,
    VALIDATION_ROWS,
    arrays_of,
    initial_state,
    small_config,
    small_execution,
    train_through,
    write_data,
    write_idx,
)

Tally = Callable[[str, int, int, str], None]
QUIET = Report(quiet=True)


def lines_of(run_dir: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


# Name, fields of the config, fields of the execution, steps of the run.
EDGES: list[tuple[str, dict[str, Any], dict[str, Any], int]] = [
    (
        "one example, one step, validation of one",
        {
            "data": IdxConfig(validation=1, limit=1),
            "train": TrainConfig(epochs=1, batch_size=1),
            "model": MLPConfig(widths=(1,)),
        },
        {"steps_per_call": 1000, "evaluation_batch_size": 1},
        1,
    ),
    (
        "batch of one, a call longer than the run",
        {
            "data": IdxConfig(validation=1, limit=5),
            "train": TrainConfig(epochs=2, batch_size=1),
            "model": MLPConfig(widths=(1, 1), normalisation="layer", dropout=0.5),
        },
        {"steps_per_call": 1000},
        10,
    ),
    (
        "one step an epoch, evaluated at once",
        {
            "train": TrainConfig(epochs=2, batch_size=200),
            "model": ResidualConfig(width=1, blocks=1, expansion=1),
        },
        {"evaluation_batch_size": 1000},
        2,
    ),
    (
        "no hidden layer, no validation",
        {
            "data": IdxConfig(validation=0),
            "train": TrainConfig(epochs=1, batch_size=120),
            "model": MLPConfig(widths=()),
            "evaluation": EvaluationConfig(train_rows=1),
        },
        {"steps_per_call": 1},
        2,
    ),
    (
        "a mixer of width one",
        {
            "train": TrainConfig(epochs=1, batch_size=100),
            "objective": CrossEntropy(label_smoothing=0.99),
            "model": MixerConfig(patch_size=1, width=1, blocks=1, token_width=1, channel_width=1),
        },
        {},
        2,
    ),
]


@pytest.mark.parametrize(
    ("fields", "execution", "steps"),
    [pytest.param(*e[1:], marks=[pytest.mark.long] * (i > 2)) for i, e in enumerate(EDGES)],
    ids=[e[0] for e in EDGES],
)
def test_the_smallest_runs_end_with_exact_counts_and_finite_numbers(
    fields: dict[str, Any],
    execution: dict[str, Any],
    steps: int,
    data_dir: Path,
    tmp_path: Path,
    tally: Tally,
):
    config = small_config(**fields)
    result = fit(
        config, small_execution(data_dir, **execution), run_dir=tmp_path / "run", report=QUIET
    )
    summary, lines = result.summary, lines_of(tmp_path / "run")
    assert summary["steps"] == steps and summary["test"]["total"] == TEST_ROWS
    assert [line["step"] for line in lines if line["split"] == "train"] == [*range(1, steps + 1)]
    held_out = config.data.validation
    assert ("validation" in summary) == (held_out > 0)
    if held_out:
        assert summary["validation"]["total"] == held_out
    assert all(np.isfinite(leaf).all() for leaf in arrays_of(result.model))
    written = [value for line in lines for value in line.values() if isinstance(value, float)]
    assert np.isfinite(written).all()
    tally("the smallest run: one example, step, row, unit", 1, 1, "nothing: exact counts")


def test_a_data_set_of_one_class_is_refused(tmp_path: Path):
    folder = write_data(tmp_path)
    for part, rows in (("train", 240), ("t10k", TEST_ROWS)):
        write_idx(folder / f"{part}-labels-idx1-ubyte", np.zeros(rows, np.uint8))
    with pytest.raises(DataError, match="at least 2 classes"):
        fit(small_config(), small_execution(folder), run_dir=tmp_path / "run", report=QUIET)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"train": TrainConfig(epochs=2**31 // 12 + 1, batch_size=16)}, ["train.epochs", "2147"]),
        ({"train": TrainConfig(epochs=10**30, batch_size=16)}, ["train.epochs", "2147483647"]),
    ],
)
def test_more_steps_than_can_be_counted_are_refused(
    fields: dict[str, Any], words: list[str], data_dir: Path
):
    with pytest.raises(ConfigError) as caught:
        Experiment.of(small_config(**fields), small_execution(data_dir))
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("rate", [1e-46, 1e39, 1e300])
@pytest.mark.parametrize("field", ["learning_rate", "clip_norm"])
def test_a_number_that_float32_cannot_hold_is_refused(rate: float, field: str):
    values: dict[str, Any] = {field: rate}
    with pytest.raises(ConfigError, match=f"{field} is .*it must be [<>]="):
        SGDConfig(**values)


def first_fault(config: Config, execution: Execution) -> int | None:
    """The first step whose loss or gradient is not finite, by the compiled steps alone."""
    metrics = train_through(Experiment.of(config, execution))[1]
    finite = np.isfinite(metrics["loss"]) & np.isfinite(metrics["gradient_norm"])
    return None if finite.all() else int(np.argmin(finite)) + 1


RATES: list[OptimizerConfig] = [
    SGDConfig(learning_rate=30.0),
    SGDConfig(learning_rate=1e30),
    SGDConfig(learning_rate=3e38, momentum=0),
    AdamConfig(learning_rate=1e30),
    LionConfig(learning_rate=1e38),
]


@pytest.mark.parametrize(
    "rules", [RATES[1:3], pytest.param(RATES, marks=pytest.mark.long)], ids=["short", "long"]
)
def test_a_rate_that_overflows_is_named_with_the_step_it_showed_at(
    rules: list[OptimizerConfig], data_dir: Path, tmp_path: Path, tally: Tally
):
    for number, rule in enumerate(rules):
        config, execution = small_config(optimizer=rule), small_execution(data_dir)
        step, run_dir = first_fault(config, execution), tmp_path / str(number)
        if step is None:
            assert fit(config, execution, run_dir=run_dir, report=QUIET).summary["steps"] == 24
            continue
        with pytest.raises(NonFiniteError, match=f" at step {step}: lower") as caught:
            fit(config, execution, run_dir=run_dir, report=QUIET)
        assert f"({rule.learning_rate:g})" in str(caught.value)
        assert not (run_dir / "result.json").exists()
        written = [line["step"] for line in lines_of(run_dir) if line["split"] == "train"]
        assert written == [*range(1, step)], "only the finite steps stand in metrics.jsonl"
    seen = "the step, the loss, the gradient norm and what to lower; exit code 1"
    tally("learning rate that overflows", len(rules), len(rules), seen)


def wild(validation: int) -> Config:
    """One step an epoch, itself finite, whose update makes parameters that are not."""
    return small_config(
        data=IdxConfig(validation=validation),
        train=TrainConfig(epochs=3, batch_size=200),
        model=MLPConfig(widths=(8,)),
        optimizer=SGDConfig(learning_rate=3e38, weight_decay=3e38, momentum=0.0),
    )


@pytest.mark.parametrize(
    ("validation", "words"),
    [(VALIDATION_ROWS, "validation loss nan"), (0, "the update makes parameters")],
)
def test_a_step_that_spoils_the_parameters_is_never_saved_as_good(
    validation: int, words: str, data_dir: Path, tmp_path: Path
):
    run_dir = tmp_path / "run"
    with pytest.raises(NonFiniteError, match=f"{words}.* at step 1: lower .*; none was saved"):
        fit(wild(validation), small_execution(data_dir), run_dir=run_dir, report=QUIET)
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        assert checkpoints.steps == []
    assert not (run_dir / "result.json").exists()
    for line in lines_of(run_dir):
        assert np.isfinite([v for v in line.values() if isinstance(v, float)]).all()


def reference(logits: np.ndarray, label: int, smoothing: float) -> tuple[float, np.ndarray]:
    """(loss, gradient with respect to the logits) in float64."""
    exact = logits.astype(np.float64)
    shifted = exact - exact.max()
    log_probabilities = shifted - np.log(np.exp(shifted).sum())
    target = np.full(len(exact), smoothing / len(exact))
    target[label] += 1 - smoothing
    return float(-(target * log_probabilities).sum()), np.exp(log_probabilities) - target


@jax.jit
def ours(logits: Any, label: Any, smoothing: Any) -> Any:
    return jax.value_and_grad(cross_entropy)(logits, label, smoothing)


@jax.jit
def optax_loss(logits: Any, label: Any, smoothing: Any) -> Any:
    def loss(logits: Any) -> Any:
        target = optax.smooth_labels(jax.nn.one_hot(label, len(logits)), smoothing)
        return optax.softmax_cross_entropy(logits, target)

    return jax.value_and_grad(loss)(logits)


CLASSES = 7


@pytest.mark.parametrize("cases", [300, pytest.param(20_000, marks=pytest.mark.long)])
def test_loss_and_gradient_at_logits_of_ten_thousand_are_those_of_float64_and_optax(
    cases: int, tally: Tally
):
    tried = []

    @settings(
        max_examples=cases,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(
        st.lists(
            st.floats(-1e4, 1e4, width=32, allow_subnormal=False)
            | st.sampled_from([-1e4, 0.0, 1e4]),
            min_size=CLASSES,
            max_size=CLASSES,
        ),
        st.integers(0, CLASSES - 1),
        st.sampled_from([0.0, 0.1, 0.5, 0.99]),
    )
    def compare(values: list[float], label: int, smoothing: float) -> None:
        logits = np.asarray(values, np.float32)
        arguments = (jnp.asarray(logits), jnp.uint8(label), jnp.float32(smoothing))
        loss, gradient = reference(logits, label, float(np.float32(smoothing)))
        # A loss is a difference of logits: its rounding is theirs.
        tolerance: Any = {"rtol": 2e-6, "atol": 1e-6 * (1 + float(np.abs(logits).max()))}
        for found, slope in (ours(*arguments), optax_loss(*arguments)):
            np.testing.assert_allclose(found, loss, **tolerance)
            np.testing.assert_allclose(slope, gradient, rtol=1e-5, atol=2e-6)
        assert bool(is_correct(jnp.asarray(logits), jnp.uint8(label))) == (logits.argmax() == label)
        tried.append(label)

    compare()
    seen = "nothing: loss and gradient to float32's rounding"
    tally("logits of 1e4 against float64 and optax", len(tried), len(tried), seen)


MODELS: list[ModelConfig] = [
    MLPConfig(widths=(1,), normalisation="rms"),
    MLPConfig(widths=(1,), normalisation="layer"),
    ResidualConfig(width=1, blocks=1, expansion=1, gated=True, normalisation="layer"),
]


@pytest.mark.parametrize("model", MODELS, ids=["rms", "layer", "residual"])
def test_a_normalised_width_of_one_has_finite_gradients_on_a_black_image(
    model: ModelConfig, data_dir: Path
):
    built = model.build((4, 3), 3, key=jax.random.key(0))

    def loss(built: Any) -> Any:
        return cross_entropy(
            built(jnp.zeros(12), key=jax.random.key(1)), jnp.uint8(1), jnp.float32(0)
        )

    for leaf in jax.tree.leaves(eqx.filter_grad(loss)(built)):
        assert np.isfinite(leaf).all()


def test_the_state_is_untouched_by_a_chunk_that_has_no_step(data_dir: Path):
    experiment = Experiment.of(small_config(), small_execution(data_dir))
    state = initial_state(experiment)
    before = arrays_of(state)
    after = arrays_of(experiment.compile(state))
    assert all(one.tobytes() == two.tobytes() for one, two in zip(before, after, strict=True))
