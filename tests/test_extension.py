"""Parts in a user's own file are first-class citizens: the README's example, as it stands."""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from mlp_research import config, contracts
from mlp_research.testing import check_model, check_objective, check_optimizer
from tests import processes
from tests.made import VALIDATION_ROWS, own_kinds

README = (processes.ROOT / "README.md").read_text()
LAB = next(block for block in re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S))
FAMILIES = {
    "model": "MaxoutConfig",
    "objective": "Focal",
    "optimizer": "RMSProp",
    "schedule": "InverseRoot",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, only_the_packages_kinds: None) -> Path:
    """A folder outside the repository with the README's file."""
    (tmp_path / "my_lab.py").write_text(LAB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "my_lab", raising=False)
    return tmp_path


@pytest.fixture
def lab(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    module = contracts.import_under_contracts(folder / "my_lab.py", "my_lab")
    monkeypatch.setitem(sys.modules, "my_lab", module)
    return module


def train_flags(data_dir: Path) -> list[object]:
    return [
        *("--data.dir", data_dir, "--data.validation", VALIDATION_ROWS),
        *("--train.batch-size", 16, "--evaluation.batch-size", 16, "--model.width", 8),
        *("--with", "my_lab.py", "--model", "maxout", "--objective", "focal"),
        *("--optimizer", "rmsprop", "--schedule", "inverse-root"),
    ]


def test_a_part_of_each_family_is_at_most_twelve_lines():
    defined = [node for node in ast.parse(LAB).body if isinstance(node, ast.ClassDef)]
    lines = {
        node.name: len(
            [
                line
                for line in (ast.get_source_segment(LAB, node) or "").splitlines()
                if line.strip()
            ]
        )
        for node in defined
    }
    lines["MaxoutConfig"] += lines.pop("Maxout")
    families = (FAMILIES[name] for name in ("model", "objective", "optimizer", "schedule"))
    assert lines.keys() == set(families)
    assert max(lines.values()) <= 12, lines


def test_they_train_resume_evaluate_and_sweep(folder: Path, data_dir: Path):
    flags = train_flags(data_dir)
    trained = processes.run("train.py", *flags, "--train.epochs", 2, "--run-dir", "run")
    assert trained.returncode == 0, trained.stderr
    result = json.loads((folder / "run" / "result.json").read_text())
    assert result["parameters"] == 12 * 32 + 32 + 8 * 3 + 3
    start = json.loads((folder / "run" / "environment.json").read_text())[0]
    assert start["code"].keys() == {"my_lab.py"}
    assert (folder / "run" / "code" / "my_lab.py").read_text() == LAB
    again = processes.run("train.py", "--resume", "--run-dir", "run", *flags)
    assert again.returncode == 0, again.stderr
    evaluated = processes.run(
        *("evaluate.py", "run", "--with", "my_lab.py"),
        *("--data.dir", data_dir, "--evaluation.batch-size", 16),
    )
    assert evaluated.returncode == 0, evaluated.stderr
    assert f"({result['test']['correct']} of 70)" in evaluated.stdout
    swept = processes.run(
        *("sweep.py", *flags, "--train.epochs", 1, "--seeds", 2),
        *("--vary", "model=mlp,residual,maxout", "objective.gamma=1,2", "--run-dir", "sweep"),
    )
    # --model.width belongs to the first model alone.
    assert swept.returncode == 0, swept.stderr
    summary = json.loads((folder / "sweep" / "summary.json").read_text())
    assert len(summary["settings"]) == 6
    assert len(list((folder / "sweep" / "programs").iterdir())) == 3
    assert len(summary["comparisons"]) == 5, "the architectures are not compared"
    assert all(len(setting["test_accuracies"]) == 2 for setting in summary["settings"])


def test_a_model_of_a_file_can_be_named_alone(folder: Path, data_dir: Path):
    flags = train_flags(data_dir)[:-10]
    words = [*flags, "--model", "my_lab.py:MaxoutConfig", "--train.epochs", 1, "--run-dir", "run"]
    trained = processes.run("train.py", *words)
    assert trained.returncode == 0, trained.stderr
    evaluated = processes.run(
        *("evaluate.py", "run", "--model", "my_lab.py:MaxoutConfig"),
        *("--data.dir", data_dir, "--evaluation.batch-size", 16),
    )
    assert evaluated.returncode == 0, evaluated.stderr


def test_the_run_folder_runs_no_code_by_itself(folder: Path, data_dir: Path):
    processes.run("train.py", *train_flags(data_dir), "--train.epochs", 1, "--run-dir", "run")
    without = processes.run("train.py", "--resume", "--run-dir", "run", "--data.dir", data_dir)
    assert without.returncode == 1
    assert "kind is 'maxout'" in without.stderr
    assert "bring the file that defines it by --with FILE" in without.stderr
    (folder / "my_lab.py").write_text(LAB + "\n# changed\n")
    changed = processes.run("train.py", "--resume", "--run-dir", "run", *train_flags(data_dir))
    assert changed.returncode == 0, changed.stderr
    said = " ".join(changed.stdout.split())
    assert "what can change bits is not as when the run began: code.my_lab.py" in said


def test_they_pass_the_checks(lab: Any):
    config = lab.MaxoutConfig(width=8)
    build = lambda *, key: config.build((4, 4), 3, key=key)  # noqa: E731
    check_model(build, image_shape=(4, 4), classes=3)
    check_objective(lambda: lab.Focal(gamma=1.0))
    check_optimizer(lambda: (lab.RMSProp(), lab.InverseRoot()))


BROKEN = [
    ("1 / 0", "--with my_lab.py: line {last}: ZeroDivisionError: division by zero"),
    ("def f(:", "--with my_lab.py: line {last}: SyntaxError"),
    (
        "class Again(Objective, frozen=True):\n    kind: Literal['focal'] = 'focal'\n"
        "    loss = Focal.loss",
        "Again has the kind 'focal' of Focal",
    ),
    (
        "class Nameless(Focal, frozen=True):\n    beta: float = 1.0",
        "Nameless has the kind 'focal' of Focal",
    ),
    ("Focal.loss = lambda self, logits, label: logits", "wanted float32[]"),
    (
        "Focal.loss = lambda self, logits, label: logits[3:].missing",
        "my_lab.py:{last}, in <lambda>",
    ),
    (
        "Focal.batch = lambda self, model, images, labels, *, key: (labels * 1.0, {'correct': 1})",
        "batch of 'focal' (my_lab.py:{last}): the mean loss is float32[16], wanted float32[]",
    ),
    (
        "Focal.batch = lambda self, model, images, labels, *, key: images.sum()",
        "batch of 'focal' (my_lab.py:{last}): it returned float32[], wanted (loss, measurements)",
    ),
    (
        "Focal.example = lambda self, model, image, label, *, key: (image.sum(), {})",
        "example of 'focal' (my_lab.py:{last}): the measurements are dict, wanted a dict with `c",
    ),
    (
        "whole = Objective.gradients\n"
        "Focal.gradients = lambda self, *a, key: (whole(self, *a, key=key)[0], {})",
        "gradients of 'focal' (my_lab.py:{last}): the gradient has nothing at head.bias, wanted",
    ),
    (
        "RMSProp.evaluated = lambda self, parameters, state: state",
        "evaluated of 'rmsprop' (my_lab.py:{last}): what is evaluated has float32[",
    ),
    ("Focal.measure = lambda self, logits, label: {'loss': 1.0}", "has the name of another number"),
    ("RMSProp.transformation = lambda self, rate: optax.scale(self.rho)", "my_lab.py:{last}"),
    (
        "RMSProp.transformation = lambda self, rate: optax.stateless(lambda u, p: p.layers)",
        "my_lab.py:{last}",
    ),
    (
        "MaxoutConfig.build = lambda self, s, c, *, key: eqx.nn.Linear(prod(s), c + 2, key=key)",
        "gives float32[5] for one image, wanted float32[3]",
    ),
    ("MaxoutConfig.build = lambda self, s, c, *, key: None.missing", "my_lab.py:{last}"),
    ("InverseRoot.shape = lambda self, total: total.missing", "my_lab.py:{last}"),
    ("InverseRoot.shape = lambda self, total: lambda step: step.missing", "my_lab.py:{last}"),
]


@pytest.mark.parametrize(("code", "message"), BROKEN)
def test_a_mistake_in_the_file_is_one_message_and_leaves_no_folder(
    code: str,
    message: str,
    folder: Path,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    from mlp_research.terminal import command_line

    text = f"{LAB}\n{code}\n"
    (folder / "my_lab.py").write_text(text)
    words = [*map(str, train_flags(data_dir)), "--mesh.data", "1", "--run-dir", "run"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "--no-compile-cache"])
    with pytest.raises(SystemExit) as ended:
        command_line.run(processes.load_script("train").main)
    shown = capsys.readouterr().err
    assert ended.value.code == 2
    assert message.format(last=len(text.splitlines())) in shown, shown
    assert "Traceback" not in shown and len(shown.splitlines()) <= 2
    assert not (folder / "run").exists()


def test_the_page_of_parts_has_one_of_each_family():
    page = (processes.ROOT / "docs" / "parts.md").read_text()
    for name, family in config.FAMILIES.items():
        bases = [family, *own_kinds(family).values()]
        written = [base for base in bases if f"({base.__name__}, frozen=True)" in page]
        assert written, f"no part of the family {name}"
