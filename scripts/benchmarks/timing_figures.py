"""Pictures of times: medians as bars, with the least and the largest measurement."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from benchmarks.timing import Spread, readable

from mlp_research.figures import BLUE, picture, plain, write_title

if TYPE_CHECKING:
    from matplotlib.axes import Axes

LINEAR_UP_TO = 20
"""A panel whose medians differ by a larger factor has a logarithmic axis: no bar is invisible."""

Group = Mapping[str, Sequence[float]]


def medians(path: Path, groups: Mapping[str, Group], *, title: str = "") -> None:
    """A panel for each group of candidates: a bar to the median of each one's seconds.

    A thin line goes from the least to the largest measurement. The axis starts at zero, or is
    logarithmic, and then starts below the least of them all. Panels do not share their axes.
    """
    counts = [len(group) for group in groups.values()]
    height = 0.9 + sum(0.32 * count + 0.75 for count in counts)
    with picture(path, (8, height)) as figure:
        panels = figure.subplots(len(groups), 1, height_ratios=counts, squeeze=False).ravel()
        for panel, (name, group) in zip(panels, groups.items(), strict=True):
            _draw_group(panel, group)
            numbers = sorted({len(seconds) for seconds in group.values()})
            scale = ", logarithmic" if panel.get_xscale() == "log" else ""
            about = f"n = {' and '.join(map(str, numbers))}{scale}"
            panel.set_title(plain(f"{name} ({about})"), loc="left")
        write_title(figure, title)


def _draw_group(axes: "Axes", group: Group) -> None:
    spreads = [Spread.of(seconds) for seconds in group.values()]
    places, middles = range(len(spreads)), np.array([spread.median for spread in spreads])
    logarithmic = middles.min() > 0 and middles.max() > LINEAR_UP_TO * middles.min()
    least, largest = np.array([(spread.least, spread.largest) for spread in spreads]).T
    left = 0.5 * least.min() if logarithmic else 0.0
    axes.barh(places, middles - left, left=left, height=0.62, color=BLUE, alpha=0.75)
    axes.hlines(places, least, largest, color="black", linewidth=1.4)
    if logarithmic:
        axes.set_xscale("log")
        right = largest.max() * (largest.max() / left) ** 0.16  # room for the numbers
    else:
        right = 1.16 * largest.max()
    axes.set_xlim(left, right)
    for place, spread in enumerate(spreads):
        text = f" {readable(spread.median)}"
        axes.text(spread.largest, place, text, va="center", ha="left", size=8.5)
    axes.xaxis.set_major_formatter(lambda value, _: readable(value) if value else "0")
    axes.xaxis.set_minor_formatter("")
    axes.set_yticks(places, [plain(name) for name in group])
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
