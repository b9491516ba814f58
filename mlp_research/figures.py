"""Pictures of a run: numbers in, a file out. Matplotlib is imported only to draw.

The settings are matplotlib's own defaults and `STYLE`, whatever the user's are, so that equal
numbers give equal bytes. Colours are those of Okabe and Ito 2008, which colour-blind eyes tell
apart; lines also differ by their marks.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Integer, Shaped

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILLION, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#767676"
SPLITS = {
    "train_rows": ("first training rows", PURPLE, "D"),
    "validation": ("validation", VERMILLION, "o"),
    "test": ("test", GREEN, "s"),
}
"""Name in legends, colour and mark of each split that is evaluated every epoch."""
STYLE: Any = {
    "figure.dpi": 100,
    "savefig.dpi": 160,
    "font.size": 10,
    "axes.titlesize": 10,
    "figure.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#DDDDDD",
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
    "legend.frameon": False,
}
MOST_MARKS = 30
"""With more epochs, only some points of a line are marked."""
MOST_STEPS = 3000
"""With more steps, their range is drawn in place of a line that would be a wall of ink."""
MOST_COUNTED = 20
"""With more classes, a confusion matrix has room for colours only."""
SMALLEST_ERROR = 0.05
"""Percent that are added to an error before its logarithm is taken: 100 % has one, too."""
ACCURACY_TICKS = (0, 50, 80, 90, 95, 98, 99, 99.5, 99.8, 99.9, 100)
"""Accuracies that are named where the errors differ too much for a linear scale, in percent."""

Line = Mapping[str, Any]


def curves(
    path: Path,
    steps: Sequence[Line],
    epochs: Sequence[Line],
    evaluations: Sequence[Line],
    clip_norm: float | None,
    *,
    title: str = "",
) -> None:
    """Loss, accuracy, gradient norm and learning rate of a run, over its steps.

    The arguments are lines of metrics.jsonl: of split "train", of split "epoch", and the others.
    """
    middles = [
        {**line, "step": line["step"] - (line["step"] / line["epoch"] - 1) / 2} for line in epochs
    ]
    with picture(path, (10, 7)) as figure:
        from matplotlib.ticker import MaxNLocator

        (loss, accuracy), (norm, rate) = figure.subplots(2, 2, sharex=True)
        for axes, name, scale in ((loss, "loss", 1), (accuracy, "accuracy", 100)):
            _draw_training(axes, name, scale, steps, middles)
            _draw_evaluations(axes, name, scale, evaluations)
        _draw_training(norm, "gradient_norm", 1, steps, middles)
        _draw_clip(norm, steps, clip_norm)
        rate.plot(
            _column(steps, "step"), _column(steps, "learning_rate"), color=BLUE, **_mark(steps)
        )
        set_scale(loss, _column([*steps, *epochs, *evaluations], "loss"))
        set_scale(norm, _column(steps, "gradient_norm"))
        loss.set(ylabel="cross-entropy (nats)")
        norm.set(ylabel="gradient norm before clipping")
        accuracy.set(ylabel="accuracy (%)")
        _fit_to_epochs(accuracy, [100 * line["accuracy"] for line in (*epochs, *evaluations)])
        rate.set(ylabel="learning rate")
        rate.set_ylim(bottom=0)
        rate.set_xlim(0, 1.02 * max([2, *_column(steps, "step")]))
        for panel in (norm, rate):
            panel.set(xlabel="step")
            panel.xaxis.set_major_formatter("{x:,.0f}")
            panel.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        handles, labels = loss.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=len(labels))
        figure.align_ylabels()
        write_title(figure, title)


def confusion(
    path: Path, counts: Integer[np.ndarray, "classes classes"], *, title: str = ""
) -> None:
    """A confusion matrix: labels down, predictions across, the mistakes coloured by their number.

    The right answers are left out of the colours: they would drown the mistakes.
    """
    classes = len(counts)
    right = np.eye(classes, dtype=bool)
    most = int(np.where(right, 0, counts).max())
    side = max(4.2, 2.4 + 0.46 * min(classes, MOST_COUNTED))
    with picture(path, (side + 0.8, side)) as figure:
        from matplotlib.colors import ListedColormap
        from matplotlib.ticker import MaxNLocator

        axes = figure.subplots()
        axes.imshow(np.ma.masked_where(~right, right), cmap=ListedColormap(["#DCE9F2"]))
        image = axes.imshow(
            np.ma.masked_where(right | (counts == 0), counts),
            cmap="YlOrBr",
            vmin=0,
            vmax=max(1, most),
        )
        if classes <= MOST_COUNTED:
            _write_counts(axes, counts, most)
        ticks = range(0, classes, 1 if classes <= MOST_COUNTED else 5)
        axes.set(xlabel="predicted class", ylabel="label", xticks=ticks, yticks=ticks)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(np.arange(classes + 1) - 0.5, minor=True)
        axes.grid(False, which="major")
        axes.grid(which="minor")
        axes.tick_params(which="both", length=0)
        axes.spines[:].set_visible(False)
        ticks = MaxNLocator(nbins=8, integer=True, min_n_ticks=1)
        bar = figure.colorbar(image, shrink=0.7, label="mistakes", ticks=ticks)
        bar.outline.set_visible(False)
        write_title(figure, title)


def images_sheet(
    path: Path,
    images: Shaped[np.ndarray, "examples height width *channels"],
    captions: Sequence[str],
    columns: int = 5,
    *,
    title: str = "",
) -> None:
    """Draw images in rows of `columns`, each under its caption, as the files hold them.

    Of bytes 0 is black and 255 white; of floats the least of all is black and the largest white.
    """
    rows = max(1, -(-len(images) // columns))
    height, width, *_ = images.shape[1:]
    shown, low, high = images, 0, 255
    if images.dtype != np.uint8:
        low, high = images.min(initial=0), images.max(initial=1)
        shown = (images - low) / (high - low)  # colours of floats are taken from 0 to 1
        low, high = 0, 1
    cell_height = min(3.5, max(0.6, 1.35 * height / width))
    with picture(path, (1.9 * columns, rows * (cell_height + 0.55) + 0.5)) as figure:
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for panel in panels:
            panel.axis("off")
        for panel, image, caption in zip(panels, shown, captions, strict=False):
            image = image[..., 0] if image.shape[2:] == (1,) else image
            panel.imshow(image, cmap="gray", vmin=low, vmax=high, interpolation="nearest")
            panel.set_title(caption, fontsize=8.5)
        write_title(figure, title)


def are_images(shape: Sequence[int]) -> bool:
    """Return whether examples of this shape can be drawn: grey, or of 1, 3 or 4 channels."""
    return len(shape) == 2 or (len(shape) == 3 and shape[2] in (1, 3, 4))


@contextlib.contextmanager
def picture(path: Path, size: tuple[float, float]) -> Iterator["Figure"]:
    """An empty figure that is written to a PNG file on leaving; the file is whole or not there."""
    # Half a second to import.
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(STYLE)
        figure = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        beside = path.with_name(path.name + ".part")
        try:
            figure.savefig(beside, format="png")
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)


def write_title(figure: "Figure", title: str) -> None:
    figure.suptitle(plain(title), wrap=True)


def plain(text: str) -> str:
    """The text for matplotlib, to whom what stands between two dollars is a formula."""
    return text.replace("$", r"\$")


def _column(lines: Sequence[Line], name: str) -> list[Any]:
    return [line[name] for line in lines]


def _mark(lines: Sequence[Line]) -> dict[str, Any]:
    """A mark for a line of one point, which would not be seen."""
    return {"marker": "."} if len(lines) == 1 else {}


def _draw_training(
    axes: "Axes", name: str, scale: float, steps: Sequence[Line], epochs: Sequence[Line]
) -> None:
    """Each training step faint, and its mean over each epoch in the epoch's middle."""
    numbers, values = _column(steps, "step"), scale * np.array(_column(steps, name))
    look: dict[str, Any] = {"color": BLUE, "alpha": 0.3}
    if len(steps) > MOST_STEPS:
        parts = np.array_split(values, MOST_STEPS // 3)
        starts = numbers[0] + np.cumsum([0, *map(len, parts[:-1])])
        low, high = [part.min() for part in parts], [part.max() for part in parts]
        look["label"] = "training steps, least to largest"
        axes.fill_between(starts, low, high, step="post", linewidth=0, **look)
    else:
        look["label"] = "training step"
        axes.plot(numbers, values, linewidth=0.7, **look, **_mark(steps))
    if epochs:
        values = scale * np.array(_column(epochs, name))
        look = {"color": BLUE, "marker": "^", "markevery": mark_every(epochs)}
        axes.plot(_column(epochs, "step"), values, label="training, mean of epoch", **look)


def _draw_evaluations(axes: "Axes", name: str, scale: float, evaluations: Sequence[Line]) -> None:
    for split, (label, colour, mark) in SPLITS.items():
        lines = [line for line in evaluations if line["split"] == split]
        if lines:
            values = [scale * value for value in _column(lines, name)]
            look = {"color": colour, "marker": mark, "markevery": mark_every(lines)}
            axes.plot(_column(lines, "step"), values, label=label, **look)


def mark_every(points: Sequence[Any]) -> int:
    """Every how many points of a line are marked."""
    return max(1, -(-len(points) // MOST_MARKS))


def set_scale(axes: "Axes", values: Sequence[float]) -> None:
    """Logarithmic, with more ticks within two decades, or linear where a factor of 4 holds all."""
    from matplotlib.ticker import LogLocator

    positive = [value for value in values if value > 0]
    if not positive or max(positive) < 4 * min(positive):
        return
    axes.set_yscale("log")
    subs = (1, 2, 5) if max(positive) < 100 * min(positive) else (1,)
    axes.yaxis.set_major_locator(LogLocator(subs=subs))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("")


def set_accuracy_scale(axes: "Axes", direction: str, values: Sequence[float]) -> None:
    """By the logarithm of the error, or linear where a factor of 4 holds all errors."""
    errors = [100 - value + SMALLEST_ERROR for value in values]
    if not errors or max(errors) < 4 * min(errors):
        return
    low, high = _from_accuracy(np.array([min(values), max(values)]))
    margin = 0.05 * (high - low)
    low, high = _to_accuracy(np.array([low - margin, high + margin]))
    ticks = [tick for tick in ACCURACY_TICKS if low <= tick <= high]
    functions = {"functions": (_from_accuracy, _to_accuracy)}
    getattr(axes, f"set_{direction}scale")("function", **functions)
    axes.set(**{f"{direction}lim": (low, high), f"{direction}ticks": ticks})
    getattr(axes, f"{direction}axis").set_major_formatter("{x:g}")


def _from_accuracy(percent: np.ndarray) -> np.ndarray:
    return -np.log(np.maximum(100 - percent, 0) + SMALLEST_ERROR)


def _to_accuracy(place: np.ndarray) -> np.ndarray:
    return 100 + SMALLEST_ERROR - np.exp(-place)


def _fit_to_epochs(axes: "Axes", values: Sequence[float]) -> None:
    """Show the epochs' accuracies in full; the first steps, near chance, would squeeze them."""
    if values:
        margin = max(1.0, 0.5 * (max(values) - min(values)))
        axes.set_ylim(max(0, min(values) - margin), min(100.5, max(values) + margin))


def _draw_clip(axes: "Axes", steps: Sequence[Line], clip_norm: float | None) -> None:
    if clip_norm is not None and steps:
        share = 100 * sum(_column(steps, "clipped")) / len(steps)
        label = f"clipped at {clip_norm:g}: {share:.3g} % of steps"
        axes.axhline(clip_norm, color=VERMILLION, linestyle="--", label=label)
        axes.legend(handles=axes.lines[-1:], loc="upper right")


def _write_counts(axes: "Axes", counts: Integer[np.ndarray, "classes classes"], most: int) -> None:
    for (row, column), count in np.ndenumerate(counts):
        if count:
            dark = row != column and count > 0.6 * most
            colour = "white" if dark else "black"
            axes.text(column, row, str(count), ha="center", va="center", color=colour, size=8.5)
