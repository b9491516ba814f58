"""One check for each law of the house. Each raises AssertionError where its law is broken."""

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import numpy as np
import pytest

from mlp_research.config import Config
from mlp_research.data.batches import Split
from mlp_research.errors import ConfigError
from mlp_research.fit import Result, fit
from mlp_research.optimizers import AdamWConfig
from mlp_research.prng import stream_key
from mlp_research.programs.members import Members
from mlp_research.programs.single import Experiment
from mlp_research.system import sharding
from mlp_research.system.stopping import Stopped
from mlp_research.terminal.report import Report
from tests.made import (
    CLASSES,
    TEST_ROWS,
    TRAIN_ROWS,
    WitnessConfig,
    arrays_of,
    assert_bitwise,
    initial_state,
    joined,
    sightings_of,
    small_config,
    small_execution,
    train_through,
    witnessed,
)

fit_module = import_module("mlp_research.fit")  # as an attribute, `fit` is the function


def experiment_of(data_dir: Path, execution: dict[str, Any] | None = None, **fields: Any):
    return Experiment.of(small_config(**fields), small_execution(data_dir, **(execution or {})))


def one_seed_reaches_everything(data_dir: Path) -> None:
    """Law 1: neighbouring seeds have no epoch's order, no initial weight, no mask in common."""
    runs = [experiment_of(data_dir, seed=seed) for seed in (0, 1, 2)]
    orders = [run.plan.permutation(epoch).tobytes() for run in runs for epoch in range(3)]
    assert len(set(orders)) == len(orders), "two epochs share an order"
    for left, right in itertools.combinations(runs, 2):
        for one, other in zip(
            arrays_of(initial_state(left).model), arrays_of(initial_state(right).model), strict=True
        ):
            # Biases begin at zero for every seed; all else is drawn.
            assert not np.any((one == other) & (one != 0)), "an initial weight is shared"
    keys = [
        arrays_of(stream_key(seed, name))[0].tobytes()
        for seed in (0, 1, 2)
        for name in ("init", "dropout")
    ]
    assert len(set(keys)) == len(keys), "two streams share a key"
    seen = [
        mask
        for seed in (0, 1)
        for _, mask in sightings_of(experiment_of(data_dir, seed=seed, model=WitnessConfig()))
    ]
    assert len(set(seen)) == len(seen), "a dropout mask is used twice"


def same_seed_same_bits(data_dir: Path) -> None:
    """Law 2: the same seed twice gives the same parameters and metrics, to the bit."""
    (state, metrics), (again, again_metrics) = (
        train_through(experiment_of(data_dir)) for _ in range(2)
    )
    assert_bitwise(state, again)
    assert_bitwise(list(metrics.values()), list(again_metrics.values()))


def fit_quietly(data_dir: Path, run_dir: Path, *, resume: bool = False, **execution: Any) -> Result:
    return fit(
        small_config(epochs=3),
        small_execution(data_dir, **execution),
        run_dir=run_dir,
        resume=resume,
        report=Report(quiet=True),
    )


def lasting_lines(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what may differ between equal runs."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: line[name] for name in line if not name.endswith(("_seconds", "_per_second"))}
        for line in lines
    ]


def resume_is_exact(data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Law 3: stopped within an epoch or at its end, a resumed run ends as if unstopped."""
    whole = fit_quietly(data_dir, tmp_path / "whole")
    record = fit_module.record_steps
    for stop_after in (5, 12, 22):

        def record_then_ask(run, metrics, start, steps, stop_after=stop_after):
            record(run, metrics, start, steps)
            if start + steps == stop_after:
                run.stop.signal = 15

        run_dir = tmp_path / f"stopped-{stop_after}"
        monkeypatch.setattr(fit_module, "record_steps", record_then_ask)
        with pytest.raises(Stopped):
            fit_quietly(data_dir, run_dir)
        monkeypatch.setattr(fit_module, "record_steps", record)
        # What a kill leaves beyond the checkpoint: whole lines, and a torn one.
        with (run_dir / "metrics.jsonl").open("a") as file:
            file.write('{"split": "train", "step": 99}\n{"split": "tr')
        resumed = fit_quietly(data_dir, run_dir, resume=True)
        assert_bitwise(resumed.model, whole.model)
        assert lasting_lines(run_dir) == lasting_lines(whole.run_dir)
        assert resumed.summary["test"] == whole.summary["test"]


def device_count_changes_only_rounding(data_dir: Path) -> None:
    """Law 4: 1, 2 and 8 devices see the same batches and masks; losses agree to 1e-5."""
    runs = [
        experiment_of(data_dir, {"mesh_data": count}, model=WitnessConfig()) for count in (1, 2, 8)
    ]
    (_, alone, seen_alone), *others = ends = [witnessed(run) for run in runs]
    for _, metrics, seen in others:
        assert seen == seen_alone, "batches or masks differ"
        assert np.allclose(metrics["loss"], alone["loss"], rtol=1e-5, atol=0), "losses differ"
    evaluations = [
        run.evaluate(state.model, run.data.test)
        for run, (state, *_) in zip(runs, ends, strict=True)
    ]
    assert len({(e.correct, e.total) for e in evaluations}) == 1, "evaluation totals differ"


def chunk_length_changes_nothing(data_dir: Path) -> None:
    """Law 5: any number of steps a call, with the pixels on the device or not: the same bits."""
    executions = [{"steps_per_call": k} for k in (1, 7, 39, 1000)]
    executions += [{"steps_per_call": 7, "resident": False, "read_threads": n} for n in (0, 2)]
    ends = [train_through(experiment_of(data_dir, execution)) for execution in executions]
    for state, metrics in ends[1:]:
        assert_bitwise(state, ends[0][0])
        assert_bitwise(list(metrics.values()), list(ends[0][1].values()))


def a_member_is_the_single_run(data_dir: Path) -> None:
    """Law 6: members with dropout and their own settings are their single runs, to the bit."""
    configs = [
        small_config(seed=seed, optimizer=AdamWConfig(learning_rate=rate, clip_norm=clip))
        for seed, rate, clip in ((0, 1e-3, None), (1, 3e-3, 0.5), (1, 3e-2, None))
    ]
    members_are_their_single_runs(configs, data_dir)


def members_are_their_single_runs(
    configs: Sequence[Config], data_dir: Path
) -> list[dict[str, np.ndarray]]:
    """Return each member's metrics, which are those of its single run, to the bit."""
    execution = small_execution(data_dir)
    program = Members.of(configs, execution, "map")
    states, metrics = train_members(program)
    evaluations = program.evaluate_each(program.evaluated(states), program.data.test)
    for index, config in enumerate(configs):
        run = Experiment.of(config, execution)
        state, single = train_through(run)
        mine = program.unstack(eqx.filter(states, eqx.is_array))[index]
        assert_bitwise(mine, state)
        assert_bitwise(list(metrics[index].values()), list(single.values()))
        assert evaluations[index] == run.evaluate(run.evaluated(state), run.data.test)
    return metrics


def train_members(program: Members) -> tuple[Any, list[dict[str, np.ndarray]]]:
    """The final states of a program, and each member's metrics of every step."""
    states, plan = program.init(), program.chunk_plan(0)
    collected: list[list[Any]] = [[] for _ in program.configs]
    for chunk, (_, count) in zip(program.chunks(0), plan.spans(), strict=True):
        states, metrics = program.train_steps(states, program.recipe, chunk)
        for each, mine in zip(collected, program.unstack(jax.device_get(metrics)), strict=True):
            each.append(jax.tree.map(lambda values, n=count: values[:n], mine))
    return states, [joined(each) for each in collected]


def evaluation_is_exact(data_dir: Path) -> None:
    """Law 7: every row once, for every batch size and device count, against a loop over rows."""
    data = experiment_of(data_dir).data
    losses = []
    for devices, batch_size in ((1, 1), (1, 37), (1, 70), (1, 1000), (2, 64), (8, 16)):
        run = experiment_of(data_dir, {"mesh_data": devices, "evaluation_batch_size": batch_size})
        model = initial_state(run).model
        evaluation = run.evaluate(model, data.test)
        logits = reference_logits(model, data.test)
        assert isinstance(evaluation.correct, int)
        assert evaluation.total == TEST_ROWS
        assert evaluation.correct == int((logits.argmax(axis=1) == data.test.labels).sum())
        losses.append(evaluation.loss)
        shifted = logits - logits.max(axis=1, keepdims=True)
        chosen = shifted[np.arange(TEST_ROWS), data.test.labels]
        expected = (np.log(np.exp(shifted).sum(axis=1)) - chosen).mean()
        np.testing.assert_allclose(evaluation.loss, expected, rtol=1e-6)
    np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def reference_logits(model: Any, split: Split) -> np.ndarray:
    """The logits of an MLP by numpy in float64."""
    hidden = split.images.astype(np.float64) / 255
    for depth, layer in enumerate(model.layers):
        hidden = hidden @ np.asarray(layer.weight, np.float64).T + np.asarray(layer.bias)[None]
        if depth < len(model.layers) - 1:
            hidden = np.maximum(hidden, 0)
    assert hidden.shape == (len(split), CLASSES)
    return hidden


def held_out_rows_are_never_trained_on(data_dir: Path) -> None:
    """Law 8: a whole run sees every training row, and no row that is held out."""
    for resident in (True, False):
        run = experiment_of(data_dir, {"resident": resident}, epochs=4, model=WitnessConfig())
        rows = {row for row, _ in sightings_of(run)}
        assert max(rows) < TRAIN_ROWS, f"held-out row {max(rows)} was trained on"
        assert rows == set(range(TRAIN_ROWS)), "a training row was never seen"


def each_function_is_compiled_once(data_dir: Path, tmp_path: Path) -> None:
    """Law 9: a whole run, evaluations included, traces each compiled function once."""
    try:
        fit_quietly(data_dir, tmp_path / "run", steps_per_call=5)
    except RuntimeError as error:
        raise AssertionError(f"traced again: {error}") from error


@contextlib.contextmanager
def refused(message: str) -> Iterator[None]:
    """The block raises a `ConfigError` whose text matches."""
    try:
        yield
    except ConfigError as error:
        assert re.search(message, str(error)), f"{error} does not say {message}"
    else:
        raise AssertionError(f"accepted what should be refused: {message}")


def nothing_is_repaired_silently(data_dir: Path, tmp_path: Path) -> None:
    """Law 10: wrong input is refused with the numbers and the mend, and leaves no folder."""
    with refused("batch_size 130 must divide by 4 devices: use 128 or 132"):
        experiment_of(data_dir, {"mesh_data": 4}, batch_size=130)
    cases = [
        ({"batch_size": 201}, {}, "train.batch_size is 201, .* 200 training rows: use at most 200"),
        ({}, {"mesh_data": 9}, "mesh.data 9 x mesh.model 1 needs 9 devices, but there are 8"),
        (
            {},
            {"mesh_data": 8, "evaluation_batch_size": 12},
            "12 must divide by 8 devices: use 8 or 16",
        ),
    ]
    for number, (fields, execution, message) in enumerate(cases):
        run_dir = tmp_path / str(number)
        with refused(message):
            fit(small_config(**fields), small_execution(data_dir, **execution), run_dir=run_dir)
        assert not run_dir.exists()
    assert sharding.device_mesh(8).size == jax.device_count()
