"""What a run leaves behind, so that its result can be believed and the run can go on."""

import contextlib
import datetime
import importlib.metadata
import json
import math
import os
import socket
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import filelock
import jax
import numpy as np

from mlp_research.config import Config, Execution, differences, read_config
from mlp_research.frozen import Failure
from mlp_research.step import StepMetrics

PACKAGES = ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain", "numpy", "jaxtyping")


class RunFolderError(Failure):
    """A run folder that cannot be used: which, why, and what to do."""


def default_run_dir(preset: str, config: Config) -> Path:
    """`runs/<preset>-<model>-seed<N>-<UTC time>`."""
    now = datetime.datetime.now(datetime.UTC)
    return Path("runs") / f"{preset}-{config.model.kind}-seed{config.seed}-{now:%Y%m%d-%H%M%S}"


def write_atomically(path: Path, text: str) -> None:
    """The file is the old one or the new one, whatever happens."""
    beside = path.with_name(path.name + ".part")
    with beside.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


class RunFolder:
    """The folder of one run, locked against other processes while it is open."""

    def __init__(self, path: Path):
        self.path = path
        self._lock = filelock.FileLock(path / ".lock", blocking=False)
        self._owner = path / ".owner.json"
        self._metrics_checksum = 0
        self.steps: list[dict[str, Any]] = []
        """The step lines of the epoch that was last written to."""
        self.epochs: list[dict[str, Any]] = []
        """The lines of all epochs (split "epoch")."""

    @classmethod
    def open(cls, path: Path, config: Config, *, resume: bool) -> "RunFolder":
        """A folder for a new run, or the folder of a run that goes on, held until it is closed.

        Refused: a new run where there is one already, a resumed one with another config, a folder
        that another process holds or that cannot be written.
        """
        if resume:
            saved = read_config(path, type(config.model))
            if saved != config:
                different = "; ".join(differences(saved.model_dump(), config.model_dump()))
                raise RunFolderError(f"{path} holds a run with another config: {different}")
        elif (path / "config.json").exists():
            raise RunFolderError(
                f"{path} already holds a run: go on with it by --resume, or choose another folder"
            )
        folder = cls(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            folder._acquire()
            if not resume:
                write_atomically(path / "config.json", config.to_json())
        except OSError as error:
            folder.close()
            raise RunFolderError(f"{path} cannot be written: {error.strerror or error}") from None
        return folder

    def _acquire(self) -> None:
        try:
            self._lock.acquire()
        except filelock.Timeout:
            raise RunFolderError(f"{self.path} is in use by {self._described_owner()}") from None
        owner = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        self.left_behind = self._described_owner() if self._owner.exists() else None
        write_atomically(self._owner, json.dumps(owner))

    def _described_owner(self) -> str:
        try:
            owner = json.loads(self._owner.read_text())
            return f"process {owner['pid']} on {owner['host']} since {owner['since']}"
        except (OSError, ValueError, KeyError, TypeError):
            return "another process"

    def close(self) -> None:
        if self._lock.is_locked:
            with contextlib.suppress(OSError):
                self._owner.unlink(missing_ok=True)
            self._lock.release()

    def __enter__(self) -> "RunFolder":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def append(self, lines: list[dict[str, Any]]) -> None:
        """Add lines to metrics.jsonl."""
        content = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        with self._metrics_path.open("ab") as file:
            file.write(content)
        self._metrics_checksum = zlib.crc32(content, self._metrics_checksum)
        self._remember(lines)

    def _remember(self, lines: list[dict[str, Any]]) -> None:
        self.epochs += [line for line in lines if line["split"] == "epoch"]
        steps = self.steps + [line for line in lines if line["split"] == "train"]
        self.steps = [line for line in steps if line["epoch"] == steps[-1]["epoch"]]

    def means(self) -> dict[str, float]:
        """Means over the step lines of the epoch, which a resume has read back exactly."""
        return {
            name: math.fsum(line[name] for line in self.steps) / len(self.steps)
            for name in ("loss", "accuracy", "gradient_norm")
        }

    def position(self) -> dict[str, int]:
        """Length and CRC-32 of metrics.jsonl, made durable: what a checkpoint notes."""
        with self._metrics_path.open("ab") as file:
            os.fsync(file.fileno())
            length = file.tell()
        return {"bytes": length, "crc32": self._metrics_checksum}

    def rewind(self, position: dict[str, int] | None) -> None:
        """Cut metrics.jsonl back to a checkpoint's position; None is the run's beginning.

        Raises `RunFolderError` where the lines before the position are not what was written.
        """
        length, checksum = (position["bytes"], position["crc32"]) if position else (0, 0)
        content = self._metrics_path.read_bytes() if self._metrics_path.exists() else b""
        if zlib.crc32(content[:length]) != checksum or len(content) < length:
            raise RunFolderError(
                f"{self._metrics_path} was changed since the checkpoint: its first {length} bytes "
                "are not the lines of the run. Put the file back, or start a new run."
            )
        if len(content) > length:
            os.truncate(self._metrics_path, length)
        self._metrics_checksum = checksum
        self.steps, self.epochs = [], []
        self._remember([json.loads(line) for line in content[:length].splitlines()])

    def write_environment(self, execution: Execution, mesh_shape: dict[str, int]) -> None:
        """Add this start of the run to environment.json: a list, one entry for each start."""
        path = self.path / "environment.json"
        starts = []
        with contextlib.suppress(OSError, ValueError):
            starts = json.loads(path.read_text())
        starts.append(environment(execution, mesh_shape))
        write_atomically(path, json.dumps(starts, indent=2) + "\n")

    def write_result(self, result: dict[str, Any]) -> None:
        write_atomically(self.path / "result.json", json.dumps(result, indent=2) + "\n")

    @property
    def _metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"


def step_lines(
    metrics: StepMetrics, count: int, start: int, steps_per_epoch: int, batch_size: int
) -> list[dict[str, Any]]:
    """The lines of the first `count` steps after `start`, from metrics on the host."""
    columns = {
        "loss": metrics.loss.tolist(),
        "accuracy": (np.asarray(metrics.correct) / batch_size).tolist(),
        "gradient_norm": metrics.gradient_norm.tolist(),
        "clipped": metrics.clipped.tolist(),
        "learning_rate": metrics.learning_rate.tolist(),
    }
    return [
        {
            "split": "train",
            "step": step + 1,
            "epoch": step // steps_per_epoch + 1,
            **{name: values[step - start] for name, values in columns.items()},
        }
        for step in range(start, start + count)
    ]


def environment(execution: Execution, mesh_shape: dict[str, int]) -> dict[str, Any]:
    """Where and with what a run is computed."""
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
        "mesh": mesh_shape,
        "execution": execution.model_dump(mode="json"),
        "git": _git_state(),
    }


def _git_state() -> dict[str, Any] | None:
    """Commit of this package's sources and whether they were changed since; None outside git."""
    source = Path(__file__).parent

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
