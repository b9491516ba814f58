"""What every benchmark gives, and how it runs a program of its own."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import results_page, timing_figures
from benchmarks.timing import Spread, Times, readable

from mlp_research.sweep import tables

SCRIPTS = Path(__file__).parent.parent
PEERS = SCRIPTS / "peers"


LAUNCHER = """
import resource, subprocess, sys
ended = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL)
print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)
sys.exit(ended.returncode)
"""
"""Linux counts for a process what its parent held when it was started: the launcher is small."""


@dataclasses.dataclass(frozen=True)
class Measurement:
    """A table and sentences for people, the numbers for programs, and what is drawn."""

    title: str
    lines: Sequence[str]
    """Markdown."""
    values: Any
    """What benchmark.json holds of it."""
    draw: Callable[[Path], None] | None = None
    """Draws the picture, if there is one."""


def compared(
    title: str, groups: Mapping[str, Times], *bases: str, say: Sequence[str] = ()
) -> Measurement:
    """Times as medians with their extremes, and as ratios to each of the `bases`.

    A group without one of the bases has no ratio to it.
    """
    headings = ("", "", "n", "median", "least", "largest", *(f"to {base}" for base in bases))
    rows, values = [], {}
    for group, times in groups.items():
        medians = {name: Spread.of(seconds).median for name, seconds in times.items()}
        for name, seconds in times.items():
            spread = Spread.of(seconds)
            shown = map(readable, (spread.median, spread.least, spread.largest))
            ratios = (
                f"{medians[name] / medians[base]:.3f}" if base in medians else "-" for base in bases
            )
            rows.append((group, name, str(spread.n), *shown, *ratios))
        values[group] = {name: list(seconds) for name, seconds in times.items()}
    lines = [*tables.table(headings, rows), *(["", *say] if say else [])]
    return Measurement(title, lines, values, lambda path: draw_times(path, groups, title))


def draw_times(path: Path, groups: Mapping[str, Times], title: str) -> None:
    timing_figures.medians(path, groups, title=f"{title} ({results_page.processor()})")


def call(*words: object, environment: Mapping[str, str] | None = None) -> int:
    """Run Python with these words to its end; the most memory it held, in bytes."""
    ended = subprocess.run(
        [sys.executable, "-S", "-c", LAUNCHER, sys.executable, *map(str, words)],
        env=os.environ | (environment or {}),
        stdout=subprocess.PIPE,
        check=True,
    )
    return int(ended.stdout) * (1 if sys.platform == "darwin" else 1024)


def epoch_lines(run_dir: Path) -> list[dict[str, Any]]:
    """The lines of a run's epochs: how long each trained, how fast."""
    with (run_dir / "metrics.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file if '"split": "epoch"' in line]


@contextlib.contextmanager
def timed(seconds: list[float]) -> Iterator[None]:
    began = time.perf_counter()
    yield
    seconds.append(time.perf_counter() - began)


def import_peers() -> None:
    """Let the peers be imported by their names."""
    if str(PEERS) not in sys.path:
        sys.path.insert(0, str(PEERS))
