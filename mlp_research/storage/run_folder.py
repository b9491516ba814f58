"""What a run leaves behind, so that its result can be believed and the run can go on."""

import contextlib
import datetime
import json
import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import filelock

from mlp_research import figures
from mlp_research.base_config import json_value
from mlp_research.config import Config, Execution, differences
from mlp_research.errors import Failure
from mlp_research.parts import Part, files_of
from mlp_research.probes.figures import draw_probes
from mlp_research.storage.environment import changes, environment
from mlp_research.storage.metrics_log import MetricsLog
from mlp_research.system import processes


class RunFolderError(Failure):
    """A run folder that cannot be used: which, why, and what to do."""


def default_run_dir(preset: str, config: Config) -> Path:
    """`runs/<preset>-<model>-seed<N>-<UTC time>`."""
    now = datetime.datetime.now(datetime.UTC)
    return Path("runs") / f"{preset}-{config.model.kind}-seed{config.seed}-{now:%Y%m%d-%H%M%S}"


def write_atomically(path: Path, content: str | bytes) -> None:
    """The file is the old one or the new one, whatever happens."""
    beside = path.with_name(path.name + ".part")
    with beside.open("wb") as file:
        file.write(content.encode() if isinstance(content, str) else content)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def read_json(path: Path) -> Any:
    """The value of a JSON file. Raises `RunFolderError` where there is none."""
    try:
        return json_value(path.read_bytes())
    except FileNotFoundError:
        raise RunFolderError(f"{path.parent} holds no run: there is no {path}") from None
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} cannot be read: {error}") from None


def check_links(path: Path) -> None:
    """Raises `RunFolderError` for a link in a run folder that leads out of it.

    What a run writes, it would write there; a folder from elsewhere could so name any file.
    """
    inside = path.resolve()
    for folder, folders, files in os.walk(path):
        for entry in (Path(folder) / name for name in (*folders, *files)):
            if entry.is_symlink() and not entry.resolve().is_relative_to(inside):
                raise RunFolderError(
                    f"{entry} is a link to {os.readlink(entry)}, out of the run's folder: put the "
                    "file itself there, or remove the link"
                )


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """What the system refuses while a run writes into its folder becomes a `RunFolderError`."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"{error.filename or path} cannot be written: {error.strerror or error}. When that is "
            f"mended, go on by --resume from the last checkpoint in {path}"
        ) from error


@contextlib.contextmanager
def _as_if_not_installed(package: str) -> Iterator[None]:
    """What is imported inside goes without a package that it could use, unless that is in use."""
    if package in sys.modules:
        yield
        return
    sys.modules[package] = None  # pyright: ignore[reportArgumentType]
    try:
        yield
    finally:
        del sys.modules[package]


class RunFolder:
    """The folder of one run, locked against other runs while it is open.

    Of the processes that compute one run together, only the first writes.
    """

    def __init__(self, path: Path):
        self.path = path
        self._writes = processes.is_first()
        self._lock = filelock.FileLock(path / ".lock", blocking=False)
        self._owner = path / ".owner.json"
        self.metrics = MetricsLog(path / "metrics.jsonl", follows=not self._writes)
        self._writer: Any = None
        self.left_behind: str | None = None
        """Who held the folder last, if that process ended without letting go of it."""

    @classmethod
    def open(cls, path: Path, config: Any, *, resume: bool, plan: Any = None) -> "RunFolder":
        """A folder for a new run, or the folder of a run that goes on, held until it is closed.

        `config` is the JSON value of config.json, `plan` a sweep's of plan.json. Refused: a new run
        where there is one already, a resumed one with another config, a folder that another process
        holds or that cannot be written.
        """
        folder, refusal = cls(path), None
        if processes.is_first():
            try:
                folder._begin(config, resume, plan)
            except RunFolderError as error:
                refusal = error
        if not processes.first_succeeded(refusal is None):
            raise refusal or RunFolderError(f"{path} cannot be used: the first process says why")
        return folder

    def _begin(self, config: Any, resume: bool, plan: Any) -> None:
        try:
            if plan is None and (self.path / "plan.json").exists():
                raise RunFolderError(
                    f"{self.path} holds a sweep: go on with it by scripts/sweep.py --resume"
                )
            self._check(config, resume)
            check_links(self.path)
            self.path.mkdir(parents=True, exist_ok=True)
            self._acquire()
            self._check(config, resume)  # another process may have been here in between
            if not resume:
                if plan is not None:
                    self._write_json("plan.json", plan)
                self._write_json("config.json", config)  # last: it says that a run is here
        except RunFolderError:
            self.close()
            raise
        except OSError as error:
            self.close()
            reason = error.strerror or error
            raise RunFolderError(f"{self.path} cannot be written: {reason}") from None

    def _check(self, config: Any, resume: bool) -> None:
        """Refuse a new run where there is one, and a resumed one with another config."""
        path, written = self.path, self.path / "config.json"
        if resume:
            saved = read_json(written)
            if saved != config:
                different = "; ".join(differences(saved, config))
                raise RunFolderError(f"{path} holds a run with another config: {different}")
        elif written.exists():
            raise RunFolderError(
                f"{path} already holds a run: go on with it by --resume, or choose another folder"
            )

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
        if self._writer is not None:
            self._writer.close()
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

    def write_environment(
        self, execution: Execution, mesh_shape: dict[str, int], parts: list[Part]
    ) -> list[str]:
        """Add this start to environment.json, a list with one entry for each start of the run.

        The files that define parts from outside the package are copied into code/, to be read: no
        program runs them. Return the differences from the first start that can change bits.
        """
        if not self._writes:
            return []
        path = self.path / "environment.json"
        starts = read_json(path) if path.exists() else []
        if not (isinstance(starts, list) and all(isinstance(start, dict) for start in starts)):
            raise RunFolderError(f"{path} is not what the run wrote: put it back, or remove it")
        starts.append(environment(execution, mesh_shape, parts))
        for file in files_of(parts):
            (self.path / "code").mkdir(exist_ok=True)
            write_atomically(self.path / "code" / file.name, file.read_bytes())
        write_atomically(path, json.dumps(starts, indent=2) + "\n")
        return changes(starts[0], starts[-1])

    def write_scalars(self, epoch: int, scalars: Mapping[str, float]) -> None:
        """A point of each named curve in TensorBoard, over epochs.

        The first call of a start hides what an interrupted one left from this epoch on.
        """
        if not self._writes:
            return
        # Not SummaryWriter: it writes behind a queue, and its flush does not wait for it.
        with _as_if_not_installed("torch"):  # tensorboardX would import it, for seconds
            from tensorboardX.event_file_writer import EventsWriter
            from tensorboardX.proto import event_pb2
            from tensorboardX.summary import scalar

        proto: Any = event_pb2  # its classes are made when it is imported
        if self._writer is None:
            folder = self.path / "tensorboard"
            folder.mkdir(exist_ok=True)
            self._writer = EventsWriter(str(folder / "events"), f".{epoch:06}")
            start = proto.SessionLog(status=proto.SessionLog.START)
            event = proto.Event(wall_time=time.time(), step=epoch, session_log=start)
            self._writer.write_event(event)
        for name, value in scalars.items():
            event = proto.Event(wall_time=time.time(), step=epoch, summary=scalar(name, value))
            self._writer.write_event(event)
        self._writer.flush()

    def draw_curves(self, tag: Mapping[str, int], clip_norm: float | None, title: str) -> None:
        """Draw curves.png from the lines of metrics.jsonl with this tag: those of one run.

        Draw probes.png where a probe has measured something.
        """
        if not self._writes:
            return
        lines = [line for line in self.metrics.read() if tag.items() <= line.items()]
        figures.curves(
            self.path / "curves.png",
            [line for line in lines if line["split"] == "train"],
            [line for line in lines if line["split"] == "epoch"],
            [line for line in lines if "total" in line],
            clip_norm,
            title=f"{self.path.resolve().name}: {title}",
        )
        probed = [line for line in lines if line["split"] == "probes"]
        if probed:
            draw_probes(self.path / "probes.png", probed, title=self.path.resolve().name)

    def write_result(self, result: Any) -> None:
        if not self._writes:
            return
        self._write_json("result.json", result)

    def _write_json(self, name: str, value: Any) -> None:
        write_atomically(self.path / name, json.dumps(value, indent=2) + "\n")
