"""A run is of the data it was begun with: it goes on with no other, nor is another taken for it."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlp_research.analysis.saved_run import SavedRunFlags, open_run, restore
from mlp_research.config import ConfigFileError
from mlp_research.data.idx import DataError
from mlp_research.fit import fit
from mlp_research.storage.run_folder import RunFolderError
from mlp_research.terminal.report import Report
from tests.made import VALIDATION_ROWS, assert_bitwise, small_config, small_execution
from tests.processes import load_script

Tally = Callable[[str, int, int, str], None]
REFUSED = "does not hold the data that the run was begun with: data.crc32 is"
WORDS = ("--evaluation.batch-size", "16", "--no-compile-cache")
QUIET = Report(quiet=True)


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    """A copy of the trained run that a test may spoil."""
    return Path(shutil.copytree(trained, tmp_path / "run"))


@pytest.fixture
def killed(run_dir: Path) -> Path:
    """The run as a kill after its first epoch would leave it."""
    (run_dir / "result.json").unlink()
    shutil.rmtree(run_dir / "checkpoints" / "24")
    return run_dir


def test_a_run_goes_on_with_no_data_but_its_own(
    killed: Path, trained: Path, other_data_dir: Path, tally: Tally
):
    script = load_script("train")
    kept = (killed / "metrics.jsonl").read_bytes()
    again = ["--resume", "--run-dir", str(killed), "--mesh.data", "1", *WORDS]
    with pytest.raises(DataError, match=rf"other-data {REFUSED} \d+, that of these files \d+"):
        script.main([*again, "--data.dir", str(other_data_dir)])
    assert (killed / "metrics.jsonl").read_bytes() == kept
    script.main(again)  # where its data lie, the folder says
    whole, resumed = (open_run(SavedRunFlags(path, mesh_data=1), 16) for path in (trained, killed))
    assert_bitwise(restore(whole, SavedRunFlags(trained)), restore(resumed, SavedRunFlags(killed)))
    tally("a run resumed with other data", 1, 1, f"DIR {REFUSED} ...; exit code 1")


def test_a_run_without_a_checkpoint_is_not_begun_anew_with_other_data(
    killed: Path, other_data_dir: Path, tally: Tally
):
    shutil.rmtree(killed / "checkpoints")
    with pytest.raises(RunFolderError, match=r"another config: data\.crc32 is \d+, not \d+"):
        fit(
            small_config(),
            small_execution(other_data_dir),
            run_dir=killed,
            resume=True,
            report=QUIET,
        )
    tally("a run resumed with other data", 1, 1, f"DIR {REFUSED} ...; exit code 1")


def test_a_data_folder_that_a_run_names_wrongly_is_said(killed: Path):
    (killed / "environment.json").write_text("{}")
    with pytest.raises(SystemExit) as ended:
        load_script("train").main(["--resume", "--run-dir", str(killed), *WORDS])
    assert ended.value.code == 1
    with pytest.raises(ConfigFileError, match=r"environment\.json is not what the run wrote"):
        open_run(SavedRunFlags(killed, compile_cache=False))


def test_a_sweep_goes_on_with_no_data_but_its_own(
    data_dir: Path, other_data_dir: Path, tmp_path: Path, tally: Tally
):
    script, run_dir = load_script("sweep"), tmp_path / "sweep"
    flags = [
        *("--data.dir", data_dir, "--data.validation", VALIDATION_ROWS, "--run-dir", run_dir),
        *("--model.widths", 6, "--train.epochs", 1, "--train.batch-size", 16, "--seeds", 2),
        *("--members-per-program", 1),
    ]
    script.main([*map(str, flags), *WORDS])
    summary = (run_dir / "summary.json").read_bytes()
    shutil.rmtree(run_dir / "programs" / "001")  # as if it were not begun yet
    again = ["--resume", "--run-dir", str(run_dir), *WORDS]
    with pytest.raises(DataError, match=REFUSED):
        script.main([*again, "--data.dir", str(other_data_dir)])
    assert not (run_dir / "programs" / "001").exists()
    script.main(again)  # where its data lie, its first program says
    assert (run_dir / "summary.json").read_bytes() == summary
    tally("a sweep resumed with other data", 1, 1, f"DIR {REFUSED} ...; exit code 1")


def test_a_saved_run_is_taken_up_with_no_data_but_its_own_unless_it_is_only_evaluated(
    run_dir: Path, other_data_dir: Path, tally: Tally
):
    flags = SavedRunFlags(run_dir, data_dir=other_data_dir, mesh_data=1, compile_cache=False)
    with pytest.raises(DataError, match=REFUSED):
        open_run(flags, 16)
    experiment = open_run(flags, 16, other_data=True)
    assert experiment.data.crc32 != experiment.config.data.crc32
    own = SavedRunFlags(run_dir, mesh_data=1, compile_cache=False)
    assert_bitwise(restore(experiment, flags), restore(open_run(own, 16), own))
    tally("a saved run taken up with other data", 1, 1, f"DIR {REFUSED} ...; exit code 1")
