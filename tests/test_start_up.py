"""The compile cache is used where it can be, and imports are made only where they are needed."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from mlp_research.system import compile_cache
from mlp_research.terminal import command_line
from tests import processes


def test_the_second_start_finds_its_programs_compiled(data_dir: Path, tmp_path: Path):
    words = ("--data.dir", data_dir, "--data.validation", 40, "--train.batch-size", 16)
    cache = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "JAX_COMPILATION_CACHE_DIR": ""}
    environment = {name: value for name, value in cache.items() if value}
    inherited = processes.environment()
    inherited.pop("JAX_COMPILATION_CACHE_DIR")

    def train(run: str) -> set[str]:
        command = [sys.executable, str(processes.ROOT / "scripts" / "train.py"), *map(str, words)]
        command += ["--run-dir", str(tmp_path / run), "--train.epochs", "1"]
        subprocess.run(command, env=inherited | environment, check=True, capture_output=True)
        return {path.name for path in (tmp_path / "cache").rglob("*-cache")}

    cold = train("cold")
    assert any("compiled" in name for name in cold), cold
    assert train("warm") == cold, "the second start compiled something anew"


def test_without_the_cache_nothing_is_enabled(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compile_cache, "enable", lambda: enabled.append(True))
    enabled: list[bool] = []
    for words in ([], ["--no-compile-cache"]):
        command_line.parse(command_line.RunFlags, words, "A run.")
        assert enabled == [True]


def test_the_users_own_cache_is_left_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    chosen = jax.config.values["jax_compilation_cache_dir"]
    assert chosen == os.environ["JAX_COMPILATION_CACHE_DIR"]
    compile_cache.enable()
    assert jax.config.values["jax_compilation_cache_dir"] == chosen
    assert list(tmp_path.iterdir()) == []


def test_the_cache_of_another_processor_is_another_folder(monkeypatch: pytest.MonkeyPatch):
    here = compile_cache.directory()
    monkeypatch.setattr(compile_cache, "_processor", lambda: "another")
    assert compile_cache.directory() != here
    assert compile_cache.directory().parent == here.parent


def test_help_imports_nothing_that_only_training_needs():
    heavy = ("grain", "orbax", "matplotlib", "scipy.stats", "rich.live", "tensorboardX")
    program = (
        "import sys; sys.argv = ['train.py', '--help']\n"
        "import runpy\n"
        "try: runpy.run_path('scripts/train.py', run_name='__main__')\n"
        f"except SystemExit: print([name for name in {heavy!r} if name in sys.modules])"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=processes.ROOT, capture_output=True, text=True
    )
    assert ended.stdout.rstrip().endswith("[]"), ended.stdout[-300:] + ended.stderr


def test_a_run_imports_no_other_framework_that_is_installed(tmp_path: Path):
    (tmp_path / "torch.py").write_text("print('torch is imported')\n")
    program = (
        "import pathlib\n"
        "from mlp_research.storage.run_folder import RunFolder\n"
        f"path = pathlib.Path({str(tmp_path / 'run')!r})\n"
        "with RunFolder.open(path, {}, resume=False) as run:\n"
        "    run.write_scalars(1, {'loss': 0.5})\n"
        "print('written')\n"
        "import torch\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    ended = subprocess.run(
        [sys.executable, "-c", program],
        cwd=processes.ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert ended.stdout.splitlines() == ["written", "torch is imported"], ended.stderr
