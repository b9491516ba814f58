"""From the start of a process to a trained model, and what shape contracts cost on the way."""

import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.measurement import PEERS, SCRIPTS, Measurement, call, compared, epoch_lines, timed
from benchmarks.timing import Times


def start(repeats: int, folder: Path) -> Measurement:
    """Seconds from the start of a process until its test accuracy is known; a lesson's best one."""
    times: Times = {
        name: [] for name in ("lesson", "lesson in PyTorch", "fast, cold", "fast, warm")
    }
    accuracies: dict[str, list[float]] = {name: [] for name in times}
    for repeat in range(repeats):
        for name, program in (("lesson", "lesson.py"), ("lesson in PyTorch", "torch_lesson.py")):
            seconds, accuracy = to_its_best(program)
            times[name].append(seconds)
            accuracies[name].append(accuracy)
        cache = {"XDG_CACHE_HOME": str(folder / f"cache-{repeat}")}
        for name in ("fast, cold", "fast, warm"):
            run_dir = folder / f"{name}-{repeat}"
            began, written = time.time(), run_dir / "result.json"
            call(SCRIPTS / "train.py", "fast", "--run-dir", run_dir, environment=cache)
            times[name].append(written.stat().st_mtime - began)
            result = json.loads(written.read_text())
            accuracies[name].append(100 * result["test"]["accuracy"])
    reached = "; ".join(
        f"{name}: {min(values):.2f} to {max(values):.2f} %" for name, values in accuracies.items()
    )
    groups = {"from process start to trained": times}
    return compared(
        "From process start to trained", groups, "lesson", say=[f"Test accuracy: {reached}."]
    )


def to_its_best(program: str) -> tuple[float, float]:
    """(seconds, test accuracy in percent) of the epoch, of ten, that is a lesson's best."""
    began = time.perf_counter()
    command = [sys.executable, str(PEERS / program)]
    reached = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            accuracy = float(line.partition("test")[2].split()[0])
            reached.append((accuracy, -(time.perf_counter() - began)))
    accuracy, seconds = max(reached)
    return -seconds, accuracy


def contracts(repeats: int, folder: Path) -> Measurement:
    """Seconds with and without shape contracts; the compile cache is off."""
    groups: dict[str, Times] = {name: {} for name in ("import", "first calls", "steady epoch")}
    for repeat in range(repeats):
        for switch in ("off", "on") if repeat % 2 else ("on", "off"):
            environment = {"MLP_RESEARCH_CONTRACTS": switch}
            spent: list[float] = []
            with timed(spent):
                call("-c", "import mlp_research", environment=environment)
            run_dir = folder / f"{switch}-{repeat}"
            words = ("--no-compile-cache", "--train.epochs", "9", "--run-dir", run_dir)
            call(SCRIPTS / "train.py", *words, environment=environment)
            result = json.loads((run_dir / "result.json").read_text())
            epochs = [line["train_seconds"] for line in epoch_lines(run_dir)]
            groups["import"].setdefault(switch, []).extend(spent)
            groups["first calls"].setdefault(switch, []).append(result["compile_seconds"])
            groups["steady epoch"].setdefault(switch, []).extend(epochs[1:])
    ordered = {name: dict(sorted(times.items())) for name, times in groups.items()}
    return compared("What shape contracts cost", ordered, "off")
