"""Pictures of a sweep: every seed, and what the seeds of each setting have in common.

As in figures.py: numbers in, a file out; equal numbers give equal bytes.
"""

import contextlib
import dataclasses
import textwrap
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mlp_research import figures
from mlp_research.figures import BLUE, GREEN, GREY, PURPLE, VERMILLION, Line

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ORANGE, SKY, BLACK, PALE = "#E69F00", "#56B4E9", "#000000", "#BBBBBB"
COLOURS = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
DOTTED: Any = {"color": GREY, "linestyle": ":", "linewidth": 1}
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
MOST_COLOURED = len(MARKS)
"""With more settings, only the first and the best have a colour; the others are pale."""
SPLITS = {"validation": "validation", "test": "test", "epoch": "training"}
"""Whose accuracy and loss learning curves show: the first that all settings have, and its name."""
NAME_WIDTH = 56
"""Characters of a line of a setting's name at the side of a picture."""
MOST_INCHES = 100
ASTRAY = 1000
"""At so many times the median, the loss of a run that goes astray leaves the picture."""

Numbers = tuple[float, float | None, float | None]
"""An estimate and both ends of its interval, in percent; an end that is None is open."""


@dataclasses.dataclass(frozen=True)
class Runs:
    """A setting's runs: of each seed its lines of metrics.jsonl but those of single steps."""

    name: str
    seeds: tuple[Sequence[Line], ...]
    clip_norm: float | None = None

    def epochs(self, split: str, name: str, scale: float = 1) -> dict[int, list[float]]:
        """By epoch, the scaled values of the seeds that went so far."""
        values: dict[int, list[float]] = {}
        for lines in self.seeds:
            for line in lines:
                if line["split"] == split:
                    values.setdefault(line["epoch"], []).append(scale * line[name])
        return dict(sorted(values.items()))


def accuracy(
    path: Path,
    settings: Sequence[Mapping[str, Any]],
    left_out: Sequence[Mapping[str, Any]] = (),
    chosen: str | None = None,
    *,
    title: str = "",
) -> None:
    """Test accuracy by setting: every seed a point, their mean and its 95 % interval.

    `settings`, `left_out` and `chosen` (the best by validation) are as in summary.json.
    """
    lost = Counter(member["setting"] for member in left_out)
    numbers = {each["setting"]: _numbers(each["test"], "mean") for each in settings}
    captions = {}
    for name in numbers | dict.fromkeys(lost):
        notes = [_said(numbers[name], 2) if name in numbers else "no seed finished"]
        notes += ["best by validation"] * (name == chosen)
        notes += [f"{lost[name]} left out"] * (name in lost)
        captions[_broken(name)] = "\n".join(notes)
    with _rows(path, captions, "test accuracy (%)", title) as axes:
        values = []
        for row, setting in enumerate(settings):
            seeds = {int(seed): 100 * x for seed, x in setting["test_accuracies"].items()}
            values += seeds.values()
            heights = [row + _height(seed) for seed in seeds]
            axes.scatter(list(seeds.values()), heights, s=16, color=BLUE, lw=0, label="one seed")
            _draw_interval(axes, row - 0.2, numbers[setting["setting"]], "mean")
        if len(settings) > 1:
            first = next(iter(numbers.values()))[0]
            axes.axvline(first, label="mean of the first setting", **DOTTED)
        figures.set_accuracy_scale(axes, "x", values)


def learning_curves(
    path: Path, settings: Sequence[Runs], chosen: str | None = None, *, title: str = ""
) -> None:
    """Accuracy and loss by epoch: the mean of each setting's seeds and the band they lie in.

    Of the first of `SPLITS` that every setting evaluated. A seed that was left out ends early.
    """
    split = next((split for split in SPLITS if _all_have(settings, split)), "epoch")
    what = "line: mean of the seeds; band: least to largest of the seeds"
    with _epochs(path, settings, 2, what, title) as panels:
        for axes, name, scale in zip(panels, ("accuracy", "loss"), (100, 1), strict=True):
            values = []
            for runs, look in zip(settings, _looks(settings, chosen), strict=True):
                epochs = runs.epochs(split, name, scale)
                values += [value for seeds in epochs.values() for value in seeds]
                _draw_mean(axes, epochs, look)
                if look["color"] != PALE:
                    low, high = map(min, epochs.values()), map(max, epochs.values())
                    band: Any = {"color": look["color"], "alpha": 0.15, "linewidth": 0}
                    axes.fill_between(list(epochs), list(low), list(high), **band)
            if name == "accuracy":
                figures.set_accuracy_scale(axes, "y", values)
            else:
                _scale_losses(axes, values)
        panels[0].set(ylabel=f"{SPLITS[split]} accuracy (%)")
        panels[1].set(ylabel=f"{SPLITS[split]} cross-entropy (nats)")


def gradient_norm(
    path: Path, settings: Sequence[Runs], chosen: str | None = None, *, title: str = ""
) -> None:
    """Each seed's mean gradient norm by epoch; where norms are clipped, also at how many steps."""
    limits = sorted({runs.clip_norm for runs in settings if runs.clip_norm is not None})
    what = "thin: one seed; marked: mean of the seeds"
    with _epochs(path, settings, 2 if limits else 1, what, title) as panels:
        values = []
        for runs, look in zip(settings, _looks(settings, chosen), strict=True):
            values += _draw_seeds(panels[0], runs, "gradient_norm", 1, look)
            if runs.clip_norm is not None:
                _draw_seeds(panels[1], runs, "clipped", 100, look)
        for limit in limits:
            panels[0].axhline(limit, color=BLACK, linestyle="--", linewidth=1)
            place: Any = {"va": "center", "transform": panels[0].get_yaxis_transform()}
            panels[0].text(1.01, limit, f"clip\n{limit:g}", fontsize=8.5, **place)
        _scale_losses(panels[0], values + limits)
        panels[0].set(ylabel="gradient norm before clipping, mean of epoch")
        if limits:
            panels[1].set(ylabel="clipped steps (%)", ylim=(-2, 102))


def variance_shares(
    path: Path, shares: Mapping[str, Mapping[str, Any]], *, title: str = ""
) -> None:
    """The share of the variance of test accuracy by stream of chance, with its 95 % interval.

    `shares` are as in summary.json. One may exceed the whole, and few seeds leave its end open.
    """
    numbers = {name: _numbers(share, "estimate") for name, share in shares.items()}
    captions = {name: _said(each, 0) for name, each in numbers.items()}
    end = 1.5 * max([100, *(estimate for estimate, _, _ in numbers.values())])
    with _rows(path, captions, "share of the variance of test accuracy (%)", title) as axes:
        for row, each in enumerate(numbers.values()):
            _draw_interval(axes, row, each, "estimate", end)
        axes.axvline(100, label="all streams together", **DOTTED)
        axes.set_xlim(0, end)


@contextlib.contextmanager
def _rows(path: Path, captions: Mapping[str, str], label: str, title: str) -> Iterator["Axes"]:
    """Axes with a row for each caption, its numbers on the right; a legend of what was drawn."""
    most_lines = 1 + max(
        [text.count("\n") for pair in captions.items() for text in pair], default=0
    )
    height = 1.5 + len(captions) * (0.14 + 0.16 * most_lines)
    with figures.picture(path, (10, min(height, MOST_INCHES))) as figure:
        axes = figure.subplots()
        axes.set_yticks(range(len(captions)), list(captions), fontsize=8.5)
        axes.set_yticks(np.arange(len(captions) + 1) - 0.5, minor=True)
        axes.set_ylim(len(captions) - 0.5, -0.5)
        axes.grid(False, axis="y")
        axes.grid(axis="y", which="minor")
        axes.tick_params(axis="y", which="both", length=0)
        place: Any = {"va": "center", "fontsize": 8.5, "transform": axes.get_yaxis_transform()}
        for row, text in enumerate(captions.values()):
            axes.text(1.02, row, text, **place)
        yield axes
        axes.set(xlabel=label)
        handles, labels = axes.get_legend_handles_labels()
        once = dict(zip(labels, handles, strict=True))
        place = {"loc": "outside lower center", "ncols": max(1, len(once))}
        figure.legend(list(once.values()), list(once), **place)
        figures.write_title(figure, title)


@contextlib.contextmanager
def _epochs(
    path: Path, settings: Sequence[Runs], count: int, what: str, title: str
) -> Iterator[list["Axes"]]:
    """Panels over epochs, with one legend under the heading `what`."""
    size = (10, 4.8 + 0.2 * min(len(settings), MOST_COLOURED))
    with figures.picture(path, size) as figure:
        from matplotlib.ticker import MaxNLocator

        panels = list(figure.subplots(1, count, sharex=True, squeeze=False)[0])
        yield panels
        for axes in panels:
            axes.set(xlabel="epoch")
            axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))
        handles, labels = panels[0].get_legend_handles_labels()
        columns = max(1, min(4, 110 // (10 + max(map(len, labels), default=1))))
        alone = max((len(runs.seeds) for runs in settings), default=1) == 1
        place: Any = {"loc": "outside lower center", "title": "one seed each" if alone else what}
        figure.legend(handles, labels, ncols=columns, fontsize=9, title_fontsize=9, **place)
        figures.write_title(figure, title)


def _all_have(settings: Sequence[Runs], split: str) -> bool:
    """Whether each setting that finished an epoch was evaluated on the split."""
    begun = [runs for runs in settings if runs.epochs("epoch", "loss")]
    return bool(begun) and all(runs.epochs(split, "loss") for runs in begun)


def _looks(settings: Sequence[Runs], chosen: str | None) -> list[dict[str, Any]]:
    """Colour, mark and label of each setting's line; of many settings only two stand out."""
    names = [runs.name for runs in settings]
    few = len(names) <= MOST_COLOURED
    coloured = names if few else list(dict.fromkeys([names[0], chosen or names[0]]))
    looks: list[dict[str, Any]] = []
    pale = {"color": PALE, "linewidth": 0.8, "zorder": 2}
    others = f"each of the {len(names) - len(coloured)} other settings"
    for runs in settings:
        if runs.name not in coloured:
            looks.append(pale | {"label": others})
            others = "_"  # one entry in the legend
            continue
        at = coloured.index(runs.name)
        notes = ["the first"] * (runs.name == names[0] and not few)
        notes += ["best by validation"] * (runs.name == chosen)
        notes += ["no epoch finished"] * (not runs.epochs("epoch", "loss"))
        label = figures.plain(runs.name + (f" ({', '.join(notes)})" if notes else ""))
        line = {"color": COLOURS[at % len(COLOURS)], "marker": MARKS[at], "zorder": 3}
        looks.append(line | {"linestyle": "-" if at < len(COLOURS) else "--", "label": label})
    return looks


def _draw_mean(axes: "Axes", epochs: Mapping[int, Sequence[float]], look: dict[str, Any]) -> None:
    means = [float(np.mean(seeds)) for seeds in epochs.values()]
    axes.plot(list(epochs), means, markevery=figures.mark_every(means), **look)


def _draw_seeds(
    axes: "Axes", runs: Runs, name: str, scale: float, look: dict[str, Any]
) -> list[float]:
    """Each seed thin, and their mean; the values that were drawn."""
    for seed in runs.seeds:
        alone = dataclasses.replace(runs, seeds=(seed,)).epochs("epoch", name, scale)
        values = [value for (value,) in alone.values()]
        axes.plot(list(alone), values, color=look["color"], linewidth=0.6, alpha=0.5)
    epochs = runs.epochs("epoch", name, scale)
    _draw_mean(axes, epochs, look)
    return [value for seeds in epochs.values() for value in seeds]


def _draw_interval(
    axes: "Axes", height: float, numbers: Numbers, name: str, end: float | None = None
) -> None:
    """An estimate and its interval, which is an arrow where it goes on beyond `end`."""
    estimate, low, high = numbers
    look: Any = {"color": BLACK, "zorder": 3}
    if end is not None and low is not None and (high is None or high > end):
        axes.plot([end], [height], marker=">", markersize=6, clip_on=False, **look)
        high = end
    if low is not None and high is not None:
        axes.plot([low, high], [height, height], linewidth=1.4, label="95 % interval", **look)
    axes.plot([estimate], [height], marker="d", markersize=5, linestyle="", label=name, **look)


def _numbers(interval: Mapping[str, Any], estimate: str) -> Numbers:
    middle, low, high = (interval[name] for name in (estimate, "low", "high"))
    return 100 * middle, None if low is None else 100 * low, None if high is None else 100 * high


def _said(numbers: Numbers, digits: int) -> str:
    estimate, low, high = ("" if each is None else f"{each:.{digits}f}" for each in numbers)
    if not low:
        return estimate
    return f"{estimate} ({low} to {high})" if high else f"{estimate} ({low} or more)"


def _broken(name: str) -> str:
    """A setting's name, in lines that are broken between its fields."""
    fields = ", ".join(field.replace(" ", "\N{NO-BREAK SPACE}") for field in name.split(", "))
    return figures.plain("\n".join(textwrap.wrap(fields, NAME_WIDTH, break_on_hyphens=False)))


def _height(seed: int) -> float:
    """Where a seed lies in its row, in all settings: the golden ratio keeps neighbours apart."""
    return 0.35 * (seed * (5**0.5 - 1) / 2 % 1)


def _scale_losses(axes: "Axes", values: Sequence[float]) -> None:
    figures.set_scale(axes, values)
    median = float(np.median(values)) if values else 0.0
    if values and max(values) > ASTRAY * median > 0:
        axes.set_ylim(0.5 * min(value for value in values if value > 0), ASTRAY * median)
