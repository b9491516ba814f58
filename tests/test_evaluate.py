"""A saved run is evaluated exactly, and nothing is written but two pictures."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import equinox as eqx
import filelock
import jax
import numpy as np
import pytest
from PIL import Image

from mlp_research.analysis import predictions
from mlp_research.data import IdxConfig
from mlp_research.data.batches import Split
from mlp_research.fit import Result, fit
from mlp_research.models import Model, ModelConfig
from mlp_research.programs.single import Experiment
from mlp_research.terminal import command_line
from mlp_research.terminal.report import Report
from scripts import evaluate
from tests.made import CLASSES, small_config, small_execution

STEPS, EPOCH = 24, 12


@pytest.fixture(scope="module")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Result:
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    quiet = Report(quiet=True)
    return fit(small_config(), small_execution(data_dir), run_dir=run_dir, report=quiet)


@pytest.fixture
def run_dir(trained: Result, tmp_path: Path) -> Path:
    """A copy of the trained run that a test may spoil."""
    return Path(shutil.copytree(trained.run_dir, tmp_path / "run"))


Evaluated = Callable[..., str]


@pytest.fixture
def evaluated(capsys: pytest.CaptureFixture[str]) -> Evaluated:
    """Evaluates with the given words on the command line; what it prints, white space folded."""

    def call(*words: object) -> str:
        evaluate.main([*map(str, words), "--no-compile-cache"])
        return " ".join(capsys.readouterr().out.split())

    return call


def refusal(
    words: list[object], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> tuple[int, str]:
    """(exit code, message) of the script."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, words), "--no-compile-cache"])
    with pytest.raises(SystemExit) as ended:
        command_line.run(evaluate.main)
    assert isinstance(ended.value.code, int)
    return ended.value.code, " ".join(capsys.readouterr().err.split())


def summary_of(run_dir: Path) -> dict:
    return json.loads((run_dir / "result.json").read_text())


def contents(folder: Path) -> dict[str, tuple[bytes, int] | None]:
    """Every file's bytes and time of change, and every folder, by its path; pictures aside."""
    return {
        str(path.relative_to(folder)): (path.read_bytes(), path.stat().st_mtime_ns)
        if path.is_file()
        else None
        for path in folder.rglob("*")
        if path.suffix != ".png"
    }


def logits_by_hand(model: Model, split: Split) -> np.ndarray:
    model = eqx.nn.inference_mode(model)
    images = np.asarray(split.images, np.float32) / 255
    return np.asarray(jax.vmap(lambda image: model(image))(images))


@pytest.mark.parametrize("flags", ["1000 8", "70 1", "16 2", "7 1"])
def test_result_json_is_repeated_at_any_batch_size_and_number_of_devices(
    flags: str, run_dir: Path, evaluated: Evaluated
):
    batch_size, devices = flags.split()
    words = ["--evaluation.batch-size", batch_size, "--mesh.data", devices]
    text = evaluated(run_dir, *words)
    test = summary_of(run_dir)["test"]
    assert f"{100 * test['accuracy']:.2f} % ({test['correct']} of 70)" in text
    assert "equal to result.json: the counts exactly" in text
    shown = float(text.split("loss ")[1].split(" nats")[0])
    assert shown == pytest.approx(test["loss"], rel=1e-6)


def test_the_table_and_the_scores_are_those_of_the_models_own_answers(
    trained: Result, run_dir: Path, evaluated: Evaluated, data_dir: Path
):
    split = Experiment.of(small_config(), small_execution(data_dir)).data.test
    logits, labels = logits_by_hand(trained.model, split), split.labels
    text = evaluated(run_dir)
    for index in range(CLASSES):
        rows, said = labels == index, logits.argmax(axis=1) == index
        right = int((rows & said).sum())
        shares = [f"{100 * right / n:.2f} %" if n else "-" for n in (rows.sum(), said.sum())]
        assert f" {index} {rows.sum()} {right} {' '.join(shares)} " in text
    chances = predictions.probabilities(logits)
    error = predictions.calibration_error(chances.max(axis=1), logits.argmax(axis=1) == labels)
    assert f"calibration error {100 * error:.3f} %" in text
    assert f"Brier score {predictions.brier_score(chances, labels):.5f}" in text


def test_on_other_data_nothing_is_compared_and_the_pictures_have_names_of_their_own(
    run_dir: Path, evaluated: Evaluated, other_data_dir: Path
):
    before = contents(run_dir)
    text = evaluated(run_dir, "--data.dir", other_data_dir)
    assert f"({summary_of(run_dir)['test']['correct']} of 70)" in text  # it differs in training
    assert "nothing to compare: the run was not trained on these data" in text
    pictures = {path.name for path in run_dir.glob("*.png")} - {"curves.png"}
    assert pictures == {"confusion-other-data.png", "worst-other-data.png"}
    assert contents(run_dir) == before


def test_the_pictures_name_what_they_show(run_dir: Path, evaluated: Evaluated):
    evaluated(run_dir)
    evaluated(run_dir, "--split", "validation", "--checkpoint", "best")
    evaluated(run_dir, "--split", "train")
    pictures = sorted({path.name for path in run_dir.glob("*.png")} - {"curves.png"})
    assert pictures == [
        *("confusion-train.png", "confusion-validation-best.png", "confusion.png"),
        *("worst-train.png", "worst-validation-best.png", "worst.png"),
    ]
    for name in pictures:
        with Image.open(run_dir / name) as image:
            image.verify()


def test_the_sheet_shows_the_worst_rows_by_their_probability(
    trained: Result,
    run_dir: Path,
    evaluated: Evaluated,
    data_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    shown = {}

    def keep(path: Path, images: np.ndarray, captions: list[str], title: str) -> None:
        shown.update(images=images, captions=captions)

    monkeypatch.setattr(evaluate.figures, "images_sheet", keep)
    evaluated(run_dir)
    split = Experiment.of(small_config(), small_execution(data_dir)).data.test
    chances = predictions.probabilities(logits_by_hand(trained.model, split))
    rows = predictions.worst(chances, split.labels, 25)
    assert len(rows) > 0
    np.testing.assert_array_equal(shown["images"], split.images[rows].reshape(-1, 4, 3))
    for row, caption in zip(rows, shown["captions"], strict=True):
        said = f"label {split.labels[row]}, predicted {chances[row].argmax()}"
        assert caption == f"{said}\n{100 * chances[row].max():.2f} %, row {row}"


def test_a_mistake_is_never_quite_certain():
    assert evaluate.probability(0.123456) == "12.35 %"
    assert evaluate.probability(0.99999) == "> 99.99 %"


def test_the_best_checkpoint_repeats_its_line_of_validation(run_dir: Path, evaluated: Evaluated):
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    scores = [(line["accuracy"], line["step"]) for line in lines if line["split"] == "validation"]
    accuracy, step = max(scores)
    text = evaluated(run_dir, "--split", "validation", "--checkpoint", "best")
    assert f"state step {step} of {STEPS}" in text and f"accuracy {100 * accuracy:.2f} %" in text
    assert "equal to" in text


def test_an_unfinished_run_is_evaluated_where_it_stands(run_dir: Path, evaluated: Evaluated):
    (run_dir / "result.json").unlink()
    shutil.rmtree(run_dir / "checkpoints" / str(STEPS))
    text = evaluated(run_dir)
    assert f"step {EPOCH} of {STEPS}, after 1 of 2 epochs" in text
    assert f"wrote nothing of its test rows at step {EPOCH}" in text
    with (run_dir / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"split": "tra')  # as a running run may leave it for a moment
    assert "equal to metrics.jsonl" in evaluated(run_dir, "--split", "validation")


def test_a_running_run_is_left_as_it_is(run_dir: Path, evaluated: Evaluated):
    unfinished = run_dir / "checkpoints" / "36.orbax-checkpoint-tmp"
    unfinished.mkdir()
    (unfinished / "piece").write_text("being written")
    with filelock.FileLock(run_dir / ".lock"):
        before = contents(run_dir)
        evaluated(run_dir)
        assert contents(run_dir) == before


OUTSIDE = """
from typing import Literal

import equinox as eqx

from mlp_research.models import ModelConfig


class OutsideConfig(ModelConfig, frozen=True):
    kind: Literal["evaluated outside"] = "evaluated outside"

    def build(self, image_shape, classes, *, key):
        linear = eqx.nn.Linear(image_shape[0] * image_shape[1], classes, key=key)
        return eqx.nn.Sequential([eqx.nn.Dropout(0.5), linear])
"""


@pytest.fixture(scope="module")
def from_outside(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(folder of a small run, file of its model)."""
    folder = tmp_path_factory.mktemp("outside")
    file = folder / "evaluated_outside.py"
    file.write_text(OUTSIDE)
    command_line.bring([file])
    config = small_config(model=ModelConfig.kinds["evaluated outside"](), epochs=1)
    execution, report = small_execution(data_dir), Report(quiet=True)
    fit(config, execution, run_dir=folder / "run", report=report)
    return folder / "run", file


@pytest.mark.parametrize("words", [("--model", "{}:OutsideConfig"), ("--with", "{}")])
def test_a_model_from_outside_is_evaluated_with_its_file(
    words: tuple[str, str], from_outside: tuple[Path, Path], evaluated: Evaluated
):
    run_dir, file = from_outside
    text = evaluated(run_dir, *(word.format(file) for word in words))
    assert "equal to result.json" in text


Spoil = Callable[[Path], None]


def nothing(run_dir: Path) -> None:
    """Leave the run whole: the words on the command line are at fault."""


def remove_the_run(run_dir: Path) -> None:
    shutil.rmtree(run_dir)


def remove_checkpoints(run_dir: Path) -> None:
    for checkpoint in (run_dir / "checkpoints").iterdir():
        shutil.rmtree(checkpoint)


def remove_the_checkpoint_folder(run_dir: Path) -> None:
    shutil.rmtree(run_dir / "checkpoints")


def damage_the_newest(run_dir: Path) -> None:
    (run_dir / "checkpoints" / str(STEPS) / "_CHECKPOINT_METADATA").write_text("{")


def edit_config(run_dir: Path) -> None:
    path = run_dir / "config.json"
    path.write_text(path.read_text().replace('"epochs": 2', '"epochs": 3'))


def hold_members(run_dir: Path) -> None:
    config = json.loads((run_dir / "config.json").read_text())
    (run_dir / "config.json").write_text(json.dumps({"members": [config, config]}))


def hold_a_sweep(run_dir: Path) -> None:
    (run_dir / "plan.json").write_text("{}")


def edit_result(run_dir: Path) -> None:
    result = summary_of(run_dir)
    result["test"]["correct"] += 1
    (run_dir / "result.json").write_text(json.dumps(result))


def break_result(run_dir: Path) -> None:
    (run_dir / "result.json").write_text("{")


def stand_in_the_way(run_dir: Path) -> None:
    (run_dir / "worst.png").mkdir()


@pytest.mark.parametrize(
    ("spoil", "words", "code", "message"),
    [
        (remove_the_run, "", 1, "holds no run"),
        (remove_checkpoints, "", 1, "run holds no checkpoint yet"),
        (remove_the_checkpoint_folder, "", 1, "run holds no checkpoint yet"),
        (damage_the_newest, "", 1, f"checkpoint {STEPS} is damaged"),
        (edit_config, "", 1, "train.epochs is 2, not 3"),
        (hold_members, "", 1, "holds members of one program, not one run"),
        (hold_a_sweep, "", 1, "holds a sweep, not one run: the numbers are in its summary.json"),
        (edit_result, "", 1, "result.json says"),
        (break_result, "", 1, "result.json or metrics.jsonl"),
        (stand_in_the_way, "", 1, "the pictures cannot be written into"),
        (nothing, "--split tests", 2, "tests"),
        (nothing, "--checkpoint first", 2, "first"),
        (nothing, "--evaluation.batch-size 0", 2, "evaluation_batch_size is 0"),
        (
            nothing,
            "--mesh.data 9",
            2,
            "mesh.data 9 x mesh.model 1 needs 9 devices, but there are 8",
        ),
        (nothing, "--data.dir nowhere", 1, "the data folder nowhere cannot be read"),
        (nothing, "--model other", 2, "--model other: give path.py:ConfigName"),
        (nothing, "--what", 2, "--what"),
    ],
)
def test_what_cannot_be_evaluated_is_refused_in_a_sentence(
    spoil: Spoil,
    words: str,
    code: int,
    message: str,
    run_dir: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    spoil(run_dir)
    before = contents(run_dir)
    found, text = refusal([run_dir, *words.split()], capsys, monkeypatch)
    assert message in text
    assert found == code
    assert "Traceback" not in text
    assert contents(run_dir) == before


@pytest.fixture(scope="module")
def unvalidated(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run without validation rows."""
    run_dir = tmp_path_factory.mktemp("unvalidated") / "run"
    config = small_config(data=IdxConfig(validation=0), epochs=1)
    fit(config, small_execution(data_dir), run_dir=run_dir, report=Report(quiet=True))
    return run_dir


@pytest.mark.parametrize("words", ["--split validation", "--checkpoint best"])
def test_a_run_without_validation_says_so(
    words: str,
    unvalidated: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    code, text = refusal([unvalidated, *words.split()], capsys, monkeypatch)
    assert code == 2 and "data.validation is 0" in text
    assert not list(unvalidated.glob("confusion*"))
