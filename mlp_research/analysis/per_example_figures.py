"""Pictures of gradients example by example. As in figures.py: numbers in, a file out."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Bool, Float, Shaped

from mlp_research import figures
from mlp_research.figures import BLUE, VERMILLION

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SHEET_COLUMNS = 8
DECADES = 8
"""The axes go down so many decades from the largest value of all panels, and no further."""


@dataclasses.dataclass(frozen=True)
class Points:
    """The examples at one time of a run."""

    title: str
    losses: Float[np.ndarray, " examples"]
    norms: Float[np.ndarray, " examples"]
    wrong: Bool[np.ndarray, " examples"]


def largest_gradients(
    path: Path,
    images: Shaped[np.ndarray, "examples height width *channels"],
    captions: Sequence[str],
    *,
    title: str = "",
) -> None:
    """A sheet of the images in the order given, each under its caption."""
    columns = max(1, min(SHEET_COLUMNS, len(images)))
    figures.images_sheet(path, images, captions, columns, title=title)


def gradient_norms(path: Path, times: Sequence[Points], *, title: str = "") -> None:
    """Each example's gradient norm against its loss, a panel for each time, on the same axes."""
    with figures.picture(path, (4.2 * len(times), 4.6)) as figure:
        panels = figure.subplots(1, len(times), squeeze=False, sharex=True, sharey=True)[0]
        for axes, points in zip(panels, times, strict=True):
            _draw(axes, points)
        for direction, name in (("x", "losses"), ("y", "norms")):
            _set_scale(panels[0], direction, np.concatenate([getattr(p, name) for p in times]))
        panels[0].set(ylabel="norm of the example's gradient")
        for axes in panels:
            axes.set(xlabel="cross-entropy of the example (nats)")
        handles, labels = panels[0].get_legend_handles_labels()
        place: Any = {"loc": "outside lower center", "ncols": len(labels), "markerscale": 2.5}
        for handle in filter(None, figure.legend(handles, labels, **place).legend_handles):
            handle.set_alpha(1)
        figures.write_title(figure, title)


def _draw(axes: "Axes", points: Points) -> None:
    """The wrong ones last, so that they are seen among the others."""
    for chosen, colour, mark, label in (
        (~points.wrong, BLUE, "o", "predicted right"),
        (points.wrong, VERMILLION, "x", "misclassified"),
    ):
        look: dict[str, Any] = {"s": 5, "marker": mark, "color": colour, "alpha": 0.35}
        look["linewidths"] = 0.7 if mark == "x" else 0
        axes.scatter(points.losses[chosen], points.norms[chosen], label=label, **look)
    axes.set_title(figures.plain(points.title))


def _set_scale(axes: "Axes", direction: str, values: np.ndarray) -> None:
    """Logarithmic, from the least value or `DECADES` below the largest; a zero has no place."""
    from matplotlib.ticker import LogLocator

    positive = values[values > 0]
    if not len(positive):
        return
    high = positive.max()
    low = max(positive.min(), high / 10**DECADES)
    margin = (high / low) ** 0.05 if high > low else 2
    getattr(axes, f"set_{direction}scale")("log")
    getattr(axes, f"set_{direction}lim")(low / margin, high * margin)
    getattr(axes, f"{direction}axis").set_major_locator(LogLocator(numticks=6))
