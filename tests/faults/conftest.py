"""What the fault tests share: quick starts, uninterrupted jobs, and the table of what was tried."""

import json
import os
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import filelock
import pytest

from tests.faults.jobs import RUN, SWEEP, Job, Whole
from tests.faults.starter import Starter

DOCUMENT = Path(__file__).parents[2] / "docs" / "reliability.md"
FOLDER = "MLP_RESEARCH_TALLY"
"""The environment variable that tells the workers of a session where its rows are kept."""
Tally = Callable[[str, int, int, str], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--record-reliability",
        action="store_true",
        help="write the table of what was tried into docs/reliability.md",
    )


def is_worker() -> bool:
    return "PYTEST_XDIST_WORKER" in os.environ


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("record_reliability", default=False) and not is_worker():
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="mlp-research-tally-")


@pytest.fixture
def tally(tmp_path: Path) -> Tally:
    """Keep a row of the table: `tally(fault, tried, survived, what the user sees)`.

    Rows of one fault are added up.
    """
    folder = Path(os.environ.get(FOLDER, tmp_path))

    def keep(fault: str, tried: int, survived: int, seen: str) -> None:
        row = {"fault": fault, "tried": tried, "survived": survived, "seen": seen}
        row["time"] = time.time()
        (folder / f"row-{uuid.uuid4()}.json").write_text(json.dumps(row))

    return keep


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    folder = os.environ.get(FOLDER)
    if folder is None or is_worker():
        return
    if exitstatus != 0:
        print("\ndocs/reliability.md is left as it was: not every test passed", file=sys.stderr)
        return
    from benchmarks import results_page

    rows = added_up([json.loads(path.read_text()) for path in Path(folder).glob("row-*.json")])
    body = ["| fault | tried | survived | what the user sees |", "| --- | ---: | ---: | --- |"]
    body += [f"| {' | '.join(cells)} |" for cells in rows]
    command = 'python -m pytest tests/faults -m "" --dist load --record-reliability'
    results_page.record(DOCUMENT, "reliability", "What was tried", command, body)


def added_up(rows: list[dict[str, Any]]) -> list[list[str]]:
    """One row a fault, in the order of the alphabet."""
    table = []
    for fault in sorted({row["fault"] for row in rows}):
        mine = sorted((row for row in rows if row["fault"] == fault), key=lambda row: row["time"])
        seen = "; ".join(dict.fromkeys(row["seen"] for row in mine))
        tried, survived = (sum(row[name] for row in mine) for name in ("tried", "survived"))
        table.append([fault, f"{tried:,}", f"{survived:,}", seen])
    return table


@pytest.fixture(scope="session")
def starter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Starter]:
    started = Starter(tmp_path_factory.mktemp("printed"))
    yield started
    started.close()


@pytest.fixture(scope="session")
def shared_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of the session see."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if is_worker() else base


@pytest.fixture(scope="session")
def whole_run(starter: Starter, shared_dir: Path, data_dir: Path) -> Whole:
    """The run that nothing interrupted."""
    return uninterrupted(RUN, starter, shared_dir, data_dir)


@pytest.fixture(scope="session")
def whole_sweep(starter: Starter, shared_dir: Path, data_dir: Path) -> Whole:
    """The sweep that nothing interrupted."""
    return uninterrupted(SWEEP, starter, shared_dir, data_dir)


def uninterrupted(job: Job, starter: Starter, shared_dir: Path, data_dir: Path) -> Whole:
    """The job made once in a session, by whichever worker comes first."""
    folder, done = shared_dir / f"whole-{job.script}", shared_dir / f"whole-{job.script}.seconds"
    with filelock.FileLock(shared_dir / f"whole-{job.script}.lock"):
        if not done.exists():
            began = time.perf_counter()
            started = job.start(starter, folder, data_dir, slowly=False)
            assert started.wait() == 0, started.printed()
            done.write_text(str(time.perf_counter() - began))
    return Whole(job, folder, float(done.read_text()))
