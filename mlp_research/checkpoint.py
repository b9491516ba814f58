"""Checkpoints by Orbax: the state, which holds the position in the data, saved whole or not at all.

Orbax checks neither dtypes nor content, so each checkpoint carries a fingerprint: path, dtype,
shape and CRC-32 of every array. A restore is strict; what does not fit or is damaged is said.
"""

import contextlib
import zlib
from pathlib import Path
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from jax.sharding import Sharding
from jaxtyping import PyTree

from mlp_research.frozen import Failure

KEPT = 2
"""How many of the newest checkpoints are kept, beside the best by validation."""

State = TypeVar("State")


class CheckpointError(Failure):
    """A checkpoint that does not fit, or none that is sound."""


class Checkpoints:
    """The checkpoints of one run. Saving returns at once and goes on in the background."""

    def __init__(self, directory: Path):
        self.directory = directory.absolute()
        self._open()

    def _open(self) -> None:
        from orbax.checkpoint import v1  # over a second to import

        ocp: Any = v1  # its annotations name types that are not its own
        policies = ocp.training.preservation_policies
        self._orbax = ocp.training.Checkpointer(
            self.directory,
            save_decision_policy=ocp.training.save_decision_policies.FixedIntervalPolicy(1),
            preservation_policy=policies.AnyPreservationPolicy(
                [
                    policies.LatestN(KEPT),
                    policies.BestN(
                        get_metric_fn=lambda metrics: metrics["validation_accuracy"],
                        n=1,
                        keep_checkpoints_without_metrics=False,
                    ),
                ]
            ),
            cleanup_tmp_directories=True,
        )

    @property
    def steps(self) -> list[int]:
        """The steps at which there are checkpoints, ascending."""
        return sorted(checkpoint.step for checkpoint in self._orbax.checkpoints)

    @property
    def best_step(self) -> int | None:
        """The step of the best validation accuracy, the latest of equal ones."""
        scored = [
            (checkpoint.metrics["validation_accuracy"], checkpoint.step)
            for checkpoint in self._orbax.checkpoints
            if checkpoint.metrics
        ]
        return max(scored)[1] if scored else None

    def save(
        self, step: int, state: PyTree, notes: dict, validation_accuracy: float | None
    ) -> None:
        """Save the state's arrays with `notes`, small JSON values, unless this step is saved."""
        if step in self.steps:
            return
        arrays = eqx.filter(state, eqx.is_array)
        metadata: Any = {"notes": notes, "fingerprint": fingerprint(arrays)}
        metrics: Any = None
        if validation_accuracy is not None:
            metrics = {"validation_accuracy": validation_accuracy}
        self._orbax.save_async(
            step,
            arrays,
            force=True,
            metrics=metrics,
            custom_metadata=metadata,
        )

    def restore(self, step: int, template: State, sharding: Sharding) -> tuple[State, dict]:
        """(state, notes) of a checkpoint, placed by `sharding`.

        `template` is the state by shapes alone, as `eqx.filter_eval_shape` gives it. Raises
        `CheckpointError` where the checkpoint does not fit it, `DamagedError` where it is damaged.
        """
        abstract, static = eqx.partition(template, _is_shape)
        abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), abstract
        )
        metadata = self._metadata(step)
        saved = metadata["fingerprint"]
        _check_fits(step, saved, abstract)
        try:
            arrays = self._orbax.load(step, abstract)
        except Exception as error:
            raise DamagedError(step, f"it does not load ({type(error).__name__})") from error
        for path, (*_, checksum) in fingerprint(arrays).items():
            if checksum != saved[path][2]:
                raise DamagedError(step, f"the content of {path} has changed since it was saved")
        return eqx.combine(arrays, static), metadata["notes"]

    def restore_newest(
        self, template: State, sharding: Sharding
    ) -> tuple[State, dict, list[str]] | None:
        """(state, notes, what was damaged) of the newest sound checkpoint, or None.

        Damaged ones are moved into `damaged/`. Raises `CheckpointError` where all are damaged.
        """
        damage = []
        for step in reversed(self.steps):
            try:
                state, notes = self.restore(step, template, sharding)
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
            metadata: Any = self._orbax.metadata(step).custom_metadata
            return {"notes": metadata["notes"], "fingerprint": metadata["fingerprint"]}
        except Exception as error:
            raise DamagedError(
                step, f"its metadata do not load ({type(error).__name__})"
            ) from error

    def _set_aside(self, step: int) -> None:
        aside = self.directory / "damaged"
        aside.mkdir(exist_ok=True)
        number = sum(1 for _ in aside.iterdir())
        self._orbax.close()
        with contextlib.suppress(FileNotFoundError):
            (self.directory / str(step)).rename(aside / f"{step}-{number}")
        self._open()


class DamagedError(CheckpointError):
    """A checkpoint whose files are not what was saved."""

    def __init__(self, step: int, what: str):
        super().__init__(f"checkpoint {step} is damaged: {what}")


def fingerprint(tree: PyTree) -> dict[str, list]:
    """Path -> [dtype, shape, CRC-32 of the bytes] of each array; shapes alone have no CRC-32."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path): _describe(leaf) for path, leaf in leaves}


def _describe(leaf: Any) -> list:
    described = [str(leaf.dtype), list(leaf.shape)]
    if _is_shape(leaf):
        return described
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jr.key_data(leaf)
    return [*described, zlib.crc32(np.ascontiguousarray(leaf).tobytes())]


def _is_shape(leaf: Any) -> bool:
    return isinstance(leaf, jax.ShapeDtypeStruct)


def _check_fits(step: int, saved: dict[str, list], template: PyTree) -> None:
    wanted = fingerprint(template)
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
