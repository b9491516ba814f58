"""Each script runs on its shipped defaults, made small, and leaves what it says it leaves."""

import csv
import json
import sys
from pathlib import Path

import pytest

from mlp_research.config import PRESETS, Config
from mlp_research.terminal import command_line
from tests import processes

SMALL = ("--train.epochs", "1", "--data.limit", "1280")


def call(monkeypatch: pytest.MonkeyPatch, name: str, *words: object) -> None:
    """Call a script's main as its command line would, and expect success."""
    script = processes.load_script(name)
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        command_line.run(script.main)
    assert not ended.value.code


def result(run_dir: Path) -> dict:
    return json.loads((run_dir / "result.json").read_text())


def test_train_then_evaluate_repeats_the_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    run_dir = tmp_path / "run"
    call(monkeypatch, "train", *SMALL, "--mesh.data", 1, "--run-dir", run_dir)
    test = result(run_dir)["test"]
    assert test["total"] == 10_000 and isinstance(test["correct"], int)
    assert {path.name for path in run_dir.iterdir() if path.name[0] != "."} == {
        "checkpoints",
        "config.json",
        "curves.png",
        "environment.json",
        "metrics.jsonl",
        "result.json",
        "tensorboard",
    }
    assert Config.from_json((run_dir / "config.json").read_text()).data.limit == 1280
    capsys.readouterr()
    call(monkeypatch, "evaluate", run_dir, "--mesh.data", 1)
    printed = capsys.readouterr().out
    assert f"({test['correct']} of 10000)" in printed
    assert "equal to result.json" in printed
    assert (run_dir / "confusion.png").exists() and (run_dir / "worst.png").exists()


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param(name, marks=[pytest.mark.long] * (name in ("mixer", "residual")))
        for name in sorted(set(PRESETS) - {"wide-dropout"})
    ],
)
def test_every_preset_trains(preset: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    small = [*SMALL, "--schedule.warmup-steps", 3] if preset == "warmup-cosine" else SMALL
    call(monkeypatch, "train", preset, *small, "--mesh.data", 1, "--run-dir", tmp_path / "run")
    assert result(tmp_path / "run")["steps"] == 10


@pytest.mark.long
def test_the_wide_preset_trains_when_narrow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    words = ("wide-dropout", *SMALL, "--model.widths", 16, 16, 16, "--mesh.data", 1)
    call(monkeypatch, "train", *words, "--run-dir", tmp_path / "run")
    assert result(tmp_path / "run")["steps"] == 10


def test_dry_run_says_the_cost_and_writes_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    call(monkeypatch, "train", "--dry-run", "--mesh.data", 1)
    printed = capsys.readouterr().out
    assert "floating-point operations a step" in printed and "MB arguments" in printed
    assert "235,146" in printed and "layers[0]" in printed
    assert list(tmp_path.iterdir()) == []


def test_a_profile_is_left_in_the_run_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    run_dir = tmp_path / "run"
    words = ("--profile", "3:5", "--train.steps-per-call", 2, "--mesh.data", 1)
    call(monkeypatch, "train", *SMALL, *words, "--run-dir", run_dir)
    assert list((run_dir / "profile").rglob("*.xplane.pb"))
    assert result(run_dir)["steps"] == 10


def test_a_sweep_leaves_a_summary_and_its_pictures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    words = ("--seeds", 2, "--vary", "optimizer.learning-rate=1e-3,1e-2")
    call(monkeypatch, "sweep", *SMALL, *words, "--run-dir", tmp_path / "sweep")
    with (tmp_path / "sweep" / "summary.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["n"] for row in rows] == ["2", "2"]
    assert "best by validation" in capsys.readouterr().out
    for name in ("accuracy.png", "learning_curves.png", "gradient_norm.png"):
        assert (tmp_path / "sweep" / name).exists()


@pytest.mark.long
def test_the_lessons_program_learns():
    # In a process of its own: it broadcasts between ranks, as the lesson does.
    ended = processes.run("peers/lesson.py", "--epochs", 1, JAX_NUMPY_RANK_PROMOTION="allow")
    assert ended.returncode == 0, ended.stderr
    assert float(ended.stdout.split("test")[1].split()[0]) > 94
