"""A picture shows its numbers, is the same for equal numbers, and is whole or not there."""

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

from mlp_research import figures

LENGTH = 4
"""Steps of an epoch."""


def step_lines(count: int, loss: float = 2.0) -> list[dict[str, Any]]:
    return [
        {
            "split": "train",
            "step": step,
            "epoch": (step - 1) // LENGTH + 1,
            "loss": loss / step,
            "accuracy": 1 - 0.9 / step,
            "gradient_norm": 3 / step,
            "clipped": 3 / step > 1,
            "learning_rate": 1e-3,
        }
        for step in range(1, count + 1)
    ]


def epoch_lines(count: int, split: str = "epoch") -> list[dict[str, Any]]:
    return [
        {
            "split": split,
            "step": LENGTH * epoch,
            "epoch": epoch,
            "loss": 1 / epoch,
            "accuracy": 1 - 0.2 / epoch,
            "gradient_norm": 1 / epoch,
        }
        for epoch in range(1, count + 1)
    ]


STEPS, EPOCHS = step_lines(12), epoch_lines(3)
EVALUATIONS = [*epoch_lines(3, "validation"), *epoch_lines(3, "test")]
IMAGES = np.random.default_rng(0).integers(0, 256, (7, 4, 3), np.uint8)
CAPTIONS = [f"image {index}" for index in range(7)]
COUNTS = np.array([[50, 2, 0], [7, 40, 1], [0, 0, 60]])


def draw_curves(path: Path) -> None:
    figures.curves(path, STEPS, EPOCHS, EVALUATIONS, 1.0, title="curves")


def draw_confusion(path: Path) -> None:
    figures.confusion(path, COUNTS, title="confusion")


def draw_sheet(path: Path) -> None:
    figures.images_sheet(path, IMAGES, CAPTIONS, title="sheet")


each_picture = pytest.mark.parametrize("draw", [draw_curves, draw_confusion, draw_sheet])


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """The figures that are drawn; nothing is written."""
    figures_: list[Figure] = []

    @contextlib.contextmanager
    def keep(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
        figure = Figure(figsize=size)
        yield figure
        figures_.append(figure)

    monkeypatch.setattr(figures, "picture", keep)
    return figures_


def line_named(axes: Axes, name: str) -> tuple[list[float], list[float]]:
    """The points of the line with a label."""
    [line] = [line for line in axes.lines if line.get_label() == name]
    return np.asarray(line.get_xdata()).tolist(), np.asarray(line.get_ydata()).tolist()


@each_picture
def test_equal_numbers_give_equal_bytes_whatever_the_users_settings(
    draw: Callable[[Path], None], tmp_path: Path
):
    draw(tmp_path / "one.png")
    theirs: Any = {"font.size": 31, "lines.linewidth": 9, "axes.facecolor": "black"}
    with matplotlib.rc_context(theirs):
        draw(tmp_path / "other.png")
        assert {name: matplotlib.rcParams[name] for name in theirs} == theirs
    assert (tmp_path / "one.png").read_bytes() == (tmp_path / "other.png").read_bytes()


@each_picture
def test_a_picture_that_cannot_be_finished_leaves_the_old_one(
    draw: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fill_the_disk(self: Figure, path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("no space left")

    path = tmp_path / "picture.png"
    path.write_bytes(b"old")
    monkeypatch.setattr(Figure, "savefig", fill_the_disk)
    with pytest.raises(OSError, match="no space left"):
        draw(path)
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("steps", "epochs", "evaluations", "clip_norm"),
    [
        pytest.param([], [], [], None, id="nothing"),
        pytest.param(step_lines(1), [], [], 1.0, id="one step"),
        pytest.param(step_lines(4), epoch_lines(1), [], None, id="one epoch, no validation"),
        pytest.param(step_lines(4, loss=0.0), [], [], None, id="a loss of nothing"),
        pytest.param(step_lines(40_000), epoch_lines(10_000), [], 1.0, id="very many"),
    ],
)
def test_curves_of_any_length_are_drawn(
    steps: list, epochs: list, evaluations: list, clip_norm: float | None, tmp_path: Path
):
    path = tmp_path / "curves.png"
    figures.curves(path, steps, epochs, evaluations, clip_norm, title="run_$5_$6^ is no formula")
    with Image.open(path) as image:
        assert image.size == (1600, 1120)
        image.verify()


@pytest.mark.parametrize("classes", [2, 10, 47])
def test_confusion_of_any_number_of_classes_is_drawn(classes: int, tmp_path: Path):
    counts = np.random.default_rng(0).poisson(1.0, (classes, classes))
    for name, shown in (("some.png", counts), ("none.png", np.zeros_like(counts))):
        figures.confusion(tmp_path / name, shown)
        with Image.open(tmp_path / name) as image:
            image.verify()


@pytest.mark.parametrize("shape", [(0, 4, 3), (1, 8, 64), (6, 64, 8), (25, 28, 28)])
def test_a_sheet_of_any_shape_of_images_is_drawn(shape: tuple[int, int, int], tmp_path: Path):
    images = np.zeros(shape, np.uint8)
    figures.images_sheet(tmp_path / "sheet.png", images, ["caption"] * shape[0])
    with Image.open(tmp_path / "sheet.png") as image:
        image.verify()


def test_curves_show_the_lines_of_the_run(kept: list[Figure]):
    draw_curves(Path("unused"))
    loss, accuracy, norm, rate = kept[0].axes
    steps = list(range(1, 13))
    assert line_named(loss, "training step") == (steps, [line["loss"] for line in STEPS])
    assert line_named(loss, "validation") == ([4, 8, 12], [1, 1 / 2, 1 / 3])
    assert line_named(accuracy, "test")[1] == pytest.approx([80, 90, 100 - 20 / 3])
    assert line_named(norm, "training step") == (steps, [3 / step for step in steps])
    assert np.asarray(rate.lines[0].get_ydata()).tolist() == [1e-3] * 12
    assert (loss.get_yscale(), norm.get_yscale()) == ("log", "log")


def test_the_mean_of_an_epoch_stands_in_its_middle(kept: list[Figure]):
    draw_curves(Path("unused"))
    for panel in kept[0].axes[:3]:
        assert line_named(panel, "training, mean of epoch")[0] == [2.5, 6.5, 10.5]


def test_the_clip_line_says_how_many_steps_it_clipped(kept: list[Figure]):
    draw_curves(Path("unused"))
    norm = kept[0].axes[2]
    assert line_named(norm, "clipped at 1: 16.7 % of steps")[1] == [1, 1]  # 2 of 12
    figures.curves(Path("unused"), STEPS, EPOCHS, EVALUATIONS, None)
    assert len(kept[1].axes[2].lines) == len(norm.lines) - 1


def test_every_accuracy_of_an_epoch_is_in_sight(kept: list[Figure]):
    evaluations = [{**EVALUATIONS[0], "accuracy": 0.31}, {**EVALUATIONS[1], "accuracy": 1.0}]
    figures.curves(Path("unused"), STEPS, EPOCHS, evaluations, None)
    low, high = kept[0].axes[1].get_ylim()
    assert low < 31 and high >= 100


def test_many_steps_become_the_range_they_lie_in(kept: list[Figure]):
    lines = step_lines(figures.MOST_STEPS + 1)
    figures.curves(Path("unused"), lines, [], [], None)
    loss = kept[0].axes[0]
    [band] = loss.collections
    corners = np.concatenate([path.vertices for path in band.get_paths()])
    assert corners[:, 1].max() == lines[0]["loss"] and corners[:, 1].min() == lines[-1]["loss"]


def test_confusion_writes_every_count_in_its_cell(kept: list[Figure]):
    draw_confusion(Path("unused"))
    axes = kept[0].axes[0]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted class", "label")
    written = {text.get_position(): text.get_text() for text in axes.texts}
    expected = {
        (column, row): str(count) for (row, column), count in np.ndenumerate(COUNTS) if count
    }
    assert written == expected


def test_confusion_colours_the_mistakes_alone_up_to_the_largest(kept: list[Figure]):
    draw_confusion(Path("unused"))
    image: Any = kept[0].axes[0].images[1]
    assert sorted(image.get_array().compressed().tolist()) == [1, 2, 7]
    assert image.get_clim() == (0, 7)


def test_a_sheet_shows_each_image_as_it_is_under_its_caption(kept: list[Figure]):
    draw_sheet(Path("unused"))
    panels = kept[0].axes
    assert len(panels) == 10
    for panel, image, caption in zip(panels, IMAGES, CAPTIONS, strict=False):
        np.testing.assert_array_equal(np.asarray(panel.images[0].get_array()), image)
        assert panel.get_title() == caption
        assert panel.images[0].get_clim() == (0, 255)
    assert not any(panel.images for panel in panels[7:])


def test_matplotlib_is_imported_only_to_draw_and_without_pyplot(tmp_path: Path):
    program = (
        "import sys; from pathlib import Path; import numpy; from mlp_research import figures; "
        "assert not any(name.startswith('matplotlib') for name in sys.modules); "
        f"figures.confusion(Path({str(tmp_path / 'c.png')!r}), numpy.eye(2, dtype=int)); "
        "assert 'matplotlib.pyplot' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
