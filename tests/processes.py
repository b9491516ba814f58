"""Scripts as a user starts them, in processes of their own, and as modules."""

import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parent.parent
LIMIT = 120.0
"""Seconds after which a process is taken to hang."""


def environment() -> dict[str, str]:
    """One CPU device, and messages that no narrow terminal wraps."""
    return os.environ | {"JAX_NUM_CPU_DEVICES": "1", "COLUMNS": "200"}


def load_script(name: str) -> ModuleType:
    """A script as a module, to call its `main` without a process of its own."""
    path = ROOT / "scripts" / f"{name}.py"
    if str(path.parent) not in sys.path:  # as Python itself does for a script
        sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(f"script_{name}", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # the flags' help is read from the source found there
    spec.loader.exec_module(module)
    return module


def start(script: str, *words: object, **extra: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / script), *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment() | extra,
    )


def run(script: str, *words: object, **extra: str) -> "subprocess.CompletedProcess[str]":
    """A script's exit code and what it printed, white space folded: boxes wrap at any word."""
    process = start(script, *words, **extra)
    return finished(process)


def finished(process: "subprocess.Popen[str]") -> "subprocess.CompletedProcess[str]":
    try:
        out, err = process.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"still running after {LIMIT} s:\n{out}\n{err}") from None
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def signal_after_lines(
    process: "subprocess.Popen[str]", metrics: Path, lines: int, number: signal.Signals
) -> "subprocess.CompletedProcess[str]":
    """Send a signal as soon as metrics.jsonl has so many lines, and wait for the end."""
    deadline = time.monotonic() + LIMIT
    while not metrics.exists() or metrics.read_bytes().count(b"\n") < lines:
        assert process.poll() is None, f"ended before {lines} lines: {process.communicate()}"
        assert time.monotonic() < deadline, f"no {lines} lines after {LIMIT} s"
        time.sleep(0.002)
    process.send_signal(number)
    return finished(process)
