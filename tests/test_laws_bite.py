"""Each law is broken on purpose, and its check sees it: a check that cannot fail proves nothing."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

from mlp_research import prng, step
from mlp_research.data import datasets, loader
from mlp_research.data.batches import Split
from mlp_research.objectives import base as objectives
from mlp_research.programs import base, members, single
from mlp_research.storage.metrics_log import MetricsLog, MetricsLogError
from mlp_research.system import sharding
from tests import laws

Patch = pytest.MonkeyPatch


def order_is_seed_plus_epoch(patch: Patch) -> None:
    patch.setattr(loader, "order_generator", lambda s, e: np.random.default_rng(s + e))


def seed_misses_the_weights(patch: Patch) -> None:
    original = prng.stream_key
    patch.setattr(
        base,
        "stream_key",
        lambda seed, name: original(0 if name == "init" else seed, name),
    )


def streams_have_no_names(patch: Patch) -> None:
    patch.setattr(prng, "_number", lambda name: 0)


def masks_forget_the_step(patch: Patch) -> None:
    original = prng.step_key
    patch.setattr(prng, "step_key", lambda key, _: original(key, jnp.int32(0)))


def examples_share_a_mask(patch: Patch) -> None:
    patch.setattr(
        objectives,
        "example_keys",
        lambda key, size: jr.wrap_key_data(jnp.tile(jr.key_data(key)[None], (size, 1))),
    )


def seed_misses_the_masks(patch: Patch) -> None:
    original = prng.step_key
    patch.setattr(prng, "step_key", lambda key, number: original(jr.key(0), number))


@pytest.mark.parametrize(
    "break_it",
    [
        order_is_seed_plus_epoch,
        seed_misses_the_weights,
        pytest.param(streams_have_no_names, marks=pytest.mark.long),
        pytest.param(masks_forget_the_step, marks=pytest.mark.long),
        examples_share_a_mask,
        seed_misses_the_masks,
    ],
)
def test_law_1_bites(break_it: Callable[[Patch], None], data_dir: Path, monkeypatch: Patch):
    break_it(monkeypatch)
    with pytest.raises(AssertionError, match=r"share|used twice"):
        laws.one_seed_reaches_everything(data_dir)


def test_law_2_bites(data_dir: Path, monkeypatch: Patch):
    monkeypatch.setattr(loader, "order_generator", lambda seed, epoch: np.random.default_rng())
    with pytest.raises(AssertionError):
        laws.same_seed_same_bits(data_dir)


def metrics_are_not_cut(patch: Patch) -> None:
    original = MetricsLog.rewind

    def rewind(self: MetricsLog, position: dict | None) -> None:
        path = self.path
        content = path.read_bytes() if path.exists() else b""
        original(self, position)
        path.write_bytes(content)

    patch.setattr(MetricsLog, "rewind", rewind)


def resume_starts_the_epoch_again(patch: Patch) -> None:
    original = loader.Plan.chunks

    def chunks(self: loader.Plan, position: int, steps_per_call: int) -> loader.ChunkPlan:
        plan = original(self, position, steps_per_call)
        shuffled = dataclasses.replace(self, seed=self.seed + position)
        return dataclasses.replace(plan, plan=shuffled)

    patch.setattr(loader.Plan, "chunks", chunks)


@pytest.mark.parametrize("break_it", [metrics_are_not_cut, resume_starts_the_epoch_again])
def test_law_3_bites(
    break_it: Callable[[Patch], None], data_dir: Path, tmp_path: Path, monkeypatch: Patch
):
    break_it(monkeypatch)
    with pytest.raises((AssertionError, ValueError, MetricsLogError)):
        laws.resume_is_exact(data_dir, tmp_path, monkeypatch)


def test_law_4_bites(data_dir: Path, monkeypatch: Patch):
    original = single.Experiment.init

    def init(self: single.Experiment) -> step.TrainState:
        state = original(self)
        return dataclasses.replace(state, keys=state.keys.at(jnp.int32(self.mesh.size)))

    monkeypatch.setattr(single.Experiment, "init", init)
    with pytest.raises(AssertionError, match="batches or masks differ"):
        laws.device_count_changes_only_rounding(data_dir)


def test_law_5_bites(data_dir: Path, monkeypatch: Patch):
    monkeypatch.setattr(jax.lax, "cond", lambda wanted, do, skip, *operands: do(*operands))
    with pytest.raises(AssertionError):
        laws.chunk_length_changes_nothing(data_dir)


def masks_of_the_first_member(patch: Patch) -> None:
    original = members.stream_keys
    patch.setattr(
        members,
        "stream_keys",
        lambda config: dataclasses.replace(
            original(config), steps=original(config.model_copy(update={"seed": 0})).steps
        ),
    )


def settings_of_the_first_member(patch: Patch) -> None:
    def first_only(self: members.Members) -> list[int]:
        return [0] * (len(self.configs) + -len(self.configs) % self.mesh.size)

    patch.setattr(members.Members, "lanes", property(first_only))


@pytest.mark.parametrize("break_it", [masks_of_the_first_member, settings_of_the_first_member])
def test_law_6_bites(break_it: Callable[[Patch], None], data_dir: Path, monkeypatch: Patch):
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        laws.a_member_is_the_single_run(data_dir)


def padding_counts(patch: Patch) -> None:
    original = loader.evaluation_batches
    patch.setattr(
        single,
        "evaluation_batches",
        lambda split, size, part: (
            dataclasses.replace(batch, real=np.ones_like(batch.real))
            for batch in original(split, size, part)
        ),
    )


def the_remainder_is_dropped(patch: Patch) -> None:
    original = loader.evaluation_batches
    patch.setattr(
        single,
        "evaluation_batches",
        lambda split, size, part: (
            batch for batch in original(split, size, part) if batch.real.all() or size > 70
        ),
    )


@pytest.mark.parametrize("break_it", [padding_counts, the_remainder_is_dropped])
def test_law_7_bites(break_it: Callable[[Patch], None], data_dir: Path, monkeypatch: Patch):
    break_it(monkeypatch)
    with pytest.raises(AssertionError):
        laws.evaluation_is_exact(data_dir)


def test_law_8_bites(data_dir: Path, monkeypatch: Patch):
    original = datasets.load

    def load(directory: Path, *config: Any) -> datasets.Splits:
        data = original(directory, *config)
        rows = Split(
            np.concatenate([data.train.images, data.validation.images]),
            np.concatenate([data.train.labels, data.validation.labels]),
        )
        return dataclasses.replace(data, train=rows)

    monkeypatch.setattr(datasets, "load", load)
    with pytest.raises(AssertionError, match="held-out row"):
        laws.held_out_rows_are_never_trained_on(data_dir)


def test_law_9_bites_and_names_the_argument(data_dir: Path, tmp_path: Path, monkeypatch: Patch):
    original = sharding.place_chunk

    def with_a_python_int(mesh, chunk):
        placed = original(mesh, chunk)
        object.__setattr__(placed, "count", int(placed.count))
        return placed

    monkeypatch.setattr(sharding, "place_chunk", with_a_python_int)
    with pytest.raises(AssertionError, match=r"traced again[\s\S]*count"):
        laws.each_function_is_compiled_once(data_dir, tmp_path)


def test_law_10_bites(data_dir: Path, tmp_path: Path, monkeypatch: Patch):
    monkeypatch.setattr(sharding, "check_divides", lambda mesh, batch_size, field: None)
    with pytest.raises(AssertionError, match="accepted what should be refused"):
        laws.nothing_is_repaired_silently(data_dir, tmp_path)
