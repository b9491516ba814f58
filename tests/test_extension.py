"""A model in a user's own file is a first-class citizen: the README's example, as it stands."""

import json
import re
import sys
from pathlib import Path

import pytest

from mlp_research import contracts
from tests import processes
from tests.made import VALIDATION_ROWS

README = (processes.ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)
MODEL, TEST = (next(block for block in BLOCKS if word in block) for word in ("Maxout(", "check_"))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder outside the repository with the README's two files."""
    (tmp_path / "my_models.py").write_text(MODEL)
    (tmp_path / "test_my_models.py").write_text(TEST)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def train_flags(data_dir: Path) -> list[object]:
    return [
        *("--data.dir", data_dir, "--data.validation", VALIDATION_ROWS),
        *("--train.batch-size", 16, "--evaluation.batch-size", 16, "--model.width", 8),
        *("--model", "my_models.py:MaxoutConfig"),
    ]


def test_the_example_is_at_most_twenty_lines():
    assert len([line for line in MODEL.splitlines() if line.strip()]) <= 20


def test_it_trains_resumes_evaluates_and_sweeps(folder: Path, data_dir: Path):
    flags = train_flags(data_dir)
    trained = processes.run("train.py", *flags, "--train.epochs", 2, "--run-dir", "run")
    assert trained.returncode == 0, trained.stderr
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["parameters"] == 12 * 32 + 32 + 8 * 3 + 3
    start = json.loads((folder / "run" / "environment.json").read_text())[0]
    assert start["model_code"]["file"] == "my_models.py"
    again = processes.run("train.py", "--resume", "--run-dir", "run", *flags)
    assert again.returncode == 0, again.stderr
    evaluated = processes.run(
        *("evaluate.py", "run", "--model", "my_models.py:MaxoutConfig"),
        *("--data.dir", data_dir, "--evaluation.batch-size", 16),
    )
    assert evaluated.returncode == 0, evaluated.stderr
    assert f"({result['test']['correct']} of 70)" in evaluated.stdout
    swept = processes.run(
        "sweep.py",
        *flags,
        "--train.epochs",
        1,
        "--seeds",
        2,
        "--vary",
        "model.width=4,8",
        *("--run-dir", "sweep"),
    )
    assert swept.returncode == 0, swept.stderr
    assert len(json.loads((folder / "sweep" / "summary.json").read_text())["settings"]) == 2


def test_the_run_folder_runs_no_code_by_itself(folder: Path, data_dir: Path):
    processes.run("train.py", *train_flags(data_dir), "--train.epochs", 1, "--run-dir", "run")
    without = processes.run("train.py", "--resume", "--run-dir", "run", "--data.dir", data_dir)
    assert without.returncode == 1
    assert "kind is 'maxout'" in without.stderr
    assert "--model path.py:ConfigName" in without.stderr
    (folder / "my_models.py").write_text(MODEL + "\n# changed\n")
    changed = processes.run("train.py", "--resume", "--run-dir", "run", *train_flags(data_dir))
    assert changed.returncode == 0, changed.stderr
    said = " ".join(changed.stdout.split())
    assert "not as when the run began, nor need its bits be: model_code.sha256" in said


def test_it_passes_check_model(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(sys.modules, "my_models", raising=False)
    module = contracts.import_under_contracts(folder / "test_my_models.py", "test_my_models")
    module.test_maxout()


def test_a_fault_in_the_file_is_said_in_one_line(folder: Path, data_dir: Path):
    (folder / "my_models.py").write_text(MODEL + "\n1 / 0\n")
    ended = processes.run("train.py", *train_flags(data_dir), "--run-dir", "run")
    assert ended.returncode == 2
    assert ended.stderr.strip() == (
        "--model my_models.py:MaxoutConfig: ZeroDivisionError: division by zero"
    )
