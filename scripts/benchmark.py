"""Measure: python scripts/benchmark.py [WHAT ...] [--repeats N] [--record].

frameworks   an epoch through `fit`, the same in other frameworks, and the machine's floor
members      1 to 16 seeds in one program, a single run, PyTorch: per step and member
loader       the loader alone, against a bare numpy gather and an epoch
start        from process start to trained: preset `fast`, cold and warm compile cache, the lessons
growth       time an image and memory: widths, depths, devices, 60 thousand to 6 million images
contracts    shape contracts on and off: import, first call, steady epoch
models       each model of the table over as many seeds: accuracy, parameters, time an epoch
optimizers   rules, schedules, batch sizes and learning rates over as many seeds: accuracy
parity       one MLP in every framework: the losses of 100 equal steps, and what each looks like

Without WHAT the first four. What is compared alternates within one run, warmed, each until its
result is there; times are compared by their ratios, for the machine's speed is not constant.
"""

import dataclasses
import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro
from benchmarks import results_page

from mlp_research.errors import Failure
from mlp_research.terminal import command_line

if TYPE_CHECKING:
    from benchmarks.measurement import Measurement

WHERE = {
    "frameworks": "speed",
    "members": "speed",
    "loader": "speed",
    "start": "starts",
    "growth": "growth",
    "contracts": "starts",
    "models": "studies",
    "optimizers": "studies",
    "parity": "studies",
}
"""The file of benchmarks/ that holds each."""
What = Literal[
    "frameworks",
    "members",
    "loader",
    "start",
    "growth",
    "contracts",
    "models",
    "optimizers",
    "parity",
]


@dataclasses.dataclass(frozen=True)
class Flags:
    """What is measured."""

    what: Annotated[tuple[What, ...], tyro.conf.Positional] = (
        *("frameworks", "members", "loader", "start"),
    )
    """The comparisons."""
    repeats: int = 5
    """Measurements of each, or seeds; the medians are compared."""
    output: Path = Path("runs/benchmark")
    """Folder for benchmark.json and the pictures."""
    record: bool = False
    """Write the tables into docs/results.md, and the pictures beside it."""


def main(argv: Sequence[str]) -> None:
    flags = tyro.cli(Flags, args=argv, description=str(__doc__).replace("\n", "\n\n"))
    what, *others = flags.what
    if others:
        for each in flags.what:
            alone(each, flags)
        return
    function = getattr(importlib.import_module(f"benchmarks.{WHERE[what]}"), what)
    with tempfile.TemporaryDirectory() as folder:
        measured: Measurement = function(flags.repeats, Path(folder))
    print("\n".join(measured.lines), flush=True)
    keep(measured, what, flags)


def alone(what: str, flags: Flags) -> None:
    """Measure in a process of its own: some choose how many devices JAX has, which it asks once."""
    words = ["--repeats", str(flags.repeats), "--output", str(flags.output)]
    command = [sys.executable, __file__, what, *words, *(["--record"] if flags.record else [])]
    if subprocess.run(command).returncode:
        raise Failure(f"{what} was not measured: its message stands above")


def keep(measured: "Measurement", what: str, flags: Flags) -> None:
    """Numbers, picture and, if it is wanted, the section of the document."""
    flags.output.mkdir(parents=True, exist_ok=True)
    path = flags.output / "benchmark.json"
    kept = json.loads(path.read_text()) if path.exists() else {}
    kept[what] = {
        "machine": [results_page.machine(), *accelerators()],
        "date": results_page.today(),
        "values": measured.values,
    }
    path.write_text(json.dumps(kept, indent=1) + "\n")
    body = [*accelerators(), *measured.lines]
    if measured.draw is not None:
        name = f"{what}.png"
        picture = (results_page.DOCUMENT.parent if flags.record else flags.output) / name
        measured.draw(picture)
        body += ["", f"![{measured.title}]({name})"]
        print(f"picture {picture}")
    if flags.record:
        command = f"python scripts/benchmark.py {what}"
        command += f" --repeats {flags.repeats}" if what != "parity" else ""
        results_page.record(
            results_page.DOCUMENT, f"benchmark {what}", measured.title, command, body
        )


def accelerators() -> list[str]:
    """What else than the processor computes: on a GPU or TPU the times are that device's."""
    import jax

    devices = [device.device_kind for device in jax.devices() if device.platform != "cpu"]
    return [f"{len(devices)} x {devices[0]}.", ""] if devices else []


if __name__ == "__main__":
    command_line.run(main)
