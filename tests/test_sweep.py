"""A sweep: few programs, members that are single runs, a summary that survives a kill."""

import json
import signal
from collections.abc import Sequence
from pathlib import Path

import equinox as eqx
import jax
import numpy as np
import pytest

from mlp_research.config import PRESETS, Config, Execution
from mlp_research.data import datasets
from mlp_research.errors import ConfigError
from mlp_research.fit import fit_program
from mlp_research.models import MLPConfig
from mlp_research.optimizers import AdamConfig, OptimizerConfig, SGDConfig
from mlp_research.programs.members import Members
from mlp_research.storage import run_folder
from mlp_research.storage.run_folder import RunFolderError
from mlp_research.sweep import design, run
from mlp_research.terminal.report import Report
from tests import processes
from tests.laws import train_members
from tests.made import VALIDATION_ROWS, assert_bitwise, small_config, small_execution


def settled(base: Config, plan: design.Sweep, execution: Execution, run_dir: Path) -> dict:
    """The summary of a sweep that was run through."""
    report = Report(quiet=True)
    with run.open_folder(plan, run_dir, base, resume=False) as folder:
        outcomes = run.run(plan, folder, execution, None, report)
        labels = datasets.load(execution.data_dir, base.data).test.labels
        return run.conclude(plan, folder, outcomes, labels, report)


def plain_config(optimizer: OptimizerConfig | None = None, epochs: int = 2) -> Config:
    return small_config(
        model=MLPConfig(widths=(6,)), optimizer=optimizer or AdamConfig(), epochs=epochs
    )


RATES = "optimizer.learning-rate=1e-3,3e-3,1e-2"
CLIPS = "optimizer.clip-norm=0.5,1,null"
DROPOUTS = "model.dropout=0,0.2,0.5"


def test_traced_settings_share_one_program_and_dropout_rates_do_not():
    plan = design.plan(small_config(), 4, [RATES, CLIPS])
    assert [len(program) for program in plan.programs] == [36]
    plan = design.plan(small_config(), 4, [DROPOUTS])
    assert [len(program) for program in plan.programs] == [4, 4, 4]
    plan = design.plan(small_config(), 5, [], members_per_program=2)
    assert [len(program) for program in plan.programs] == [2, 2, 1]


@pytest.mark.parametrize(
    ("vary", "programs"),
    [((RATES, CLIPS), 1), pytest.param((DROPOUTS,), 3, marks=pytest.mark.long)],
)
def test_each_program_compiles_its_training_once(
    vary: Sequence[str],
    programs: int,
    data_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
):
    traced = []
    original = eqx.debug.assert_max_traces

    def counting(*, max_traces: int):
        def wrap(function):
            def counted(*args):
                traced.append(function.__qualname__)
                return function(*args)

            return original(counted, max_traces=max_traces)

        return wrap

    monkeypatch.setattr(eqx.debug, "assert_max_traces", counting)
    base = plain_config(epochs=1)
    plan = design.plan(base, 2, vary)
    settled(base, plan, small_execution(data_dir), tmp_path / "sweep")
    training = [name for name in traced if "_compile_train_steps" in name]
    assert len(training) == programs


def test_values_of_a_varied_field_are_read_as_json_or_words():
    base = small_config()
    names = [s.name for s in design.grid(base, 1, ["model.widths=[256,128],[1024]"])]
    assert names == ["model.widths 256 128", "model.widths 1024"]
    kinds = design.grid(base, 1, ["optimizer=adam,lion"])
    assert [s.configs[0].optimizer.kind for s in kinds] == ["adam", "lion"]
    assert kinds[1].configs[0].optimizer.learning_rate == 1e-4
    with pytest.raises(ConfigError, match=r"--vary model.depth: the config has no such field"):
        design.grid(base, 1, ["model.depth=1,2"])
    with pytest.raises(ConfigError, match="dropout is 2: it must be < 1"):
        design.grid(base, 1, ["model.dropout=0,2"])
    with pytest.raises(ConfigError, match="give FIELD=VALUE"):
        design.grid(base, 1, ["model.dropout"])
    with pytest.raises(ConfigError, match="names one setting twice"):
        design.grid(base, 1, ["model.dropout=0.1,0.1"])


@pytest.mark.parametrize(
    ("vary", "message"),
    [
        (["seed=1,2"], "--vary seed: each setting is trained with the same seeds"),
        (["model.dropout=0", "model.dropout=0.5"], "--vary model.dropout is given twice"),
        (["model.dropout=0,0.0"], "names one setting twice: model.dropout 0 and model.dropout 0.0"),
        (["optimizer=adam,rprop"], "optimizer.kind is 'rprop': it must be one of adam"),
        (["model.kind=mlp,adam"], "model.kind is 'adam': it must be one of "),
    ],
)
def test_what_cannot_be_varied_is_refused_by_its_own_name(vary: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        design.grid(small_config(), 2, vary)


def test_a_varied_kind_keeps_the_part_that_is_of_it_already():
    """What was set of the base's own part is not dropped when another kind stands beside it."""
    base = small_config(optimizer=AdamConfig(learning_rate=0.02, clip_norm=1.0))
    for spelled in ("optimizer", "optimizer.kind"):
        settings = design.grid(base, 1, [f"{spelled}=adam,sgd"])
        assert [s.configs[0].optimizer for s in settings] == [base.optimizer, SGDConfig()]
    # AdamW is an Adam in Python, but not of its kind.
    assert PRESETS["fast"].with_kinds({"optimizer": "adam"}).optimizer == AdamConfig()


def test_the_curves_of_many_members_stand_under_the_accuracy_of_the_one_that_is_drawn(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Member 0 ceases to be finite; member 1, with a clip norm of its own, is drawn."""
    drawn = []

    def draw(path: Path, steps: list, epochs: list, splits: list, clip_norm: float, *, title: str):
        drawn.append((steps, clip_norm, title))

    monkeypatch.setattr(run_folder.figures, "curves", draw)
    rules = [SGDConfig(learning_rate=1e30), SGDConfig(learning_rate=0.1, clip_norm=0.5)]
    program = Members.of([plain_config(rule) for rule in rules], small_execution(data_dir), "map")
    _, (summary,) = fit_program(program, tmp_path / "run", False, Report(quiet=True))
    ((steps, clip_norm, title),) = drawn
    assert {line["member"] for line in steps} == {1} and clip_norm == 0.5
    assert title.endswith(f"test accuracy {100 * summary['test']['accuracy']:.2f} %")


def test_every_setting_has_the_same_seeds():
    for setting in design.grid(small_config(seed=7), 3, [DROPOUTS]):
        assert [config.seed for config in setting.configs] == [7, 8, 9]


def test_a_varied_stream_leaves_the_others_as_they_are(data_dir: Path):
    base = small_config(seed=3)
    settings = design.stream_settings(base, 2, ["init", "order", "dropout"])
    assert [s.name for s in settings] == ["init", "order", "dropout", "all together"]
    execution = small_execution(data_dir)
    for setting, same_init, same_order, same_key in zip(
        settings,
        (False, True, True, False),
        (True, False, True, False),
        (True, True, False, False),
        strict=True,
    ):
        program = Members.of(setting.configs, execution, "map")
        one, other = program.unstack(eqx.filter(program.init(), eqx.is_array))
        weights = [np.asarray(state.model.layers[0].weight) for state in (one, other)]
        keys = [np.asarray(jax.random.key_data(state.keys.dropout)) for state in (one, other)]
        orders = [plan.permutation(0) for plan in program.plans]
        for same, (left, right) in ((same_init, weights), (same_order, orders), (same_key, keys)):
            assert np.array_equal(left, right) == same, setting.name


def test_a_diverging_member_is_left_out_and_the_others_are_what_they_are_without_it(
    data_dir: Path, tmp_path: Path
):
    execution = small_execution(data_dir)
    base = plain_config(SGDConfig())
    both = design.plan(base, 2, ["optimizer.learning-rate=0.1,1e30"])
    alone = design.plan(base, 2, ["optimizer.learning-rate=0.1"])
    with_it = settled(base, both, execution, tmp_path / "both")
    without = settled(base, alone, execution, tmp_path / "alone")
    lost = "optimizer.learning_rate 1e+30"
    assert with_it["left_out"] == [{"setting": lost, "seed": seed} for seed in (0, 1)]
    assert with_it["settings"] == without["settings"]
    states = [
        train_members(Members.of(plan.configs(plan.programs[0]), execution, "map"))[0]
        for plan in (both, alone)
    ]
    for array, other in zip(
        *(jax.tree.leaves(eqx.filter(state.model, eqx.is_array)) for state in states), strict=True
    ):
        assert_bitwise(array[:2], other[:2])


def test_where_no_member_of_a_program_is_left_the_sweep_goes_on(data_dir: Path, tmp_path: Path):
    base = plain_config(SGDConfig())
    plan = design.plan(base, 2, ["optimizer.learning-rate=1e30,0.1"], members_per_program=2)
    summary = settled(base, plan, small_execution(data_dir), tmp_path / "sweep")
    assert [lost["seed"] for lost in summary["left_out"]] == [0, 1]
    assert [setting["setting"] for setting in summary["settings"]] == [
        "optimizer.learning_rate 0.1"
    ]


def test_a_setting_against_itself_claims_nothing(data_dir: Path, tmp_path: Path):
    base = plain_config()
    plan = design.plan(base, 3, ["evaluation.test=false,true"])
    summary = settled(base, plan, small_execution(data_dir), tmp_path / "sweep")
    (compared,) = summary["comparisons"]
    assert compared["difference"]["estimate"] == 0
    assert "no difference" in compared["sentence"]


def sweep_flags(data_dir: Path, run_dir: Path) -> list[object]:
    return [
        *("--data.dir", data_dir, "--data.validation", VALIDATION_ROWS, "--run-dir", run_dir),
        *("--model.widths", 6, "--train.epochs", 6, "--train.batch-size", 16, "--seeds", 3),
        *("--train.steps-per-call", 3, "--evaluation.batch-size", 16),
        *("--vary", "model.dropout=0,0.3"),
    ]


@pytest.mark.long
@pytest.mark.parametrize("program", [0, 1])
def test_a_killed_sweep_goes_on_to_the_same_summary(program: int, data_dir: Path, tmp_path: Path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    ended = processes.run("sweep.py", *sweep_flags(data_dir, whole), JAX_NUM_CPU_DEVICES="2")
    assert ended.returncode == 0, ended.stderr
    process = processes.start("sweep.py", *sweep_flags(data_dir, killed), JAX_NUM_CPU_DEVICES="2")
    metrics = killed / "programs" / f"{program:03}" / "metrics.jsonl"
    processes.signal_after_lines(process, metrics, 3 * 30, signal.SIGKILL)
    before = {path: path.stat().st_mtime_ns for path in killed.glob("programs/*/predictions.npz")}
    assert len(before) == program
    resumed = processes.run(
        *("sweep.py", "--resume", "--run-dir", killed, "--data.dir", data_dir),
        *("--evaluation.batch-size", 16),
        JAX_NUM_CPU_DEVICES="2",
    )
    assert resumed.returncode == 0, resumed.stderr
    assert (killed / "summary.json").read_bytes() == (whole / "summary.json").read_bytes()
    for path, time in before.items():
        assert path.stat().st_mtime_ns == time, "a finished program was trained again"


def test_a_changed_plan_is_refused_with_the_difference(data_dir: Path, tmp_path: Path):
    base = plain_config()
    kept = design.plan(base, 2, [])
    with run.open_folder(kept, tmp_path / "sweep", base, resume=False):
        pass
    with pytest.raises(RunFolderError, match="another plan: seeds is 2, not 3"):
        run.open_folder(design.plan(base, 3, []), tmp_path / "sweep", base, resume=True)


@pytest.mark.parametrize("line", ["{", "[3]", '{"split": "epoch", "member": 9}', "\xff"])
def test_a_programs_line_that_is_not_what_was_written_is_named(line: str, tmp_path: Path):
    plan = design.plan(plain_config(), 2)
    metrics = tmp_path / "programs" / "000" / "metrics.jsonl"
    metrics.parent.mkdir(parents=True)
    metrics.write_text(f'{{"split": "epoch", "member": 1}}\n{line}\n', encoding="latin-1")
    with pytest.raises(RunFolderError, match=r"line 2 of .*000/metrics\.jsonl is not what was"):
        run.curves(plan, tmp_path)


@pytest.mark.parametrize("plan", ["", "3", "{}", '{"seeds": 2}'])
def test_an_edited_plan_is_refused_in_words(plan: str, tmp_path: Path):
    script = processes.load_script("sweep")
    (tmp_path / "plan.json").write_text(plan)
    flags = script.SweepFlags(plain_config(), Execution(), run_dir=tmp_path, resume=True)
    with pytest.raises(RunFolderError, match=r"plan\.json"):
        script.with_kept_plan(flags)


def test_the_test_set_chooses_no_setting():
    plan = design.plan(plain_config(), 2, ["model.dropout=0,0.5"])
    labels = np.zeros(10, np.uint8)
    wrong = np.arange(10, dtype=np.int32)  # each but the first
    outcomes = {}
    for seed in (0, 1):
        outcomes[design.Member(0, seed)] = run.Outcome(0.6, 1.0, 0 * wrong)
        outcomes[design.Member(1, seed)] = run.Outcome(0.7, 0.1, wrong)
    summary = run.summarise(plan, outcomes, labels)
    assert summary["chosen_by_validation"] == "model.dropout 0.5"


def test_summary_files_agree(data_dir: Path, tmp_path: Path):
    base = plain_config()
    plan = design.plan(base, 3, [DROPOUTS])
    summary = settled(base, plan, small_execution(data_dir), tmp_path / "sweep")
    assert json.loads((tmp_path / "sweep" / "summary.json").read_text()) == json.loads(
        json.dumps(summary)
    )
    rows = (tmp_path / "sweep" / "summary.csv").read_text().splitlines()
    assert len(rows) == 4
    assert rows[1].startswith(f"model.dropout 0,3,{summary['settings'][0]['test']['mean']}")
    assert summary["chosen_by_validation"] in [s["setting"] for s in summary["settings"]]


def test_a_stream_sweep_shares_the_variance_and_compares_no_means(data_dir: Path, tmp_path: Path):
    base = small_config(epochs=1)
    plan = design.plan(base, 4, streams=["init", "order"])
    summary = settled(base, plan, small_execution(data_dir), tmp_path / "sweep")
    assert set(summary["variance_shares"]) == {"init", "order"}
    assert summary["comparisons"] == []


def test_one_seed_has_no_variance_to_share(data_dir: Path, tmp_path: Path):
    base = small_config(epochs=1)
    plan = design.plan(base, 1, streams=["init"])
    summary = settled(base, plan, small_execution(data_dir), tmp_path / "sweep")
    assert summary["variance_shares"] is None
