"""A start from another run's checkpoint."""

from pathlib import Path
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from pydantic import Field

from mlp_research.base_config import json_value
from mlp_research.checkpoints.checkpoint import CheckpointError, Checkpoints
from mlp_research.checkpoints.fingerprint import crc32_of_json, described
from mlp_research.errors import ConfigError
from mlp_research.models import Model, Stateful
from mlp_research.shapes import RandomKey, is_array_or_shape, is_below, named_leaves
from mlp_research.starts.base import Start

Arrays = dict[str, np.ndarray]
"""Arrays by their paths in a model."""


class RunStart(Start, frozen=True):
    """The parameters of another run, and its model's state, as that run's result was evaluated."""

    kind: Literal["run"] = "run"
    run_dir: str = ""
    """Folder of the run that is started from."""
    checkpoint: Literal["last", "best"] = "last"
    """Its newest checkpoint, or the best by validation accuracy."""
    leaves: tuple[str, ...] = ()
    """Paths that are taken, such as layers[0]; all else stays the seed's. By default all arrays."""
    crc32: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Checksum that its arrays must have; by default that of what the run finds first and keeps."""

    def prepare(self, model: Any, *, key: RandomKey) -> Any:
        return self.prepare_whole(model, key=key)

    def prepare_whole(self, model: Model, *, key: RandomKey) -> Model:
        source = self._arrays()
        self._checked(source)
        own = dict(_arrays_by_path(model))
        taken = self._taken(own) if self.leaves else [*source]
        unlike = [
            f"{path} is {_shown(source.get(path))} there and {_shown(own.get(path))} here"
            for path in sorted({*taken, *(() if self.leaves else own)})
            if _shown(source.get(path)) != _shown(own.get(path))
        ]
        if unlike:
            raise ConfigError(
                f"start.run_dir {self.run_dir} does not fit this model: {'; '.join(unlike[:6])}. "
                "Choose a model like its own, or name what is taken by --start.leaves"
            )
        kept = {path: jnp.asarray(source[path]) for path in taken}
        return _with_arrays(model, kept)

    @property
    def is_gone(self) -> bool:
        return self.crc32 is not None and not Path(self.run_dir, "checkpoints").is_dir()

    def identified(self) -> "Start":
        if self.is_gone:
            return self
        return self.model_copy(update={"crc32": self._checked(self._arrays())})

    def _checked(self, source: Arrays) -> int:
        """Return the checksum of a source. Raises `ConfigError` where it is not the one wanted."""
        crc32 = crc32_of_json({path: described(leaf) for path, leaf in source.items()})
        if self.crc32 not in (None, crc32):
            raise ConfigError(
                f"start.run_dir {self.run_dir} does not hold what the run was begun from: "
                f"start.crc32 is {self.crc32}, that of its {self.checkpoint} checkpoint {crc32}. "
                "Put that checkpoint back, or begin a new run"
            )
        return crc32

    def _taken(self, own: dict[str, Any]) -> list[str]:
        """Return the paths that are named. Raises `ConfigError` for a name that no array has."""
        taken: list[str] = []
        for name in self.leaves:
            found = [path for path in own if is_below(path, name)]
            if not found:
                raise ConfigError(
                    f"start.leaves {name}: the model has no such array. It has {', '.join(own)}"
                )
            taken += found
        return taken

    def _arrays(self) -> Arrays:
        """Return the arrays of the source's model. Raises `ConfigError` where there are none."""
        directory = Path(self.run_dir, "checkpoints")
        if not self.run_dir or not directory.is_dir():
            raise ConfigError(
                f"start.run_dir is {self.run_dir!r}, which holds no checkpoint: name the folder of "
                "a run that was trained"
            )
        if "members" in _config_of(directory.parent):
            raise ConfigError(
                f"start.run_dir {self.run_dir} holds members of one program: train the one that is "
                "wanted alone, which gives the same bits, and name its folder"
            )
        try:
            with Checkpoints(directory, reading=True) as checkpoints:
                step = checkpoints.best_step if self.checkpoint == "best" else None
                if self.checkpoint == "last" and checkpoints.steps:
                    step = checkpoints.steps[-1]
                if step is None:
                    raise ConfigError(f"start.run_dir {self.run_dir} has no {self.checkpoint} yet")
                apart = any(path.startswith(".evaluated") for path in checkpoints.paths(step))
                arrays = checkpoints.read(step, ".evaluated" if apart else ".state.model")
        except CheckpointError as error:
            raise ConfigError(f"start.run_dir {self.run_dir} cannot be read: {error}") from None
        stateful = any(path.startswith(".state[") for path in arrays)
        return {_path(path, stateful): leaf for path, leaf in arrays.items()}


def _config_of(run_dir: Path) -> dict[str, Any]:
    """Return a run's config as JSON, or nothing where there is none that can be read."""
    try:
        values = json_value((run_dir / "config.json").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigError):
        return {}
    return values if isinstance(values, dict) else {}


def _path(path: str, stateful: bool) -> str:
    """Return the path of an array within the model: `layers[0].weight`, with a state or not."""
    path = path.lstrip(".")
    return path.removeprefix("model.") if stateful else path


def _arrays_by_path(model: Model) -> list[tuple[str, Any]]:
    stateful = isinstance(model, Stateful)
    return [
        (_path(path, stateful), leaf)
        for path, leaf in named_leaves(model)
        if is_array_or_shape(leaf)
    ]


def _with_arrays(model: Model, arrays: dict[str, Any]) -> Model:
    """Return the model with these arrays in place of its own at their paths."""
    stateful = isinstance(model, Stateful)
    leaves = [arrays.get(_path(path, stateful), leaf) for path, leaf in named_leaves(model)]
    return jax.tree.unflatten(jax.tree.structure(model), leaves)


def _shown(leaf: Any) -> str:
    return "absent" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
