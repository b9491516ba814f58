"""Checkpoints by Orbax: the state, which holds the position in the data, saved whole or not at all.

Orbax checks neither dtypes nor content, so each checkpoint carries a fingerprint: path, dtype,
shape and CRC-32 of every array. A restore is strict; what does not fit or is damaged is said.
"""

import contextlib
import gc
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from mlp_research.checkpoints.fingerprint import (
    by_path,
    crc32_of_json,
    described,
    differences,
    fingerprint,
)
from mlp_research.errors import Failure
from mlp_research.shapes import is_shape
from mlp_research.system import processes, sharding

KEPT = 2
"""How many of the newest checkpoints are kept, beside the best by validation."""

METADATA = ("notes", "fingerprint", "validation_accuracy")
"""What stands in each checkpoint beside the arrays, under a CRC-32 of its own."""

State = TypeVar("State")


class CheckpointError(Failure):
    """A checkpoint that does not fit, or none that is sound."""


class Checkpoints:
    """The checkpoints of one run. Saving returns at once and goes on in the background."""

    def __init__(self, directory: Path, *, reading: bool = False):
        """`reading` leaves everything as it is, also what a run that goes on has half written."""
        self.directory = directory.absolute()
        self._reading = reading
        self._pending: Any = None
        self._damage: list[str] = []
        self._open()

    def _open(self) -> None:
        try:
            self._orbax = self._opened(self.directory)
        except Exception as error:
            self._set_unreadable_aside(error)
            self._orbax = self._opened(self.directory)
        self._scores: dict[int, float] = {}
        for step in self.steps:
            with contextlib.suppress(DamagedError):
                score = self._metadata(step)["validation_accuracy"]
                if score is not None:
                    self._scores[step] = score

    def _opened(self, directory: Path) -> Any:
        from orbax.checkpoint import v1  # over a second to import

        ocp: Any = v1  # its annotations name types that are not its own
        with _quiet():
            return ocp.training.Checkpointer(
                directory,
                save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
                preservation_policy=self,
                cleanup_tmp_directories=not self._reading,
            )

    def _set_unreadable_aside(self, error: Exception) -> None:
        """One checkpoint whose metadata Orbax cannot read, and it opens none of the others.

        Raises `DamagedError` where the folder is only read.
        """
        found = [int(path.name) for path in self.directory.glob("*") if path.name.isdigit()]
        unreadable = [step for step in sorted(found) if not self._opens_alone(step)]
        if not unreadable:
            raise CheckpointError(f"{self.directory} cannot be opened: {error}") from error
        for step in unreadable:
            damage = DamagedError(step, f"its metadata do not load ({type(error).__name__})")
            if self._reading:
                raise damage from error
            self._damage.append(str(damage))
            self._move_aside(step)

    def _opens_alone(self, step: int) -> bool:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / str(step)).symlink_to(self.directory / str(step))
            try:
                self._opened(Path(folder)).close()
            except Exception:
                return False
            return True

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax asks which of its checkpoints to keep: the newest, and the best.

        Its own keeper of the best reads a file of metrics for each, and fails where one is damaged.
        """
        steps = [checkpoint.step for checkpoint in checkpoints]
        surplus = self._surplus(steps)
        return [step not in surplus for step in steps]

    def _surplus(self, steps: Sequence[int]) -> list[int]:
        return [step for step in sorted(steps)[:-KEPT] if step != self.best_step]

    @property
    def steps(self) -> list[int]:
        """The steps at which there are checkpoints, ascending."""
        with _quiet():
            return sorted(checkpoint.step for checkpoint in self._orbax.checkpoints)

    @property
    def best_step(self) -> int | None:
        """The step of the best validation accuracy, the latest of equal ones."""
        best = max(((score, step) for step, score in self._scores.items()), default=None)
        return best and best[1]

    def save(
        self, step: int, state: PyTree, notes: dict, validation_accuracy: float | None
    ) -> None:
        """Save the state's arrays with `notes`, small JSON values, unless this step is saved."""
        if step in self.steps:
            return
        arrays = eqx.filter(state, eqx.is_array)
        empty = [path for path, leaf in by_path(arrays).items() if leaf.size == 0]
        if empty:  # Orbax fails in the background, and then holds the process for minutes
            raise CheckpointError(f"arrays without a number cannot be saved: {', '.join(empty)}")
        metadata: Any = {
            "notes": notes,
            "fingerprint": fingerprint(arrays),
            "validation_accuracy": validation_accuracy,
        }
        metadata["crc32"] = crc32_of_json(metadata)
        if validation_accuracy is not None:
            self._scores[step] = validation_accuracy
        with self._saving():
            self._settle()
            self._check_writable()
            self._pending = self._orbax.save_async(
                step, by_path(arrays), force=True, custom_metadata=metadata
            )

    def paths(self, step: int) -> list[str]:
        """Return the paths of the arrays that a checkpoint holds: `.state.model.layers[0].bias`."""
        return list(self._metadata(step)["fingerprint"])

    def read(self, step: int, below: str) -> dict[str, np.ndarray]:
        """Return the arrays of a checkpoint that lie `below` a path, by what follows it.

        Raises `DamagedError` where they are not what was saved.
        """
        held = self._metadata(step)["fingerprint"]
        paths = [path for path in held if path.startswith(below)]
        whole = sharding.replicated(sharding.device_mesh())
        wanted = {
            path: jax.ShapeDtypeStruct(
                tuple(held[path][1]), jnp.dtype(held[path][0]), sharding=whole
            )
            for path in paths
        }
        arrays = self._load(step, wanted, held.keys() - wanted.keys())
        for path in paths:
            if described(arrays[path]) != held[path]:
                raise DamagedError(step, f"the content of {path} has changed since it was saved")
        return {path.removeprefix(below): processes.on_host(arrays[path]) for path in paths}

    def restore(self, step: int, template: State, *, below: str = "") -> tuple[State, dict]:
        """Return (state, notes) of a checkpoint, or of the part of the state that lies `below`.

        `template` is the state by shapes alone, each with the sharding that says where its array is
        to lie. Raises `CheckpointError` where the checkpoint does not fit it, `DamagedError` where
        it is damaged.
        """
        abstract, static = eqx.partition(template, is_shape)
        metadata = self._metadata(step)
        wanted = {below + path: leaf for path, leaf in by_path(abstract).items()}
        held = metadata["fingerprint"]
        saved = {path: held[path] for path in held if path.startswith(below)}
        unlike = differences(saved, {path: described(leaf) for path, leaf in wanted.items()})
        if unlike:
            lines = "\n  ".join(unlike[:10])
            raise CheckpointError(
                f"checkpoint {step} does not fit this model and optimizer:\n  {lines}"
            )
        arrays = self._load(step, wanted, held.keys() - wanted.keys())
        restored = jax.tree.unflatten(jax.tree.structure(abstract), [arrays[p] for p in wanted])
        for path, leaf in arrays.items():
            if path in wanted and described(leaf) != saved[path]:
                raise DamagedError(step, f"the content of {path} has changed since it was saved")
        return eqx.combine(restored, static), metadata["notes"]

    def _load(self, step: int, wanted: dict[str, Any], left: Iterable[str]) -> dict[str, Any]:
        """Return the arrays at the wanted paths; what stands at the paths `left` is not read."""
        from orbax.checkpoint import v1

        ocp: Any = v1
        paths = wanted | dict.fromkeys(left, ocp.PLACEHOLDER)
        return _read(step, "it does not load", lambda: self._orbax.load(step, paths))

    def restore_newest(self, template: State) -> tuple[State, dict, list[str]] | None:
        """(state, notes, what was damaged) of the newest sound checkpoint, or None.

        Damaged ones are moved into `damaged/`. Raises `CheckpointError` where all are damaged.
        """
        damage = [*self._damage]
        for step in reversed(self.steps):
            try:
                state, notes = self.restore(step, template)
            except DamagedError as error:
                damage.append(str(error))
                self._set_aside(step)
            else:
                return state, notes, damage
        if damage:
            raise CheckpointError(
                "no sound checkpoint is left:\n  "
                + "\n  ".join(damage)
                + f"\nThey lie in {self.directory / 'damaged'}. Start a new run."
            )
        return None

    def wait(self) -> None:
        """Return when what was saved is on the disk; a failure to save is raised here."""
        with self._saving():
            self._settle()
            self._orbax.wait()
            # A run that was killed between a save and the removal of an older one left that there.
            for step in self._surplus(self.steps):
                self._orbax.delete(step)

    def _settle(self) -> None:
        """Wait for what is being saved. Orbax keeps a thread and its files until it is asked."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        with self._saving():
            try:
                self._settle()
            finally:
                self._orbax.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        # What ended the run comes first, not what then could not be saved either.
        with contextlib.suppress(*([] if exception[0] is None else [CheckpointError])):
            self.close()

    def _check_writable(self) -> None:
        """Where Orbax can make no folder, its threads wait minutes for it, and the process too."""
        if processes.is_first():
            probe = self.directory / ".probe"
            probe.mkdir(exist_ok=True)
            probe.rmdir()

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """What goes wrong in Orbax while it saves becomes a `CheckpointError`."""
        try:
            with _quiet():
                yield
        except Exception as error:
            reason = str(error).strip().partition("\n")[0]
            raise CheckpointError(
                f"a checkpoint cannot be saved in {self.directory}: {reason}. When that is mended, "
                "go on by --resume from the last one that is whole"
            ) from error

    def _metadata(self, step: int) -> dict:
        def read() -> tuple[dict, Any]:
            metadata: Any = self._orbax.metadata(step).custom_metadata
            return {name: metadata[name] for name in METADATA}, metadata["crc32"]

        found, crc32 = _read(step, "its metadata do not load", read)
        if crc32 != crc32_of_json(found):
            raise DamagedError(step, "its metadata have changed since they were saved")
        return found

    def _set_aside(self, step: int) -> None:
        self._orbax.close()
        self._move_aside(step)
        self._open()

    def _move_aside(self, step: int) -> None:
        if processes.is_first():
            aside = self.directory / "damaged"
            aside.mkdir(exist_ok=True)
            number = sum(1 for _ in aside.iterdir())
            with contextlib.suppress(FileNotFoundError):
                (self.directory / str(step)).rename(aside / f"{step}-{number}")
        processes.wait_for_all(f"checkpoint {step} is set aside")


class DamagedError(CheckpointError):
    """A checkpoint whose files are not what was saved."""

    def __init__(self, step: int, what: str):
        super().__init__(f"checkpoint {step} is damaged: {what}")


def _read(step: int, fault: str, read: Callable[[], Any]) -> Any:
    """Return what Orbax reads of a checkpoint. Raises `DamagedError` for all that it raises."""
    with _quiet():
        try:
            return read()
        except Exception as error:
            reason = type(error).__name__
        # Reads beside the one that failed go on, and each says at its end that none waits.
        time.sleep(0.1)
        gc.collect()
    raise DamagedError(step, f"{fault} ({reason})")


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax says at length what goes wrong, and so do its tasks; we say it in one sentence."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels, hook = [logger.level for logger in loggers], sys.unraisablehook
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    sys.unraisablehook = lambda _: None
    try:
        yield
    finally:
        sys.unraisablehook = hook
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
