"""Pictures of a loss's curvature: its spectrum, and its sharpness along a run.

As in figures.py: numbers in, a file out; equal numbers give equal bytes.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from mlp_research import figures
from mlp_research.figures import BLUE, GREY, VERMILLION

LOOKS = ((BLUE, "o", 8, "-"), (VERMILLION, "s", 4, "--"))
"""Colour, mark, its size and line of each matrix: the second is seen upon the first."""
LEAST = 0.05
"""How much of a single eigenvalue's height is still drawn: less is no eigenvalue."""


@dataclasses.dataclass(frozen=True)
class Panel:
    """A spectrum at one step."""

    caption: str
    density: Float[np.ndarray, " points"]
    """Eigenvalues per unit of the axis."""
    largest: Float[np.ndarray, " k"]
    """The largest eigenvalues, which are marked."""


def spectrum(
    path: Path,
    grid: Float[np.ndarray, " points"],
    width: float,
    panels: Sequence[Panel],
    *,
    title: str = "",
) -> None:
    """Densities of eigenvalues, logarithmic, one above the other on one axis.

    `width` is the standard deviation of the Gaussian that each eigenvalue was spread to.
    """
    one = 1 / (width * np.sqrt(2 * np.pi))
    top = 3 * max([one, *(panel.density.max() for panel in panels)])
    with figures.picture(path, (10, 1.4 + 2.6 * len(panels))) as figure:
        rows = figure.subplots(len(panels), 1, sharex=True, squeeze=False)[:, 0]
        for axes, panel in zip(rows, panels, strict=True):
            density = np.maximum(panel.density, 1e-3 * LEAST * one)
            axes.fill_between(grid, density, 1e-3 * LEAST * one, color=BLUE, alpha=0.25, lw=0)
            axes.plot(grid, density, color=BLUE, linewidth=1.2, label="all eigenvalues, estimated")
            look = {"color": GREY, "linestyle": ":", "linewidth": 1}
            axes.axhline(one, label="height of a single one", **look)
            place = {"marker": "v", "linestyle": "", "color": VERMILLION, "markersize": 6}
            label = f"the {len(panel.largest)} largest, computed"
            axes.plot(panel.largest, np.full(len(panel.largest), 6 * one), label=label, **place)
            axes.set(yscale="log", ylim=(LEAST * one, top), ylabel="eigenvalues per unit")
            axes.set_title(figures.plain(panel.caption), loc="left")
        rows[-1].set(xlabel="eigenvalue", xlim=(grid[0], grid[-1]))
        handles, labels = rows[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        figure.align_ylabels()
        figures.write_title(figure, title)


def sharpness(
    path: Path,
    steps: Sequence[int],
    largest: Mapping[str, Sequence[float]],
    threshold: float | None,
    *,
    title: str = "",
) -> None:
    """The largest eigenvalue of each matrix over the steps of a run.

    `threshold` is 2 / learning rate, beyond which gradient descent on the whole loss would diverge
    along that direction; None where the optimizer is not gradient descent.
    """
    with figures.picture(path, (8, 4.5)) as figure:
        axes = figure.subplots()
        for (name, values), (colour, mark, size, line) in zip(largest.items(), LOOKS, strict=True):
            look = {"color": colour, "marker": mark, "markersize": size, "linestyle": line}
            axes.plot(steps, values, label=name, **look)
        values = [value for values in largest.values() for value in values]
        if threshold is not None:
            label = f"2 / learning rate = {threshold:g}"
            axes.axhline(threshold, color=GREY, linestyle=":", label=label)
            values.append(threshold)
        figures.set_scale(axes, values)
        if axes.get_yscale() == "linear":
            axes.set_ylim(0, 1.1 * max(values))
        axes.set(xlabel="step", ylabel="largest eigenvalue")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.legend()
        figures.write_title(figure, title)
