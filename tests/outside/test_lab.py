"""Published methods in one file outside the package: every law holds for each of them."""

import ast
import gc
import json
import math
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
import pytest

from mlp_research.config import FAMILIES, Config
from mlp_research.fit import fit
from mlp_research.models import MLPConfig, ModelConfig
from mlp_research.programs.single import Experiment
from mlp_research.terminal import command_line
from mlp_research.terminal.report import Report
from tests import laws, processes
from tests.made import (
    CLASSES,
    TEST_ROWS,
    TRAIN_ROWS,
    VALIDATION_ROWS,
    WitnessConfig,
    arrays_of,
    assert_bitwise,
    initial_state,
    small_config,
    small_execution,
    train_through,
    witnessed,
)
from tests.outside import kinds, lab

LAB = Path(lab.__file__)
# Kind -> (family, another value of a traced number of its own or of its family).
PARTS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixup": ("objective", {"alpha": 1.0}),
    "vat": ("objective", {"radius": 0.5}),
    "sam": ("objective", {"rho": 0.2}),
    "dp-sgd": ("objective", {"noise": 0.3}),
    "focal": ("objective", {"gamma": 0.5}),
    "squared-error": ("objective", {}),
    "muon": ("optimizer", {"learning_rate": 3e-3}),
    "schedule-free": ("optimizer", {"weight_decay": 0.1}),
    "averaged-adam": ("optimizer", {"decay": 0.5}),
    "max-norm-sgd": ("optimizer", {"max_norm": 0.8}),
    "layerwise-adam": ("optimizer", {"factor": 0.9}),
    "wobble": ("augmentation", {"alpha": 1.0}),
    "erasing": ("augmentation", {"size": 0.8}),
    "colours": ("data", {}),
    "table": ("data", {}),
    "scaled": ("start", {"factor": 2.0}),
    "masked": ("start", {"kept": 0.8}),
    "normed": ("model", {}),
    "dead-units": ("probes", {}),
}
KINDS = list(PARTS)
OBJECTIVES = [kind for kind, (family, _) in PARTS.items() if family == "objective"]
OTHER = {
    "squared-error": "objective=squared-error,cross-entropy",
    "normed": "model=normed,mlp",
    "dead-units": "probes=dead-units,none",
    "colours": "optimizer.learning-rate=1e-3,1e-2",
    "table": "optimizer.learning-rate=1e-3,1e-2",
}
"""What is varied with a part that has no traced number."""


OUTSIDE_THE_STEP = ("colours", "table", "scaled", "dead-units")


def file_of(kind: str) -> Path:
    """Return the file that defines a part."""
    return LAB if kind in KINDS[: KINDS.index("wobble")] else Path(kinds.__file__)


def config_of(kind: str, *, seed: int = 0, epochs: int = 2, **numbers: Any) -> Config:
    """Return a small config with a part of the lab; three layers, so that Muon has a hidden one."""
    family = PARTS[kind][0]
    if family == "data":
        numbers["validation"] = VALIDATION_ROWS
    part: Any = FAMILIES[family].kind_named(kind)(**numbers)
    model = MLPConfig(widths=(8, 6), dropout=0.3)
    return small_config(seed=seed, epochs=epochs, **{"model": model, family: part})


@pytest.fixture(scope="session")
def folder(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the made data set, and beside its files an npz of colours and two tables."""
    both = Path(shutil.copytree(data_dir, tmp_path_factory.mktemp("kinds") / "data"))
    random = np.random.default_rng(1)
    sizes = (TRAIN_ROWS + VALIDATION_ROWS, TEST_ROWS)
    labels = [random.permutation(np.arange(size) % CLASSES).astype(np.uint8) for size in sizes]
    images = [
        (60 * each[:, None, None, None] + random.integers(0, 90, (len(each), 3, 2, 3))).astype("u1")
        for each in labels
    ]
    names = ("images", "labels", "new_images", "new_labels")
    arrays = (images[0], labels[0], images[1], labels[1])
    np.savez(both / "colours.npz", **dict(zip(names, arrays, strict=True)))
    for name, each in zip(("train.csv", "test.csv"), labels, strict=True):
        table = np.column_stack([random.normal(each[:, None], 1, (len(each), 5)), each])
        np.savetxt(both / name, table, delimiter=",", header="a,b,c,d,e,class", comments="")
    return both


def run_of(kind: str, folder: Path, **execution: Any) -> Experiment:
    return Experiment.of(config_of(kind), small_execution(folder, **execution))


def test_every_part_of_the_lab_is_held_to_the_laws():
    defined = [
        node.name
        for file in (LAB, Path(kinds.__file__))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef)
    ]
    known = {cls.__name__ for family in FAMILIES.values() for cls in family.kinds.values()}
    assert set(defined) - known == {"Normed"}  # the model of a config
    assert len(defined) == len(PARTS) + 1


def test_every_part_is_at_most_fifteen_lines():
    """Without imports, docstrings and empty lines; a model's lines and its config's together."""
    counts: dict[str, int] = {}
    for file in (LAB, Path(kinds.__file__)):
        text = file.read_text()
        for node in ast.parse(text).body:
            if isinstance(node, ast.ClassDef):
                code = ast.get_source_segment(text, node)
                assert code is not None
                lines = [line for line in code.splitlines() if line.strip() and '"""' not in line]
                name = node.name.removesuffix("Config")
                counts[name] = counts.get(name, 0) + len(lines)
    assert len(counts) == len(PARTS) and max(counts.values()) <= 15, counts


@pytest.fixture(autouse=True)
def programs_are_forgotten() -> Iterator[None]:
    """One process cannot hold the programs of all these parts: it has so many memory maps."""
    yield
    eqx.clear_caches()
    jax.clear_caches()
    gc.collect()


def each_kind(*choices: tuple[int, ...]) -> Any:
    """Parametrize by kind and choice; all but the first choice are long.

    Long too are parts that act before the first step or after an epoch: the laws of steps and of
    devices hold for them as for any run.
    """
    return pytest.mark.parametrize(
        ("kind", "choice"),
        [
            pytest.param(
                kind,
                choice,
                marks=[pytest.mark.long] * (choice != choices[0] or kind in OUTSIDE_THE_STEP),
            )
            for kind in KINDS
            for choice in choices
        ],
        ids=str,
    )


@each_kind((7, 39), (1, 7, 39, 1000))
def test_any_number_of_steps_a_call_gives_the_same_bits(
    kind: str, choice: tuple[int, ...], folder: Path
):
    ends = [train_through(run_of(kind, folder, steps_per_call=k)) for k in choice]
    for state, metrics in ends[1:]:
        assert_bitwise(state, ends[0][0])
        assert_bitwise(list(metrics.values()), list(ends[0][1].values()))
    assert np.isfinite(ends[0][1]["loss"]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_kill_at_a_random_step_a_resume_ends_in_the_same_bits(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def train(name: str, *, resume: bool = False) -> Any:
        return fit(
            config_of(kind, epochs=3),
            small_execution(folder),
            run_dir=tmp_path / name,
            resume=resume,
            report=Report(quiet=True),
        )

    whole = train("whole")
    record, killed_after = laws.fit_module.record_steps, random.Random(kind).randrange(13, 35)

    def record_and_die(run: Any, metrics: Any, start: int, steps: int) -> None:
        record(run, metrics, start, steps)
        if start + steps >= killed_after:
            raise MemoryError  # ends the run as a kill does: nothing is saved on the way out

    monkeypatch.setattr(laws.fit_module, "record_steps", record_and_die)
    with pytest.raises(MemoryError):
        train("killed")
    monkeypatch.setattr(laws.fit_module, "record_steps", record)
    resumed = train("killed", resume=True)
    assert_bitwise(resumed.model, whole.model)
    assert laws.lasting_lines(tmp_path / "killed") == laws.lasting_lines(tmp_path / "whole")
    assert resumed.summary["test"] == whole.summary["test"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_member_is_the_single_run_also_with_another_traced_number(kind: str, folder: Path):
    configs = [config_of(kind, seed=1), config_of(kind, seed=2, **PARTS[kind][1])]
    metrics = laws.members_are_their_single_runs(configs, folder)
    if PARTS[kind][1]:
        assert (metrics[0]["loss"] != metrics[1]["loss"]).any()


@each_kind((1, 8), (1, 2, 4, 8))
def test_devices_change_only_rounding(kind: str, choice: tuple[int, ...], folder: Path):
    losses = [train_through(run_of(kind, folder, mesh_data=n))[1]["loss"] for n in choice]
    for others in losses[1:]:
        np.testing.assert_allclose(others, losses[0], rtol=1e-5, atol=0)


looks: list[bytes] = []


class Looker(eqx.Module):
    """Softmax regression that reports the pixels that it is given in training."""

    linear: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __call__(self, image: Any, /, *, key: Any = None) -> Any:
        if not self.dropout.inference:
            jax.debug.callback(lambda image: looks.append(np.asarray(image).tobytes()), image)
        return self.linear(image)


class LookerConfig(ModelConfig, frozen=True):
    kind: Literal["looker"] = "looker"

    def build(self, image_shape: tuple[int, ...], classes: int, *, key: Any) -> Looker:
        return Looker(eqx.nn.Linear(math.prod(image_shape), classes, key=key), eqx.nn.Dropout(0.5))


@pytest.mark.parametrize("kind", ["shift", "affine", "elastic", "wobble", "erasing"])
def test_devices_and_calls_see_the_same_augmented_pixels_to_the_bit(kind: str, folder: Path):
    config = small_config(epochs=1, model=LookerConfig(), augmentation={"kind": kind})
    seen = []
    for execution in ({"mesh_data": n} for n in (1, 2, 4, 8)):
        looks.clear()
        train_through(Experiment.of(config, small_execution(folder, **execution)))
        jax.effects_barrier()
        seen.append(sorted(looks))
    raw = Experiment.of(config, small_execution(folder)).data.train.images
    unchanged = {image.tobytes() for image in raw.astype(np.float32) / np.float32(255)}
    assert len(seen[0]) == 12 * 16 and len(unchanged & set(seen[0])) < 100
    assert all(others == seen[0] for others in seen[1:])


@pytest.mark.parametrize("kind", OBJECTIVES)
def test_devices_see_the_same_batches_and_masks(kind: str, folder: Path):
    config = small_config(epochs=1, model=WitnessConfig(), objective={"kind": kind})
    seen = [
        witnessed(Experiment.of(config, small_execution(folder, mesh_data=n)))[2]
        for n in (1, 2, 4, 8)
    ]
    assert seen[0] and all(others == seen[0] for others in seen[1:])


TRAIN = ["--train.epochs", "1"]
TRAIN += ["--train.batch-size", "16", "--evaluation.batch-size", "16", "--no-compile-cache"]


@pytest.mark.parametrize("kind", KINDS)
def test_it_trains_by_flags_resumes_evaluates_and_sweeps(
    kind: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """In one process: what each script does with `--with`, without starting each anew."""
    scripts = {name: processes.load_script(name) for name in ("train", "evaluate", "sweep")}
    monkeypatch.setenv("COLUMNS", "200")
    run_dir, (family, numbers) = tmp_path / "run", PARTS[kind]
    data = ["--data.dir", str(folder), "--data.validation", str(VALIDATION_ROWS)]
    file = file_of(kind)
    widths = [] if family == "model" else ["--model.widths", "8", "6"]
    flags = ["--with", str(file), *TRAIN, *widths, *data, f"--{family}", kind]
    scripts["train"].main([*flags, "--mesh.data", "1", "--run-dir", str(run_dir)])
    result = json.loads((run_dir / "result.json").read_text())
    start = json.loads((run_dir / "environment.json").read_text())[0]
    assert start["code"].keys() == {file.name}
    assert (run_dir / "code" / file.name).read_bytes() == file.read_bytes()
    resume = ["--resume", "--run-dir", str(run_dir), "--with", str(file), "--mesh.data", "1"]
    scripts["train"].main([*resume, "--evaluation.batch-size", "16", "--no-compile-cache"])
    assert json.loads((run_dir / "result.json").read_text())["test"] == result["test"]
    capsys.readouterr()
    words = [str(run_dir), "--evaluation.batch-size", "16", "--mesh.data", "1"]
    scripts["evaluate"].main([*words, "--no-compile-cache", "--with", str(file)])
    assert f"({result['test']['correct']} of 70)" in capsys.readouterr().out
    vary = [f"{family}.{name}={value},{value / 2}" for name, value in numbers.items()]
    vary = vary or [OTHER[kind]]
    sweep_dir = tmp_path / "sweep"
    scripts["sweep"].main([*flags, "--seeds", "2", "--vary", *vary, "--run-dir", str(sweep_dir)])
    summary = json.loads((sweep_dir / "summary.json").read_text())
    assert [setting["test"]["n"] for setting in summary["settings"]] == [2, 2]
    programs = len(list((sweep_dir / "programs").iterdir()))
    assert programs == (1 if numbers or family == "data" else 2)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Make a kind unknown, as in a process that was not told of its file."""

    def forget(kind: str) -> None:
        family = FAMILIES[PARTS[kind][0]]
        monkeypatch.delitem(family.kinds, kind)

    return forget


def test_evaluation_needs_no_optimizers_file(
    folder: Path,
    tmp_path: Path,
    forgotten: Callable[[str], None],
    capsys: pytest.CaptureFixture[str],
):
    """The average that was evaluated is read, not the weights that were trained."""
    quiet = Report(quiet=True)
    trained = fit(
        config_of("averaged-adam"), small_execution(folder), run_dir=tmp_path / "r", report=quiet
    )
    forgotten("averaged-adam")
    evaluate = processes.load_script("evaluate")
    words = [str(tmp_path / "r"), "--evaluation.batch-size", "16", "--mesh.data", "1"]
    evaluate.main([*words, "--no-compile-cache"])
    shown = " ".join(capsys.readouterr().out.split())
    assert f"({trained.summary['test']['correct']} of 70)" in shown
    assert "equal to result.json: the counts exactly, the loss to 0" in shown


def test_a_run_whose_objective_is_unknown_says_which_file_to_bring(
    folder: Path,
    tmp_path: Path,
    forgotten: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    fit(
        config_of("focal"),
        small_execution(folder),
        run_dir=tmp_path / "r",
        report=Report(quiet=True),
    )
    forgotten("focal")
    monkeypatch.setattr("sys.argv", ["evaluate.py", str(tmp_path / "r")])
    with pytest.raises(SystemExit):
        command_line.run(processes.load_script("evaluate").main)
    message = capsys.readouterr().err
    assert "objective.kind is 'focal': it must be one of cross-entropy" in message
    assert "--with FILE" in message


def test_traced_numbers_of_two_parts_vary_in_one_program(folder: Path, tmp_path: Path):
    flags = [*TRAIN, "--data.dir", str(folder), "--data.validation", str(VALIDATION_ROWS)]
    processes.load_script("sweep").main(
        [
            *flags,
            *("--objective", "mixup", "--optimizer", "max-norm-sgd", "--seeds", "2"),
            *("--vary", "objective.alpha=0.1,0.2,0.4", "optimizer.max-norm=2,3,4"),
            *("--run-dir", str(tmp_path / "sweep")),
        ]
    )
    assert [path.name for path in (tmp_path / "sweep" / "programs").iterdir()] == ["000"]
    summary = json.loads((tmp_path / "sweep" / "summary.json").read_text())
    assert len(summary["settings"]) == 9


def test_a_frozen_layer_is_unchanged_to_the_bit_and_has_no_state(folder: Path):
    optimizer = {"kind": "adamw", "weight_decay": 0.5, "freeze": ["layers[0]", "layers[1]"]}
    run = Experiment.of(small_config(optimizer=optimizer), small_execution(folder))
    before, (after, _) = initial_state(run), train_through(run)
    untrained, trained = (list(state.model.layers) for state in (before, after))  # pyright: ignore
    assert_bitwise(untrained[:2], trained[:2])
    last = [arrays_of(layer) for layer in (untrained[2], trained[2])]
    assert not np.array_equal(last[0][0], last[1][0])
    state = jax.tree.leaves(eqx.filter(after.optimizer_state, eqx.is_inexact_array))
    assert sum(leaf.size for leaf in state) == 2 * sum(leaf.size for leaf in last[0])
