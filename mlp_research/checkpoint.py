"""Checkpoints by Orbax: the state, which holds the position in the data, saved whole or not at all.

Orbax checks neither dtypes nor content, so each checkpoint carries a fingerprint: path, dtype,
shape and CRC-32 of every array. A restore is strict; what does not fit or is damaged is said.
"""

import contextlib
import logging
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jaxtyping import PyTree

from mlp_research import processes
from mlp_research.frozen import Failure

KEPT = 2
"""How many of the newest checkpoints are kept, beside the best by validation."""

METADATA = ("notes", "fingerprint", "validation_accuracy")
"""What stands in each checkpoint beside the arrays."""

State = TypeVar("State")


class CheckpointError(Failure):
    """A checkpoint that does not fit, or none that is sound."""


class Checkpoints:
    """The checkpoints of one run. Saving returns at once and goes on in the background."""

    def __init__(self, directory: Path, *, reading: bool = False):
        """`reading` leaves everything as it is, also what a run that goes on has half written."""
        self.directory = directory.absolute()
        self._reading = reading
        self._open()

    def _open(self) -> None:
        from orbax.checkpoint import v1  # over a second to import

        ocp: Any = v1  # its annotations name types that are not its own
        self._orbax = ocp.training.Checkpointer(
            self.directory,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=self,
            cleanup_tmp_directories=not self._reading,
        )
        self._scores: dict[int, float] = {}
        for step in self.steps:
            with contextlib.suppress(DamagedError):
                score = self._metadata(step)["validation_accuracy"]
                if score is not None:
                    self._scores[step] = score

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax asks which of its checkpoints to keep: the newest, and the best.

        Its own keeper of the best reads a file of metrics for each, and fails where one is damaged.
        """
        steps = [checkpoint.step for checkpoint in checkpoints]
        kept = {*sorted(steps)[-KEPT:], self.best_step}
        return [step in kept for step in steps]

    @property
    def steps(self) -> list[int]:
        """The steps at which there are checkpoints, ascending."""
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
        if validation_accuracy is not None:
            self._scores[step] = validation_accuracy
        self._orbax.save_async(step, by_path(arrays), force=True, custom_metadata=metadata)

    def restore(self, step: int, template: State) -> tuple[State, dict]:
        """(state, notes) of a checkpoint.

        `template` is the state by shapes alone, each with the sharding that says where its array is
        to lie. Raises `CheckpointError` where the checkpoint does not fit it, `DamagedError` where
        it is damaged.
        """
        abstract, static = eqx.partition(template, _is_shape)
        metadata = self._metadata(step)
        saved, wanted = metadata["fingerprint"], by_path(abstract)
        _check_fits(step, saved, fingerprint(abstract))
        try:
            with _quiet():
                arrays = self._orbax.load(step, wanted)
        except Exception as error:
            raise DamagedError(step, f"it does not load ({type(error).__name__})") from error
        restored = jax.tree.unflatten(jax.tree.structure(abstract), [arrays[p] for p in wanted])
        for path, described in fingerprint(restored).items():
            if described != saved[path]:
                raise DamagedError(step, f"the content of {path} has changed since it was saved")
        return eqx.combine(restored, static), metadata["notes"]

    def restore_newest(self, template: State) -> tuple[State, dict, list[str]] | None:
        """(state, notes, what was damaged) of the newest sound checkpoint, or None.

        Damaged ones are moved into `damaged/`. Raises `CheckpointError` where all are damaged.
        """
        damage = []
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
        self._orbax.wait()

    def close(self) -> None:
        self._orbax.close()

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _metadata(self, step: int) -> dict:
        try:
            with _quiet():
                metadata: Any = self._orbax.metadata(step).custom_metadata
            return {name: metadata[name] for name in METADATA}
        except Exception as error:
            raise DamagedError(
                step, f"its metadata do not load ({type(error).__name__})"
            ) from error

    def _set_aside(self, step: int) -> None:
        self._orbax.close()
        if processes.is_first():
            aside = self.directory / "damaged"
            aside.mkdir(exist_ok=True)
            number = sum(1 for _ in aside.iterdir())
            with contextlib.suppress(FileNotFoundError):
                (self.directory / str(step)).rename(aside / f"{step}-{number}")
        processes.wait_for_all(f"checkpoint {step} is set aside")
        self._open()


class DamagedError(CheckpointError):
    """A checkpoint whose files are not what was saved."""

    def __init__(self, step: int, what: str):
        super().__init__(f"checkpoint {step} is damaged: {what}")


def by_path(tree: PyTree) -> dict[str, Any]:
    """Path -> leaf: all that is saved. What in a tree holds no array cannot make it not fit."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): leaf for path, leaf in leaves}


def fingerprint(tree: PyTree) -> dict[str, list]:
    """Path -> [dtype, shape, CRC-32 of the bytes] of each array; shapes alone have no CRC-32."""
    return {path: _describe(leaf) for path, leaf in by_path(tree).items()}


def _describe(leaf: Any) -> list:
    described = [str(leaf.dtype), list(leaf.shape)]
    if _is_shape(leaf):
        return described
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jr.key_data(leaf)
    return [*described, zlib.crc32(np.ascontiguousarray(processes.on_host(leaf)).tobytes())]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Orbax logs at length what goes wrong; we say it in one sentence."""
    logger = logging.getLogger("absl")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(level)


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _check_fits(step: int, saved: dict[str, list], wanted: dict[str, list]) -> None:
    differences = [
        f"{path}: saved {_short(saved.get(path))}, wanted {_short(wanted.get(path))}"
        for path in sorted(saved.keys() | wanted.keys())
        if (saved.get(path) or [])[:2] != wanted.get(path)
    ]
    if differences:
        raise CheckpointError(
            f"checkpoint {step} does not fit this model and optimizer:\n  "
            + "\n  ".join(differences[:10])
        )


def _short(described: list | None) -> str:
    return f"{described[0]}{described[1]}" if described else "nothing"
