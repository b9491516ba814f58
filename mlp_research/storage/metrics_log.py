"""metrics.jsonl: one line for each step and, for each epoch, one for each evaluated split."""

import json
import math
import os
import zlib
from pathlib import Path
from typing import Any

import numpy as np

from mlp_research.base_config import json_value
from mlp_research.errors import Failure
from mlp_research.step import StepMetrics

Line = dict[str, Any]
NOT_AVERAGED = frozenset({"split", "step", "epoch", "member", "learning_rate"})
"""What of the step lines is not averaged over an epoch."""


class MetricsLogError(Failure):
    """A metrics.jsonl that is not what the run wrote."""


class MetricsLog:
    """A file that grows by whole lines and can be cut back to where a checkpoint was saved.

    With `follows` the file is another process's: this one only remembers the same lines.
    """

    def __init__(self, path: Path, *, follows: bool = False):
        self.path = path
        self._follows = follows
        self._checksum = self._length = 0
        self._steps: dict[int | None, list[Line]] = {}
        self.epochs: list[Line] = []
        """The lines with split "epoch", of all epochs."""

    def append(self, lines: list[Line]) -> None:
        content = "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines).encode()
        if not self._follows:
            # Not made anew where it is gone: its first lines would be lost.
            with self.path.open("r+b") as file:
                if file.seek(0, os.SEEK_END) != self._length:
                    raise MetricsLogError(f"{self.path} was changed while the run wrote it")
                file.write(content)
        self._length += len(content)
        self._checksum = zlib.crc32(content, self._checksum)
        self._remember(lines)

    def means(self, member: int | None = None) -> dict[str, float | None]:
        """Return means over the steps of the present epoch, which a resume has read back exactly.

        Steps in which a number is None are left out; where it always is, so is the mean.
        """
        lines = self._steps[member]
        names = [name for name in lines[0] if name not in NOT_AVERAGED]
        return {name: _mean([line[name] for line in lines]) for name in names}

    def position(self) -> dict[str, int]:
        """Length and CRC-32 of the file, made durable: what a checkpoint notes."""
        if self._follows:
            return {}  # the first process's note is the one that is saved
        with self.path.open("r+b") as file:
            os.fsync(file.fileno())
        return {"bytes": self._length, "crc32": self._checksum}

    def rewind(self, position: dict[str, int] | None) -> None:
        """Cut the file back to a checkpoint's position; None is the run's beginning.

        Raises `MetricsLogError` where the lines before the position are not what was written.
        """
        length, checksum = (position["bytes"], position["crc32"]) if position else (0, 0)
        content = self.path.read_bytes() if self.path.exists() else b""
        if len(content) < length or zlib.crc32(content[:length]) != checksum:
            raise MetricsLogError(
                f"{self.path} was changed since the checkpoint: its first {length} bytes are not "
                "the lines of the run. Put the file back, or start a new run."
            )
        if not self._follows:
            with self.path.open("ab") as file:
                file.truncate(length)
        self._length = length
        self._checksum, self._steps, self.epochs = checksum, {}, []
        self._remember([json_value(line) for line in content[:length].splitlines()])

    def read(self) -> list[Line]:
        """All lines."""
        return [json.loads(line) for line in self.path.read_bytes().splitlines()]

    def _remember(self, lines: list[Line]) -> None:
        for line in lines:
            if line["split"] == "epoch":
                self.epochs.append(line)
            elif line["split"] == "train":
                steps = self._steps.setdefault(line.get("member"), [])
                if steps and steps[-1]["epoch"] != line["epoch"]:
                    steps.clear()
                steps.append(line)


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _finite(values: Any) -> list[float | None]:
    """Return numbers of steps; one that is not finite, which no line can hold, is None."""
    return [float(value) if math.isfinite(value) else None for value in np.asarray(values)]


def step_lines(
    metrics: StepMetrics, count: int, start: int, steps_per_epoch: int, batch_size: int
) -> list[Line]:
    """The lines of the first `count` steps after `start`, from metrics on the host."""
    columns = {
        "loss": metrics.loss.tolist(),
        "accuracy": (np.asarray(metrics.correct) / batch_size).tolist(),
        "gradient_norm": metrics.gradient_norm.tolist(),
        "clipped": metrics.clipped.tolist(),
        "learning_rate": metrics.learning_rate.tolist(),
    } | {name: (np.asarray(sums) / batch_size).tolist() for name, sums in metrics.measured.items()}
    columns |= {name: _finite(values) for name, values in metrics.probed.items()}
    return [
        {
            "split": "train",
            "step": step + 1,
            "epoch": step // steps_per_epoch + 1,
            **{name: values[step - start] for name, values in columns.items()},
        }
        for step in range(start, start + count)
    ]
