"""What comes from a run folder or a data folder is data: it runs nothing and reaches nothing."""

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlp_research.analysis.saved_run import SavedRunFlags, open_run
from mlp_research.checkpoints.checkpoint import CheckpointError, Checkpoints
from mlp_research.config import ConfigFileError, read_config
from mlp_research.data import IdxConfig
from mlp_research.data.datasets import load
from mlp_research.data.idx import DataError
from mlp_research.fit import fit
from mlp_research.programs.single import Experiment
from mlp_research.storage.run_folder import RunFolderError
from mlp_research.sweep import run
from mlp_research.sweep.design import Member
from mlp_research.terminal.report import Report
from tests.made import small_config, small_execution
from tests.processes import ROOT, environment

Tally = Callable[[str, int, int, str], None]
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
BUILTINS = {"eval", "exec", "__import__"}
CALLS = {"os.system", "os.popen", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.load"}
SWITCHES = {"shell", "allow_pickle"}
"""Keywords that must never be true."""


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def dangers(source: str) -> Iterator[str]:
    """What in a module's source could run what it reads."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (n.name for n in names if n.name.partition(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                if module.partition(".")[0] in MODULES:
                    yield module
                yield from (n.name for n in names if f"{module}.{n.name}" in CALLS)
            case ast.Call(func=function, keywords=keywords):
                name = dotted(function)
                if name in BUILTINS | CALLS or name.removeprefix("builtins.") in BUILTINS:
                    yield name
                for keyword in keywords:
                    constant = isinstance(keyword.value, ast.Constant) and not keyword.value.value
                    if keyword.arg in SWITCHES and not constant:
                        yield f"{name}({keyword.arg}=...)"


def test_no_source_of_the_package_or_the_scripts_can_run_what_it_reads(tally: Tally):
    sources = [*(ROOT / "mlp_research").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
    assert len(sources) > 50
    found = {str(path): list(dangers(path.read_text())) for path in sources}
    assert not {path: names for path, names in found.items() if names}
    seen = "nothing: no pickle, eval, exec, shell or loader of objects in any source"
    tally("a source that could run what it reads", len(sources), len(sources), seen)


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import joblib.pool",
        "from pickle import loads",
        "eval(text)",
        "exec(text)",
        "import builtins\nbuiltins.exec(text)",
        "os.system('ls')",
        "from os import system",
        "subprocess.run(words, shell=True)",
        "subprocess.run(words, shell=choice)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "torch.load(path)",
    ],
)
def test_each_way_to_run_what_is_read_would_be_found(source: str):
    assert list(dangers(source))


def test_only_the_files_of_parts_are_imported_by_their_path():
    """`--with` and `--model path.py:Name` run a file, as the user asks; nothing else does."""
    users = {
        path.relative_to(ROOT).as_posix()
        for path in [*(ROOT / "mlp_research").rglob("*.py"), *(ROOT / "scripts").rglob("*.py")]
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and dotted(node.func).rpartition(".")[2]
        in {"exec_module", "import_under_contracts", "run_path", "run_module"}
    }
    assert users <= {"mlp_research/contracts.py", "mlp_research/terminal/command_line.py"}, users


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> tuple[Callable, tuple]:
        return os.mkdir, (str(self.marker),)


@pytest.fixture(scope="module")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished small run."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    config, report = small_config(epochs=1), Report(quiet=True)
    fit(config, small_execution(data_dir), run_dir=run_dir, report=report)
    return run_dir


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of the run that a test may spoil."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


def test_the_bomb_goes_off_where_it_is_unpickled(tmp_path: Path):
    pickle.loads(pickle.dumps(Bomb(tmp_path / "marker")))
    assert (tmp_path / "marker").exists()


def test_a_pickle_in_place_of_any_file_is_refused_and_never_run(
    run_dir: Path, data_dir: Path, tmp_path: Path, tally: Tally
):
    marker, tried = tmp_path / "marker", 0
    payload = pickle.dumps(Bomb(marker))
    template = Experiment.of(small_config(epochs=1), small_execution(data_dir)).saved_template()
    for path in sorted((run_dir / "checkpoints").rglob("*")):
        if path.is_file():
            path.write_bytes(payload)
            tried += 1
    with (
        Checkpoints(run_dir / "checkpoints", reading=True) as checkpoints,
        pytest.raises(CheckpointError, match="is damaged"),
    ):
        checkpoints.restore(12, template)
    folder = shutil.copytree(data_dir, tmp_path / "data")
    for path in folder.iterdir():
        kept = path.read_bytes()
        path.write_bytes(payload)
        with pytest.raises(DataError):
            load(folder, IdxConfig(validation=40))
        path.write_bytes(kept)
        tried += 1
    for name in ("config.json", "environment.json"):
        path = run_dir / name
        kept = path.read_bytes()
        path.write_bytes(payload)
        with pytest.raises((ConfigFileError, RunFolderError)):
            open_run(SavedRunFlags(run_dir, compile_cache=False))
        path.write_bytes(kept)
        tried += 1
    assert not marker.exists()
    tally("a pickle in place of a file", tried, tried, "refused in words; it is never unpickled")


@pytest.mark.parametrize("inner", ["objects", "pickle", "torn", "missing", "other"])
def test_predictions_that_are_not_numbers_are_refused_and_never_run(
    inner: str, run_dir: Path, tmp_path: Path
):
    marker, path = tmp_path / "marker", run_dir / "predictions.npz"
    bomb: Any = np.array([Bomb(marker)], object)
    match inner:
        case "objects":
            np.savez(path, predictions=bomb)
        case "pickle":
            path.write_bytes(pickle.dumps(Bomb(marker)))
        case "other":
            np.savez(path, others=np.zeros(3))
        case "torn":
            np.savez(path, predictions=np.zeros((1, 70), np.int32))
            path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(RunFolderError, match=r"predictions\.npz"):
        run._outcomes([Member(0, 0)], run_dir)
    assert not marker.exists()


@pytest.mark.parametrize("result", ["3", "[3]", "[{}]", '[{"test": 3}]', '{"member": 9}', "[" * 9])
def test_a_programs_result_that_is_not_what_was_written_is_refused(result: str, run_dir: Path):
    np.savez(run_dir / "predictions.npz", predictions=np.zeros((1, 70), np.int32))
    (run_dir / "result.json").write_text(result)
    with pytest.raises(RunFolderError, match=r"result\.json"):
        run._outcomes([Member(0, 0)], run_dir)


def test_a_config_that_names_code_loads_none(run_dir: Path, tmp_path: Path):
    (run_dir / "evil.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'marker')!r})\n")
    config = json.loads((run_dir / "config.json").read_text())
    for kind in (
        "evil.py:Config",
        "evil",
        f"{run_dir}/evil.py:Config",
        "os:mkdir",
        "builtins.eval",
    ):
        (run_dir / "config.json").write_text(json.dumps(config | {"model": {"kind": kind}}))
        with pytest.raises(ConfigFileError, match="it must be one of"):
            read_config(run_dir)
    assert not (tmp_path / "marker").exists()


def test_modules_that_lie_in_a_run_folder_are_not_imported(run_dir: Path, tmp_path: Path):
    marker = tmp_path / "marker"
    for name in ("json", "jax", "numpy", "sitecustomize", "mlp_research", "conftest"):
        (run_dir / f"{name}.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")
    (run_dir / "config.json").write_text("{")
    ended = subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "evaluate.py"), ".", "--no-compile-cache"],
        cwd=run_dir,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ended.returncode == 1 and "not JSON" in ended.stderr, ended.stderr
    assert not marker.exists()


# What a run writes or reads, by name: a link there would be followed out of the folder.
LINKS = [
    *("metrics.jsonl", "config.json", "result.json.part", "environment.json.part", ".lock"),
    *("curves.png", "confusion.png", "tensorboard", "checkpoints", "checkpoints/damaged"),
]


@pytest.mark.parametrize("name", LINKS)
def test_a_link_out_of_a_run_folder_is_refused_and_what_it_names_is_untouched(
    name: str, run_dir: Path, data_dir: Path, tmp_path: Path, tally: Tally
):
    outside, link = tmp_path / "outside", run_dir / name
    is_folder = name in ("tensorboard", "checkpoints", "checkpoints/damaged")
    if link.exists():
        link.rename(outside)
    elif is_folder:
        outside.mkdir()
    else:
        outside.write_text("precious")
    link.symlink_to(outside)
    before = state_of(outside)
    with pytest.raises(RunFolderError, match="out of the run's folder"):
        fit(
            small_config(epochs=1),
            small_execution(data_dir),
            run_dir=run_dir,
            resume=True,
            report=Report(quiet=True),
        )
    with pytest.raises(RunFolderError, match="out of the run's folder"):
        open_run(SavedRunFlags(run_dir, compile_cache=False))
    assert state_of(outside) == before
    tally("a link out of the run's folder", 1, 1, "... is a link to ..., out of the run's folder")


def state_of(path: Path) -> dict[str, bytes | None]:
    return {
        str(each): each.read_bytes() if each.is_file() else None
        for each in (path, *sorted(path.rglob("*")))
    }


def test_a_link_within_the_folder_and_a_folder_that_is_a_link_are_used(
    run_dir: Path, data_dir: Path, tmp_path: Path
):
    (run_dir / "latest.json").symlink_to("result.json")
    (tmp_path / "link").symlink_to(run_dir)
    flags = SavedRunFlags(tmp_path / "link", data_dir=data_dir, mesh_data=1, compile_cache=False)
    opened = open_run(flags)
    assert opened.config == small_config(epochs=1).on(opened.data)


def test_the_data_folder_that_a_run_names_is_only_read(run_dir: Path, tmp_path: Path):
    """It lies outside by nature, and may be any: four files of it are read, as IDX, or refused."""
    path = run_dir / "environment.json"
    for folder in ("/", "/etc", str(tmp_path), "../..", "/proc/self", "a\0b", ""):
        starts = json.loads((path).read_text())
        starts[-1]["execution"]["data_dir"] = folder
        path.write_text(json.dumps(starts))
        with pytest.raises(DataError):
            open_run(SavedRunFlags(run_dir, compile_cache=False))
