"""What a run says while it runs: plain lines, and on a terminal a live progress bar below them."""

import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

REFRESH_SECONDS = 0.1
"""The bar is drawn at most this often: drawing it takes about a millisecond."""
COLUMNS = {
    "epoch": 5,
    "step": 7,
    "loss": 7,
    "train %": 7,
    "rows %": 6,
    "valid %": 7,
    "test %": 6,
    "grad norm": 9,
    "images/s": 9,
}
"""Headings of an epoch's row and their widths: all of them fit on 80 columns."""
ACCURACIES = {
    "accuracy": "train %",
    "train_rows": "rows %",
    "validation": "valid %",
    "test": "test %",
}
"""Heading of each accuracy that an epoch's row may hold, by its name."""


@runtime_checkable
class Stream(Protocol):
    """What can be printed on; a notebook's output is one, though no `TextIO`."""

    def write(self, text: str, /) -> Any: ...
    def flush(self) -> Any: ...
    def isatty(self) -> bool: ...


@runtime_checkable
class LayerRow(Protocol):
    """What is shown of a layer."""

    @property
    def path(self) -> str: ...
    @property
    def kind(self) -> str: ...
    @property
    def output(self) -> str: ...
    @property
    def parameters(self) -> int: ...


class Report:
    """A description first, one row an epoch, the result last; the same lines on a pipe.

    Used as a context, it leaves the terminal as it was, whatever ends the run.
    """

    def __init__(
        self,
        stream: Stream | None = None,
        *,
        quiet: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ):
        """`stream` is by default standard output; a `quiet` report says nothing."""
        self._stream = stream
        self._quiet = quiet
        self._clock = clock
        self._has_heading = False
        self._bar: _Bar | None = None

    def __enter__(self) -> "Report":
        return self

    def __exit__(self, *exception: Any) -> None:
        self._remove_bar()

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.print_above(text)
        elif not self._quiet:
            output: Any = self._stream or sys.stdout
            try:
                print(text, file=output, flush=True)
            except BrokenPipeError:
                # Its reader has gone, as `head` does: the run goes on and says nothing more.
                os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())

    def describe(self, facts: Mapping[str, object], layers: Sequence[LayerRow]) -> None:
        """What the run is, and what its model is made of."""
        self.facts(facts)
        rows = [
            (layer.path or "the model's own", layer.kind, layer.output, f"{layer.parameters:,}")
            for layer in layers
        ]
        rows.append(("all", "", "", f"{sum(layer.parameters for layer in layers):,}"))
        for line in aligned(("layer", "kind", "output", "parameters"), rows, left=2):
            self.say(f"  {line}")

    def facts(self, facts: Mapping[str, object]) -> None:
        """One line for each fact, its name before it."""
        width = max(8, *map(len, facts))
        for name, value in facts.items():
            self.say(f"{name:<{width}} {value}")

    def epoch(self, row: Mapping[str, Any]) -> None:
        """One line of the table: the epoch's means, and the accuracy of each evaluated split."""
        cells = {
            "epoch": str(row["epoch"]),
            "step": str(row["step"]),
            "loss": f"{row['loss']:.4f}",
            **{
                heading: f"{100 * row[name]:.2f}"
                for name, heading in ACCURACIES.items()
                if name in row
            },
            "grad norm": f"{row['gradient_norm']:.3f}",
            "images/s": f"{row['images_per_second']:,.0f}",
        }
        if not self._has_heading:
            self.say("  ".join(f"{heading:>{COLUMNS[heading]}}" for heading in cells))
            self._has_heading = True
        self.say("  ".join(f"{cell:>{COLUMNS[heading]}}" for heading, cell in cells.items()))

    def progress(self, position: int, total: int, images_per_second: float) -> None:
        """The run stands at step `position` of `total`: drawn on a terminal, and not too often."""
        if self._bar is None:
            if self._quiet or not (self._stream or sys.stdout).isatty():
                return
            self._bar = _Bar(self._stream or sys.stdout, self._clock, position)
        self._bar.move(position, total, images_per_second)

    def result(self, summaries: Sequence[Mapping[str, Any]], run_dir: Path) -> None:
        """The test result, with many members its mean and range, and where it is written."""
        self._remove_bar()
        shares = [100 * summary["test"]["accuracy"] for summary in summaries]
        if len(summaries) == 1:
            test = summaries[0]["test"]
            text = f"{shares[0]:.2f} % ({test['correct']} of {test['total']})"
        else:
            mean = statistics.fmean(shares)
            text = f"mean {mean:.2f} % of {len(shares)}, {min(shares):.2f} to {max(shares):.2f} %"
        loss = statistics.fmean(summary["test"]["loss"] for summary in summaries)
        seconds = summaries[0]["train_seconds"]
        self.facts(
            {
                "test": f"{text}, loss {loss:.4f}; trained in {seconds:.1f} s",
                "result": run_dir / "result.json",
            }
        )

    def _remove_bar(self) -> None:
        if self._bar is not None:
            self._bar.remove()
            self._bar = None


class _Bar:
    """One line at the bottom of a terminal: a bar, steps, speed, time left of the whole run."""

    def __init__(self, stream: Stream, clock: Callable[[], float], position: int):
        # A twelfth of a second to import: paid on terminals only.
        from rich.console import Console
        from rich.live import Live

        self._clock = clock
        self._first = (clock(), position)
        self._drawn = -math.inf
        output: Any = stream  # rich asks for more than it uses
        self._console = Console(file=output, highlight=False, markup=False, emoji=False)
        self._live = Live(
            console=self._console,
            auto_refresh=False,  # a thread would take time from the training
            transient=True,
            redirect_stdout=stream is sys.stdout,
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()
        self._console.show_cursor(True)  # a killed process cannot bring it back

    def move(self, position: int, total: int, images_per_second: float) -> None:
        now = self._clock()
        if now - self._drawn < REFRESH_SECONDS:
            return
        self._drawn = now
        text = (
            f"step {position:,} of {total:,}  {images_per_second:,.0f} images/s  "
            f"{self._time_left(now, position, total)} left"
        )
        width = self._console.width - len("^C ")  # a Ctrl-C is echoed there, and must not wrap
        self._live.update(_line(position, total, text, width), refresh=True)

    def _time_left(self, now: float, position: int, total: int) -> str:
        """From all steps since the bar began, evaluations included, so that it does not flutter."""
        started, first = self._first
        if position == first:
            return "-:--"
        return duration((now - started) / (position - first) * (total - position))

    def print_above(self, text: str) -> None:
        self._console.print(text, soft_wrap=True)

    def remove(self) -> None:
        self._live.stop()


def _line(position: int, total: int, text: str, width: int) -> Any:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    line = Table.grid(padding=(0, 2), expand=True)
    line.width = width
    line.add_column(ratio=1)
    line.add_column(no_wrap=True)
    line.add_row(ProgressBar(total=total, completed=position), Text(text))
    return line


def duration(seconds: float) -> str:
    """Hours (where there are any), minutes and seconds: 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def aligned(headings: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1) -> list[str]:
    """The lines of a table: the first `left` columns to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        sides = "<" * left + ">" * (len(cells) - left)
        padded = zip(cells, sides, widths, strict=True)
        return "  ".join(f"{cell:{side}{width}}" for cell, side, width in padded).rstrip()

    return [line(cells) for cells in (headings, *rows)]
