"""A sweep's pictures show every seed, the interval of their mean, and only what there is."""

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from mlp_research import figures
from mlp_research.sweep import design, run, statistics
from mlp_research.sweep import figures as sweep_figures
from mlp_research.sweep.figures import Runs
from tests.made import small_config

UNUSED = Path("unused")
SHARES = {
    "init": {"estimate": 0.3, "low": 0.1, "high": 0.6},
    "order": {"estimate": 0.5, "low": 0.0, "high": None},
}


def seed_lines(seed: int, epochs: int = 3, splits: Sequence[str] = ("validation", "epoch")) -> list:
    """Lines whose accuracy is 80 % and more by one for each seed and two for each epoch."""
    return [
        {
            "split": split,
            "step": 4 * epoch,
            "epoch": epoch,
            "loss": (1 + seed) / epoch,
            "accuracy": (80 + seed + 2 * epoch) / 100,
            "gradient_norm": (1 + seed) / epoch**2,
            "clipped": 1 / (epoch + seed),
        }
        for epoch in range(1, epochs + 1)
        for split in splits
    ]


def made_runs(name: str = "a", epochs: Sequence[int] = (3, 3), clip: float | None = None) -> Runs:
    return Runs(name, tuple(seed_lines(seed, count) for seed, count in enumerate(epochs)), clip)


def made_setting(name: str, accuracies: Sequence[float]) -> dict[str, Any]:
    """A setting as it stands in summary.json."""
    return {
        "setting": name,
        "test": dataclasses.asdict(statistics.summary(accuracies)),
        "test_accuracies": {str(seed): value for seed, value in enumerate(accuracies)},
    }


def draw_accuracy(path: Path) -> None:
    settings = [made_setting("a", [0.97, 0.98, 0.975]), made_setting("b", [0.96, 0.98, 0.965])]
    sweep_figures.accuracy(path, settings, [], "b", title="accuracy")


def draw_learning_curves(path: Path) -> None:
    sweep_figures.learning_curves(path, [made_runs("a"), made_runs("b")], "b", title="curves")


def draw_gradient_norm(path: Path) -> None:
    sweep_figures.gradient_norm(path, [made_runs("a"), made_runs("b", clip=0.5)], title="norm")


def draw_shares(path: Path) -> None:
    sweep_figures.variance_shares(path, SHARES, title="shares")


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn; nothing is written."""
    figures_: list[Figure] = []

    @contextlib.contextmanager
    def keep(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
        figure = Figure(figsize=size, layout="constrained")
        yield figure
        figures_.append(figure)

    monkeypatch.setattr(figures, "picture", keep)
    return figures_


def points(axes: Axes, label: str) -> list[list[list[float]]]:
    """The points [x, y] of each line with the label."""
    lines = [line for line in axes.lines if line.get_label() == label]
    return [np.column_stack([line.get_xdata(), line.get_ydata()]).tolist() for line in lines]


def legend_of(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


@pytest.mark.parametrize(
    "draw", [draw_accuracy, draw_learning_curves, draw_gradient_norm, draw_shares]
)
def test_equal_numbers_give_equal_bytes(draw: Callable[[Path], None], tmp_path: Path):
    for name in ("one.png", "other.png"):
        draw(tmp_path / name)
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "other.png").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one.png", "other.png"]


@pytest.mark.parametrize(
    ("count", "seeds"), [(1, 1), (1, 40), (30, 3)], ids=lambda value: str(value)
)
def test_sweeps_of_any_size_are_drawn_whole(count: int, seeds: int, tmp_path: Path):
    names = [
        f"model.widths {index} 128, optimizer.learning_rate 0.0003, $x$ 1" for index in range(count)
    ]
    settings = [made_setting(name, np.linspace(0.95, 0.99, seeds).tolist()) for name in names]
    runs = [made_runs(name, [3] * seeds, clip=1.0) for name in names]
    sweep_figures.accuracy(tmp_path / "1.png", settings, title="$5_$6^ is no formula")
    sweep_figures.learning_curves(tmp_path / "2.png", runs, names[-1])
    sweep_figures.gradient_norm(tmp_path / "3.png", runs)
    for number in (1, 2, 3):
        with Image.open(tmp_path / f"{number}.png") as image:
            assert image.width == 1600
            image.verify()


def test_a_sweep_of_which_nothing_is_left_is_drawn(tmp_path: Path):
    runs = [made_runs("gone", epochs=(0, 0), clip=1.0)]
    sweep_figures.accuracy(tmp_path / "1.png", [], [{"setting": "gone", "seed": 0}])
    sweep_figures.learning_curves(tmp_path / "2.png", runs)
    sweep_figures.gradient_norm(tmp_path / "3.png", runs)
    assert len(list(tmp_path.glob("*.png"))) == 3


def test_every_seed_is_a_point_in_its_settings_row(kept: list[Figure]):
    draw_accuracy(UNUSED)
    [axes] = kept[0].axes
    drawn = [np.asarray(each.get_offsets()) for each in axes.collections]
    assert [np.round(x, 6).tolist() for x in (drawn[0][:, 0], drawn[1][:, 0])] == [
        [97.0, 98.0, 97.5],
        [96.0, 98.0, 96.5],
    ]
    for row, seeds in enumerate(drawn):
        assert np.all(np.abs(seeds[:, 1] - row) < 0.5)
        assert len(set(seeds[:, 1])) == 3
    np.testing.assert_allclose(drawn[1][:, 1] - drawn[0][:, 1], 1)


def test_the_interval_and_its_numbers_stand_beside_each_setting(kept: list[Figure]):
    draw_accuracy(UNUSED)
    [axes] = kept[0].axes
    expected = statistics.mean_interval([97, 98, 97.5])
    low, high = expected.low, expected.high
    ends: Any = [low, high]
    np.testing.assert_allclose([x for x, _ in points(axes, "95 % interval")[0]], ends)
    np.testing.assert_allclose(points(axes, "mean")[0][0][0], 97.5)
    first, other = (text.get_text() for text in axes.texts)
    assert first == f"97.50 ({low:.2f} to {high:.2f})"
    assert other.endswith("\nbest by validation")


def test_a_single_seed_has_no_interval(kept: list[Figure]):
    sweep_figures.accuracy(UNUSED, [made_setting("a", [0.97])])
    [axes] = kept[0].axes
    assert not points(axes, "95 % interval")
    assert [text.get_text() for text in axes.texts] == ["97.00"]
    assert "95 % interval" not in legend_of(kept[0])


def test_members_that_were_left_out_are_named(kept: list[Figure]):
    lost = [{"setting": name, "seed": seed} for name, seed in (("a", 2), ("a", 3), ("gone", 0))]
    sweep_figures.accuracy(UNUSED, [made_setting("a", [0.97, 0.98])], lost)
    [axes] = kept[0].axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["a", "gone"]
    assert axes.texts[0].get_text().endswith("\n2 left out")
    assert axes.texts[1].get_text() == "no seed finished\n1 left out"


def test_thirty_long_names_do_not_run_into_each_other(kept: list[Figure]):
    names = [
        f"model.widths {index} 128, optimizer.learning_rate 0.0003, schedule.warmup_steps 100"
        for index in range(30)
    ]
    sweep_figures.accuracy(UNUSED, [made_setting(name, [0.97, 0.98]) for name in names])
    figure = kept[0]
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in figure.axes[0].get_yticklabels()]
    assert all(upper.y0 > lower.y1 for upper, lower in itertools.pairwise(boxes))
    assert min(box.x0 for box in boxes) >= 0
    shown = [label.get_text().replace("\n", " ") for label in figure.axes[0].get_yticklabels()]
    assert [name.replace("\N{NO-BREAK SPACE}", " ") for name in shown] == names


def test_a_setting_near_chance_does_not_squeeze_the_others(kept: list[Figure]):
    settings = [made_setting(n, v) for n, v in (("a", [0.98, 0.981]), ("lost", [0.11, 0.11]))]
    sweep_figures.accuracy(UNUSED, [*settings, made_setting("b", [0.99, 0.991])])
    [axes] = kept[0].axes
    pixels = axes.transData.transform([(98.0, 0), (99.0, 0), (11.0, 0), (100.0, 0)])[:, 0]
    low, high = (axes.transData.transform([(x, 0)])[0, 0] for x in axes.get_xlim())
    assert low < pixels[2] < pixels[0] < pixels[1] < high
    assert pixels[1] - pixels[0] > 0.1 * (high - low)
    assert np.isfinite(pixels).all()
    assert {98, 99} <= set(axes.get_xticks())


def test_curves_are_the_mean_of_the_seeds_and_their_band(kept: list[Figure]):
    draw_learning_curves(UNUSED)
    accuracy, loss = kept[0].axes
    np.testing.assert_allclose(points(accuracy, "a")[0], [[1, 82.5], [2, 84.5], [3, 86.5]])
    np.testing.assert_allclose(points(loss, "a")[0], [[1, 1.5], [2, 0.75], [3, 0.5]])
    corners = np.asarray(accuracy.collections[0].get_paths()[0].vertices)
    at_two = corners[corners[:, 0] == 2, 1]
    np.testing.assert_allclose([at_two.min(), at_two.max()], [84, 85])
    assert accuracy.get_ylabel() == "validation accuracy (%)"
    assert legend_of(kept[0]) == ["a", "b (best by validation)"]


def test_a_member_that_was_left_out_has_a_shorter_line(kept: list[Figure]):
    runs = [made_runs("a", epochs=(3, 1)), made_runs("gone", epochs=(0, 0))]
    sweep_figures.learning_curves(UNUSED, runs)
    sweep_figures.gradient_norm(UNUSED, runs)
    np.testing.assert_allclose(points(kept[0].axes[0], "a")[0], [[1, 82.5], [2, 84], [3, 86]])
    thin = [line for line in kept[1].axes[0].lines if line.get_linewidth() < 1]
    assert [len(np.asarray(line.get_xdata())) for line in thin] == [3, 1, 0, 0]
    assert legend_of(kept[0]) == ["a", "gone (no epoch finished)"]


@pytest.mark.parametrize(
    ("splits", "name"),
    [
        ((("validation", "test"), ("validation",)), "validation"),
        ((("validation", "test"), ("test",)), "test"),
        ((("validation",), ("test",)), "training"),
    ],
)
def test_curves_show_the_best_split_that_all_settings_have(
    splits: tuple[tuple[str, ...], ...], name: str, kept: list[Figure]
):
    settings = [
        Runs(str(index), (seed_lines(0, splits=(*each, "epoch")),))
        for index, each in enumerate(splits)
    ]
    sweep_figures.learning_curves(UNUSED, settings)
    assert kept[0].axes[0].get_ylabel() == f"{name} accuracy (%)"
    lines = kept[0].axes[0].lines
    assert [np.asarray(line.get_xdata()).tolist() for line in lines] == [[1, 2, 3]] * 2


def test_of_many_settings_the_first_and_the_best_stand_out(kept: list[Figure]):
    most = sweep_figures.MOST_COLOURED
    names = [f"setting {index}" for index in range(most + 1)]
    sweep_figures.learning_curves(UNUSED, [made_runs(name) for name in names], names[5])
    sweep_figures.learning_curves(UNUSED, [made_runs(name) for name in names[:most]], names[5])
    assert set(legend_of(kept[0])) == {
        "setting 0 (the first)",
        "setting 5 (best by validation)",
        f"each of the {most - 1} other settings",
    }
    lines = kept[0].axes[0].lines
    coloured = [i for i, line in enumerate(lines) if line.get_color() != sweep_figures.PALE]
    assert (len(lines), coloured) == (most + 1, [0, 5])
    looks = {
        (line.get_color(), line.get_marker(), line.get_linestyle())
        for line in kept[1].axes[0].lines
    }
    assert len(looks) == most


def test_each_seeds_gradient_norm_is_a_thin_line_under_the_clip_norm(kept: list[Figure]):
    draw_gradient_norm(UNUSED)
    norm, clipped = kept[0].axes
    thin = [np.asarray(line.get_ydata()) for line in norm.lines if line.get_linewidth() < 1]
    expected = [[(1 + seed) / epoch**2 for epoch in (1, 2, 3)] for seed in (0, 1)]
    np.testing.assert_allclose(thin, [*expected, *expected])
    [dashed] = [line for line in norm.lines if line.get_linestyle() == "--"]
    assert set(np.asarray(dashed.get_ydata())) == {0.5}
    assert norm.get_yscale() == "log"
    assert not points(clipped, "a")
    np.testing.assert_allclose(points(clipped, "b")[0], [[1, 75], [2, 1000 / 24], [3, 700 / 24]])


def test_without_clipping_there_is_one_panel(kept: list[Figure]):
    sweep_figures.gradient_norm(UNUSED, [made_runs("a")])
    assert len(kept[0].axes) == 1


def test_a_loss_that_goes_astray_does_not_squeeze_the_others(kept: list[Figure]):
    astray = Runs("astray", ([{**line, "loss": 1e20} for line in seed_lines(0)],))
    sweep_figures.learning_curves(UNUSED, [made_runs("a"), made_runs("b"), astray])
    low, high = kept[0].axes[1].get_ylim()
    assert low < 1 / 3 and 2 < high < 1e5


def test_an_open_share_is_an_arrow_to_the_end(kept: list[Figure]):
    draw_shares(UNUSED)
    [axes] = kept[0].axes
    ends = [[x for x, _ in line] for line in points(axes, "95 % interval")]
    np.testing.assert_allclose(ends, [[10, 60], [0, axes.get_xlim()[1]]])
    assert [text.get_text() for text in axes.texts] == ["30 (10 to 60)", "50 (0 or more)"]
    assert sum(line.get_marker() == ">" for line in axes.lines) == 1


def test_a_sweeps_lines_go_to_their_setting_and_seed(tmp_path: Path):
    varied = ["optimizer.clip-norm=null,1"]
    plan = design.plan(small_config(), 2, varied, members_per_program=3)
    assert [len(program) for program in plan.programs] == [3, 1]
    for number, program in enumerate(plan.programs):
        folder = tmp_path / "programs" / f"{number:03}"
        folder.mkdir(parents=True)
        with (folder / "metrics.jsonl").open("w") as file:
            for index, member in enumerate(program):
                mark = {"member": index} if len(program) > 1 else {}
                own = seed_lines(10 * member.setting + member.seed, splits=("train", "epoch"))
                file.writelines(json.dumps(mark | line) + "\n" for line in own)
    runs = run.curves(plan, tmp_path)
    assert [each.name for each in runs] == [setting.name for setting in plan.settings]
    assert [each.clip_norm for each in runs] == [None, 1]
    losses = [[lines[0]["loss"] for lines in each.seeds] for each in runs]
    assert losses == [[1, 2], [11, 12]]
    assert all(len(lines) == 3 for each in runs for lines in each.seeds)
