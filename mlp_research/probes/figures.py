"""The picture of what a probe measures: one panel for each group of names, over steps."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mlp_research.figures import (
    BLUE,
    GREEN,
    GREY,
    PURPLE,
    VERMILLION,
    mark_every,
    picture,
    write_title,
)

LOOKS = [
    {"color": colour, "marker": mark, "linestyle": line}
    for line, marks in (("-", "osD^v"), ("--", "osD^v"))
    for colour, mark in zip((BLUE, VERMILLION, GREEN, PURPLE, GREY), marks, strict=True)
]
"""Colour, mark and line of each name of a panel: of more than these, the first."""
COLUMNS = 2


def draw_probes(path: Path, lines: Sequence[Mapping[str, Any]], *, title: str = "") -> None:
    """Draw the lines of metrics.jsonl with split "probes": `weight_norm.layers[0].weight`.

    Names that begin alike, up to the first point, share a panel.
    """
    groups: dict[str, list[str]] = {}
    for name in lines[0]:
        if name not in ("member", "split", "step", "epoch"):
            groups.setdefault(name.partition(".")[0], []).append(name)
    columns = min(COLUMNS, len(groups))
    rows = -(-len(groups) // columns)
    steps = [line["step"] for line in lines]
    with picture(path, (5.2 * columns, 3.2 * rows + 0.6)) as figure:
        panels = figure.subplots(rows, columns, sharex=True, squeeze=False).flatten()
        for panel in panels[len(groups) :]:
            panel.set_visible(False)
        for panel, (group, names) in zip(panels, groups.items(), strict=False):
            for name, look in zip(names, LOOKS, strict=False):
                values = [line[name] for line in lines]
                numbers = [float("nan") if value is None else value for value in values]
                label = name.partition(".")[2] or name
                panel.plot(steps, numbers, label=label, markevery=mark_every(lines), **look)
            left = len(names) - len(LOOKS)
            heading = f"{len(names)} names, the last {left} not drawn" if left > 0 else None
            panel.set(xlabel="step", ylabel=group.replace("_", " "))
            panel.legend(fontsize=8, title=heading)
            panel.xaxis.set_major_formatter("{x:,.0f}")
        write_title(figure, title)
