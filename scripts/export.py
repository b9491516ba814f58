"""A saved run's model as one file that needs JAX alone: python scripts/export.py RUN_DIR.

Three files are written: model.jaxexport (StableHLO with the parameters, for any batch size),
model.stablehlo.mlir (the same program as text) and load.py (how it is loaded).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro

from mlp_research.analysis import export, saved_run
from mlp_research.analysis.export import ExportError, LogitsFunction, Platform
from mlp_research.data.batches import Split
from mlp_research.storage.run_folder import RunFolderError, write_atomically
from mlp_research.terminal import command_line
from mlp_research.terminal.report import Report

CHECKED_AT_ONCE = 1000
"""Test rows of one call when the written program is compared with the model."""


@dataclasses.dataclass(frozen=True)
class Flags(saved_run.SavedRunFlags):
    """What is exported, and to where."""

    mesh_data: Annotated[int | None, tyro.conf.arg(name="mesh.data", metavar="INT")] = 1
    """Devices on which the state is read; the file asks for one, wherever it is run."""
    output: Path | None = None
    """Folder for the three files; by default RUN_DIR/export."""
    platforms: tuple[Platform, ...] = export.PLATFORMS
    """Kinds of device that the one file can be run on."""


def main(argv: Sequence[str]) -> None:
    flags = tyro.cli(Flags, args=argv, description=__doc__)
    experiment = saved_run.open_run(flags, only_evaluated=True)
    saved = saved_run.restore(experiment, flags)
    data = experiment.data
    images, inputs = data.test.images, experiment.recipe.inputs
    exported = export.export(saved.model, images, inputs, flags.platforms)
    content = export.serialize(exported)
    expected = export.logits_function(saved.model, inputs)
    checked = agreement(expected, export.deserialize(content), data.test)
    output = flags.output or flags.run_dir / "export"
    texts = {
        "model.stablehlo.mlir": exported.mlir_module(),
        "load.py": export.loader(content, images, data.classes),
    }
    write(output, {export.MODEL_FILE: content} | {name: t.encode() for name, t in texts.items()})
    Report().facts(
        {
            "model": f"step {saved.step:,} of {flags.run_dir}, its {flags.checkpoint} state",
            "takes": f"images {export.described(images)}, any batch size",
            "gives": f"logits float32 [batch, {data.classes}], randomness off",
            "runs on": ", ".join(flags.platforms),
            "check": checked,
            "written": f"{output / export.MODEL_FILE} ({len(content):,} bytes), "
            f"{' and '.join(texts)} beside it",
            "use": f"python {output / 'load.py'} IMAGES.npy",
        }
    )


def agreement(expected: LogitsFunction, loaded: LogitsFunction, split: Split) -> str:
    """How the loaded program's logits stand to the model's own, on every row of a split.

    Raises `ExportError` where they differ by more than rounding.
    """
    answers = []
    for function in (jax.jit(expected), loaded):
        parts = [
            np.asarray(function(split.images[start : start + CHECKED_AT_ONCE]))
            for start in range(0, len(split), CHECKED_AT_ONCE)
        ]
        answers.append(np.concatenate(parts))
    wanted, found = answers
    right = int((found.argmax(axis=1) == split.labels).sum())
    rows = f"{len(split):,} test rows, {right:,} right ({100 * right / len(split):.2f} %)"
    if np.array_equal(wanted, found):
        return f"{rows}; bitwise the model's logits"
    difference = np.abs(wanted - found).max() / np.abs(wanted).max()
    if difference <= 1e-5:  # what another device may round differently
        return f"{rows}; the model's logits to {difference:.1g}"
    raise ExportError(
        f"the exported program's logits differ from the model's by {difference:.2g} of the largest:"
        " nothing was written. Please report the model"
    )


def write(folder: Path, files: dict[str, bytes]) -> None:
    """Each file is the old one or the new one, whatever happens."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_atomically(folder / name, content)
    except OSError as error:
        raise RunFolderError(f"{folder} cannot be written: {error.strerror or error}") from None


if __name__ == "__main__":
    command_line.run(main)
