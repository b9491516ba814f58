"""Every bad input is met with an exit code and one clear message, and leaves no half-made run."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
import jax
import pytest

from mlp_research.data import IdxConfig
from mlp_research.sweep import design, run
from mlp_research.terminal import command_line
from tests.made import small_config
from tests.processes import load_script

TRAIN = load_script("train")


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., tuple[int, str]]:
    """(exit code, what was printed, white space and boxes folded) of train.py with these words."""
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)

    def call_train(*words: object) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["train.py", *map(str, words), "--no-compile-cache"])
        with pytest.raises(SystemExit) as ended:
            command_line.run(TRAIN.main)
        printed = capsys.readouterr()
        text = " ".join((printed.out + printed.err).replace("│", " ").split())
        assert "Traceback" not in text
        return int(ended.value.code or 0), text

    return call_train


USAGE = [
    ("--bogus 1", "--bogus"),
    ("nonsense", "preset 'nonsense' is unknown: choose one of default, lesson"),
    ("--model nonsense", "model.kind is 'nonsense': it must be one of mixer, mlp"),
    ("--model missing.py:Config", "no file missing.py"),
    ("--with missing.py", "--with missing.py: there is no file missing.py"),
    ("--objective nonsense", "objective.kind is 'nonsense': it must be one of cross-entropy"),
    ("--optimizer nonsense", "optimizer.kind is 'nonsense': it must be one of adam, adamw"),
    ("--schedule nonsense", "schedule.kind is 'nonsense': it must be one of constant, linear"),
    ("--schedule nonsense", "or bring the file that defines it by --with FILE"),
    ("--objective.label-smoothing 1", "label_smoothing is 1.0: it must be < 1"),
    ("--optimizer.freeze layer", "optimizer.freeze layer: the model has no such parameter"),
    ("--optimizer.momentum 0.9", "--optimizer.momentum"),
    ("--model.widths 256 -2", "widths.1 is -2: it must be > 0"),
    ("--model.widths wide", "Could not find valid parse for arguments: ['wide']"),
    ("--model.dropout 1.5", "dropout is 1.5: it must be < 1"),
    ("--model.dropout -0.1", "dropout is -0.1: it must be >= 0"),
    ("--model.activation cubic", "invalid choice"),
    ("--optimizer.learning-rate nan", "learning_rate is nan: it must be a finite number"),
    ("--optimizer.learning-rate inf", "learning_rate is inf: it must be a finite number"),
    ("--optimizer.learning-rate 0", "learning_rate is 0.0: it must be > 0"),
    ("--optimizer.clip-norm -1", "clip_norm is -1.0: it must be > 0"),
    ("--train.epochs 0", "epochs is 0: it must be > 0"),
    ("--train.batch-size 0", "batch_size is 0: it must be > 0"),
    ("--train.steps-per-call 0", "steps_per_call is 0: it must be > 0"),
    ("--evaluation.batch-size 0", "evaluation_batch_size is 0: it must be > 0"),
    ("--seed -1", "seed is -1: it must be >= 0"),
    ("--seed 4294967296", "seed is 4294967296: it must be < 4294967296"),
    ("--train.batch-size 201", "train.batch_size is 201, but there are 200 training rows"),
    ("--data.validation 240", "data.validation is 240, but the training files hold 240 rows"),
    ("--data.limit 500", "data.limit is 500"),
    ("--mesh.data 3", "train.batch_size 16 must divide by 3 devices: use 15 or 18"),
    ("--mesh.data 99", "mesh.data 99 x mesh.model 1 needs 99 devices, but there are 8"),
    ("--schedule warmup-cosine --schedule.warmup-steps 999", "schedule.warmup_steps is 999"),
    ("--resume", "--resume needs --run-dir"),
    ("--profile 9:3", "give START:STOP"),
]


def small_flags(data_dir: Path) -> list[object]:
    return [
        *("--data.dir", data_dir, "--data.validation", 40, "--train.batch-size", 16),
        *("--evaluation.batch-size", 16, "--mesh.data", 1, "--run-dir", "run"),
    ]


@pytest.mark.parametrize(("words", "message"), USAGE, ids=[words for words, _ in USAGE])
def test_a_wrong_command_line_is_refused_in_words(
    words: str, message: str, call: Callable[..., tuple[int, str]], data_dir: Path, tmp_path: Path
):
    bad = words.split()
    flags = small_flags(data_dir)
    if words == "--resume":
        flags = flags[: flags.index("--run-dir")]
    first = bad if not bad[0].startswith("--") else []
    code, text = call(*first, *flags, *([] if first else bad))
    assert (code, message in text) == (2, True), text
    assert not (tmp_path / "run").exists()


def remove(folder: Path) -> None:
    (folder / "train-labels-idx1-ubyte").unlink()


def cut(folder: Path) -> None:
    path = folder / "train-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:-5])


def lengthen(folder: Path) -> None:
    path = folder / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes() + b"12345")


def change_magic(folder: Path) -> None:
    path = folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(b"\0\0\x08\x04" + path.read_bytes()[4:])


def spoil_gzip(folder: Path) -> None:
    path = folder / "t10k-labels-idx1-ubyte"
    path.with_suffix(".gz").write_bytes(b"\x1f\x8bnonsense")
    path.with_suffix(".gz").rename(folder / "t10k-labels-idx1-ubyte.gz")
    path.unlink()


def spoil_checksum(folder: Path) -> None:
    names = [path.name for path in folder.iterdir()]
    (folder / "SHA256SUMS").write_text("".join(f"{'0' * 64}  {name}\n" for name in names))


def relabel(folder: Path) -> None:
    path = folder / "t10k-labels-idx1-ubyte"
    path.write_bytes(path.read_bytes()[:-1] + b"\x09")


DATA_FAULTS = [
    (remove, "train-labels-idx1-ubyte"),
    (cut, "train-images-idx3-ubyte"),
    (lengthen, "t10k-images-idx3-ubyte"),
    (change_magic, "t10k-labels-idx1-ubyte"),
    (spoil_gzip, "t10k-labels-idx1-ubyte.gz"),
    (spoil_checksum, "SHA256SUMS"),
    (relabel, "label 9"),
    (shutil.rmtree, "data"),
]


@pytest.mark.parametrize(
    ("spoil", "message"), DATA_FAULTS, ids=[spoil.__name__ for spoil, _ in DATA_FAULTS]
)
def test_a_faulty_data_folder_is_refused_in_words(
    spoil: Callable[[Path], None],
    message: str,
    call: Callable[..., tuple[int, str]],
    data_dir: Path,
    tmp_path: Path,
):
    faulty = shutil.copytree(data_dir, tmp_path / "data")
    spoil(faulty)
    code, text = call(*small_flags(faulty))
    assert (code, message in text) == (1, True), text
    assert not (tmp_path / "run").exists()


def edit(run_dir: Path, change: Callable[[dict], None]) -> None:
    path = run_dir / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def without_config(run_dir: Path) -> None:
    (run_dir / "config.json").unlink()


def with_a_torn_config(run_dir: Path) -> None:
    path = run_dir / "config.json"
    path.write_text(path.read_text()[:-20])


def with_an_unknown_field(run_dir: Path) -> None:
    edit(run_dir, lambda config: config["train"].update(momentum=0.5))


def with_an_unknown_model(run_dir: Path) -> None:
    edit(run_dir, lambda config: config["model"].update(kind="wide"))


def with_another_learning_rate(run_dir: Path) -> None:
    edit(run_dir, lambda config: config["optimizer"].update(learning_rate=0.5))


def with_other_widths(run_dir: Path) -> None:
    edit(run_dir, lambda config: config["model"].update(widths=[9, 6]))


def from_an_earlier_version(run_dir: Path) -> None:
    edit(run_dir, lambda config: config.pop("format"))


def with_an_edited_metric(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text().replace('"step": 3', '"step": 4', 1))


def with_a_cut_metrics_file(run_dir: Path) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text(path.read_text()[:-40])


def without_a_sound_checkpoint(run_dir: Path) -> None:
    for path in (run_dir / "checkpoints").rglob("*"):
        if path.is_file():
            os.truncate(path, 0)


FOLDER_FAULTS = [
    (without_config, "--resume", 1, "holds no run"),
    (with_a_torn_config, "--resume", 1, "not JSON"),
    (with_an_unknown_field, "--resume", 1, "train.momentum is not a setting"),
    (with_an_unknown_model, "--resume", 1, "kind is 'wide'"),
    (with_another_learning_rate, "--resume", 1, "config.json was edited"),
    (with_other_widths, "--resume", 1, "does not fit"),
    (from_an_earlier_version, "--resume", 1, "format is None, but this version of mlp_research"),
    (with_an_edited_metric, "--resume", 1, "metrics.jsonl was changed"),
    (with_a_cut_metrics_file, "--resume", 1, "metrics.jsonl was changed"),
    (without_a_sound_checkpoint, "--resume", 1, "no sound checkpoint is left"),
    (lambda run_dir: None, "", 1, "already holds a run"),
    (
        lambda run_dir: None,
        "--resume --train.epochs 7",
        1,
        "another config: train.epochs is 2, not 7",
    ),
    (lambda run_dir: None, "lesson --resume", 2, "leave out the preset lesson"),
]


@pytest.mark.parametrize(
    ("spoil", "words", "code", "message"),
    FOLDER_FAULTS,
    ids=[f"{spoil.__name__} {words}" for spoil, words, *_ in FOLDER_FAULTS],
)
def test_a_faulty_run_folder_is_refused_in_words(
    spoil: Callable[[Path], None],
    words: str,
    code: int,
    message: str,
    call: Callable[..., tuple[int, str]],
    trained: Path,
    data_dir: Path,
    tmp_path: Path,
):
    run_dir = shutil.copytree(trained, tmp_path / "copy")
    spoil(run_dir)
    metrics = (run_dir / "metrics.jsonl").read_bytes()
    place = ("--run-dir", run_dir, "--data.dir", data_dir, "--data.validation", 40)
    ended, text = call(*words.split(), *place, "--evaluation.batch-size", 16, "--mesh.data", 1)
    assert (ended, message in text) == (code, True), text
    assert (run_dir / "metrics.jsonl").read_bytes() == metrics, "the refusal changed the folder"


def test_a_folder_in_use_is_refused_and_names_its_user(
    call: Callable[..., tuple[int, str]], trained: Path, data_dir: Path, tmp_path: Path
):
    run_dir = shutil.copytree(trained, tmp_path / "copy")
    (run_dir / ".owner.json").write_text('{"pid": 4321, "host": "elsewhere", "since": "today"}')
    with filelock.FileLock(run_dir / ".lock"):
        code, text = call("--resume", "--run-dir", run_dir, "--data.dir", data_dir)
    assert code == 1
    assert "in use by process 4321 on elsewhere since today" in text


def test_a_folder_that_cannot_be_made_is_refused(
    call: Callable[..., tuple[int, str]], data_dir: Path, tmp_path: Path
):
    (tmp_path / "file").write_text("")
    code, text = call(*small_flags(data_dir)[:-1], tmp_path / "file" / "run")
    assert code == 1
    assert "cannot be written: Not a directory" in text
    assert "--resume" not in text, "there is nothing to go on with"


def test_a_run_that_ceases_to_be_finite_names_the_step(
    call: Callable[..., tuple[int, str]], data_dir: Path, tmp_path: Path
):
    words = ("--optimizer", "sgd", "--optimizer.learning-rate", "1e30")
    code, text = call(*small_flags(data_dir), *words)
    assert code == 1
    assert "at step " in text and "lower optimizer.learning_rate (1e+30)" in text
    assert not (tmp_path / "run" / "result.json").exists()


def test_a_model_larger_than_memory_is_refused_with_its_size(
    call: Callable[..., tuple[int, str]], data_dir: Path
):
    flags = [*small_flags(data_dir), "--model.widths", 10_000_000, 10_000_000]
    code, text = call(*flags)
    assert code == 1 and "400000000000000 bytes" in text and "lower model.widths" in text, text


def test_a_sweep_is_no_run_to_go_on_with(call: Callable[..., tuple[int, str]], data_dir: Path):
    config = small_config()
    folder = Path("run")
    with run.open_folder(design.plan(config, 2), folder, config, resume=False):
        pass
    before = sorted(path.name for path in folder.iterdir())
    code, text = call("--data.dir", data_dir, "--mesh.data", 1, "--resume", "--run-dir", folder)
    assert code == 1 and "run holds a sweep: go on with it by scripts/sweep.py" in text, text
    assert sorted(path.name for path in folder.iterdir()) == before


def test_what_has_changed_since_a_run_began_and_can_change_its_bits_is_said(
    call: Callable[..., tuple[int, str]], trained: Path, data_dir: Path, tmp_path: Path
):
    run_dir = Path(shutil.copytree(trained, tmp_path / "copy"))
    words = ("--resume", "--run-dir", run_dir, "--evaluation.batch-size", 16)
    code, text = call(*words, "--mesh.data", 1)
    assert code == 0 and "not as when the run began" not in text
    path = run_dir / "environment.json"
    starts = json.loads(path.read_text())
    starts[0]["versions"]["jax"] = "0.1.2"
    starts[0]["command"] = ["another"]
    path.write_text(json.dumps(starts))
    code, text = call(*words, "--mesh.data", 2)
    changed = f"mesh.data 1, now 2; versions.jax 0.1.2, now {jax.__version__}"
    assert code == 0 and f"what can change bits is not as when the run began: {changed}" in text


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        (["fast", "--model", "mine.py:Mine"], ["--model", "mine.py:Mine"]),
        (
            ["--with", "one.py", "--model", "own", "--with=my parts.py", "--objective", "own"],
            ["--with", "one.py", "--with", "my parts.py"],
        ),
        (["--model", "mlp"], []),
        ([], []),
    ],
)
def test_the_command_that_goes_on_names_the_files_of_parts_from_outside(
    words: list[str], kept: list[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sys, "argv", ["train.py", *words, "--seed", "1"])
    command = shlex.split(command_line._resume_command(Path("my runs/1")))
    assert command == ["python", "train.py", "--resume", "--run-dir", "my runs/1", *kept]


def test_config_faults_come_all_at_once_with_their_paths():
    with pytest.raises(ValueError, match="validation") as raised:
        wrong: dict[str, Any] = {"validation": -1, "limit": 0, "unknown": 3}
        IdxConfig(**wrong)
    assert str(raised.value).splitlines() == [
        "validation is -1: it must be >= 0",
        "limit is 0: it must be > 0",
        "unknown is not a setting: remove it or correct its name",
    ]
