"""The laws of the house hold. The checks stand in `laws.py`; `test_laws_bite.py` breaks each."""

from pathlib import Path

import pytest

from tests import laws


def test_one_seed_reaches_everything(data_dir: Path):
    laws.one_seed_reaches_everything(data_dir)


def test_same_seed_same_bits(data_dir: Path):
    laws.same_seed_same_bits(data_dir)


def test_resume_equals_uninterrupted(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    laws.resume_is_exact(data_dir, tmp_path, monkeypatch)


def test_device_count_changes_only_rounding(data_dir: Path):
    laws.device_count_changes_only_rounding(data_dir)


def test_chunk_length_changes_nothing(data_dir: Path):
    laws.chunk_length_changes_nothing(data_dir)


def test_a_member_is_the_single_run(data_dir: Path):
    laws.a_member_is_the_single_run(data_dir)


def test_evaluation_counts_every_row_once(data_dir: Path):
    laws.evaluation_is_exact(data_dir)


def test_held_out_rows_are_never_trained_on(data_dir: Path):
    laws.held_out_rows_are_never_trained_on(data_dir)


def test_each_function_is_compiled_once_in_a_run(data_dir: Path, tmp_path: Path):
    laws.each_function_is_compiled_once(data_dir, tmp_path)


def test_nothing_is_repaired_silently(data_dir: Path, tmp_path: Path):
    laws.nothing_is_repaired_silently(data_dir, tmp_path)
