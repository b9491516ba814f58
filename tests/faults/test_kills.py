"""Killed at any moment, a run and a sweep go on and end as if nothing had happened."""

import itertools
import os
import random
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from mlp_research.storage.run_folder import RunFolderError
from mlp_research.sweep import design, run
from tests.faults.conftest import Tally
from tests.faults.jobs import SWEEP, Whole, check_same
from tests.faults.kills import AIMS, kill_again_and_again
from tests.faults.starter import Starter
from tests.made import small_config

SEEN = (
    "SIGTERM, SIGINT: `stopped by SIGTERM; the state is saved in RUN_DIR`, how to go on, exit code "
    "143 or 130; SIGKILL: nothing; `--resume` goes on and ends with the same bits"
)
LEFT = "nothing: `--resume` clears it away"


def long_chains(count: int, kills: int) -> list:
    """Chains of kills of one folder; the aims go round, so that each is met as often."""
    aims = itertools.cycle(AIMS)
    each = [(seed, tuple(itertools.islice(aims, kills))) for seed in range(1, count + 1)]
    return [pytest.param(*chain, marks=pytest.mark.long, id=f"chain {chain[0]}") for chain in each]


FIRST = pytest.param(0, tuple(AIMS), id="each aim")
"""What the ordinary suite has time for, beside the stop of a sweep and tests/test_resume.py."""


def check_kills(
    whole: Whole,
    starter: Starter,
    tmp_path: Path,
    data_dir: Path,
    seed: int,
    aims: Sequence[str],
    tally: Tally,
) -> None:
    # Every fifth chain is started as a user starts it, with all imports to be killed in.
    counted = kill_again_and_again(
        whole, starter, tmp_path / "job", data_dir, aims, random.Random(seed), seed % 5 == 4
    )
    what = "run" if whole.job.script == "train" else "sweep"
    for each, times in counted.items():
        left = each.startswith("left behind")
        name = f"a kill {each}" if left else f"a {what} killed {each}"
        tally(name, times, times, LEFT if left else SEEN)


@pytest.mark.parametrize(("seed", "aims"), [FIRST, *long_chains(34, 5)])
def test_a_killed_run_goes_on_to_the_same_bits(
    seed: int,
    aims: Sequence[str],
    whole_run: Whole,
    starter: Starter,
    tmp_path: Path,
    data_dir: Path,
    tally: Tally,
):
    check_kills(whole_run, starter, tmp_path, data_dir, seed, aims, tally)


@pytest.mark.parametrize(("seed", "aims"), long_chains(10, 3))
def test_a_killed_sweep_goes_on_to_the_same_summary(
    seed: int,
    aims: Sequence[str],
    whole_sweep: Whole,
    starter: Starter,
    tmp_path: Path,
    data_dir: Path,
    tally: Tally,
):
    check_kills(whole_sweep, starter, tmp_path, data_dir, seed, aims, tally)


def test_a_stop_within_a_program_s_final_write_is_not_forgotten(
    whole_sweep: Whole, starter: Starter, tmp_path: Path, data_dir: Path, tally: Tally
):
    folder = tmp_path / "sweep"
    first, second = (folder / "programs" / name for name in ("000", "001"))
    started = SWEEP.start(starter, folder, data_dir, slowly=False)
    assert started.until(lambda: (first / "result.json").exists()), started.printed()
    os.kill(started.pid, signal.SIGTERM)
    assert started.wait() == 143, started.printed()
    assert f"--resume --run-dir {folder}" in started.printed()
    assert not second.exists(), "the sweep went on"
    left = (first / "result.json").stat().st_mtime_ns
    assert SWEEP.start(starter, folder, data_dir, slowly=False).wait() == 0
    assert (first / "result.json").stat().st_mtime_ns == left, "a program was trained again"
    check_same(whole_sweep, folder)
    tally("a sweep stopped between two programs", 1, 1, SEEN)


def test_ctrl_c_while_python_collects_garbage_is_not_lost():
    program = """
import gc, signal
from mlp_research.terminal import command_line

def main(words):
    gc.callbacks.append(lambda phase, _: phase == "start" and signal.raise_signal(signal.SIGINT))
    gc.collect()
    print("went on")

command_line.run(main)
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "interrupted\n")


def test_a_sweep_s_plan_is_there_before_its_config_says_that_a_sweep_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    replace, replaced = Path.replace, []

    def watched(path: Path, target: Path) -> Path:
        replaced.append(target.name)
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", watched)
    config, folder = small_config(), tmp_path / "sweep"
    plan = design.plan(config, 2)
    with run.open_folder(plan, folder, config, resume=False):
        assert replaced.index("plan.json") < replaced.index("config.json")
    # Else a resume would make a plan of its own from the flags' defaults.
    (folder / "plan.json").unlink()
    with pytest.raises(RunFolderError, match=r"holds no sweep: there is no .*plan\.json"):
        run.open_folder(plan, folder, config, resume=True)
