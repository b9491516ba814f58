"""Where and with what a run is computed: machine, versions, commands, commits."""

import datetime
import hashlib
import importlib.metadata
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax

from mlp_research.base_config import json_value
from mlp_research.config import ConfigFileError, Execution, unlike
from mlp_research.data.datasets import DEFAULT_DIRECTORY
from mlp_research.parts import Part, files_of

PACKAGES = ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain", "numpy", "jaxtyping")
DECISIVE = ("versions", "devices", "processes", "mesh", "git", "code")
"""What of a start can change the bits that it computes."""


def environment(
    execution: Execution, mesh_shape: dict[str, int], parts: list[Part]
) -> dict[str, Any]:
    """One start of a run, as environment.json tells it."""
    devices = jax.devices()
    return {
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "python": sys.version.split()[0],
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "devices": {
            "platform": devices[0].platform,
            "kind": devices[0].device_kind,
            "count": len(devices),
        },
        "processes": jax.process_count(),
        "mesh": mesh_shape,
        "execution": execution.model_dump(mode="json")
        | {"data_dir": str(execution.data_dir.resolve())},
        "git": _git_state(),
        "code": {file.name: sha256_of(file) for file in files_of(parts)},
    }


def changes(first: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """In what that can change the bits one start differs from another: `versions.jax A, now B`."""
    old, new = ({name: start.get(name) for name in DECISIVE} for start in (first, now))
    return [
        f"{field} {str(was)[:12]}, now {str(is_now)[:12]}"
        for field, was, is_now in unlike(old, new)
    ]


def trained_on(run_dir: Path) -> Path:
    """The data folder of a run's last start or of a sweep's first program; the default without.

    It may lie anywhere: it is only read, as data. Raises `ConfigFileError` for an environment.json
    that is not what a run wrote.
    """
    path = run_dir / "environment.json"
    if not path.exists():
        path = run_dir / "programs" / "000" / "environment.json"
    try:
        starts = json_value(path.read_bytes())
        return Path(starts[-1]["execution"]["data_dir"])
    except FileNotFoundError:
        return DEFAULT_DIRECTORY
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigFileError(
            f"{path} is not what the run wrote ({type(error).__name__}: {error}): put it back, or "
            "remove it and name the data folder by --data.dir"
        ) from None


def sha256_of(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _git_state() -> dict[str, Any] | None:
    """Commit of this package's sources and whether they were changed since; None outside git."""
    source = Path(__file__).parent.parent

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=source, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--", str(source))),
        }
    except (OSError, subprocess.SubprocessError):
        return None
