"""A sweep: its programs trained, its members' results, and what their differences are worth."""

import csv
import dataclasses
import io
import json
import zipfile
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mlp_research.base_config import json_value
from mlp_research.config import Config, Execution, differences
from mlp_research.errors import ConfigError
from mlp_research.fit import fit_program
from mlp_research.programs.members import Lift, Members
from mlp_research.run import NonFiniteError
from mlp_research.storage.metrics_log import Line
from mlp_research.storage.run_folder import RunFolder, RunFolderError, read_json, write_atomically
from mlp_research.sweep import figures, statistics, tables
from mlp_research.sweep.design import Member, Sweep
from mlp_research.system.stopping import Stopped, StopRequest
from mlp_research.terminal.report import Report, aligned

UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, MemoryError),
    *(zipfile.BadZipFile, zlib.error),
)
"""What reading a damaged or foreign file of results can raise."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a finished member left."""

    validation: float | None
    test: float
    predictions: np.ndarray


def run(
    sweep: Sweep,
    folder: RunFolder,
    execution: Execution,
    lift: Lift | None,
    report: Report,
) -> dict[Member, Outcome]:
    """Train what is not trained yet. A member that ceased to be finite has no outcome.

    Raises `Stopped` after a signal, also one that comes between two programs.
    """
    outcomes: dict[Member, Outcome] = {}
    with StopRequest() as stop:
        for number, program in enumerate(sweep.programs):
            path = folder.path / "programs" / f"{number:03}"
            report.say(f"program {number + 1} of {len(sweep.programs)}: {len(program)} members")
            if not (path / "predictions.npz").exists():
                if stop.signal is not None:
                    raise Stopped(stop.signal, folder.path)
                members = Members.of(sweep.configs(program), execution, lift)
                _train(members, path, report, stop)
            outcomes |= _outcomes(program, path)
    return outcomes


def _train(members: Members, path: Path, report: Report, stop: StopRequest) -> None:
    """Train a program to its end; its predictions come last and say that it is whole."""
    resume = (path / "config.json").exists()
    try:
        state, _ = fit_program(members, path, resume, report, stop=stop)
    except NonFiniteError as error:
        report.say(f"no member is left: {error}")
        write_atomically(path / "result.json", "[]\n")
        predictions = np.zeros((len(members.configs), 0), np.int32)
    else:
        predictions = members.predictions(members.evaluated(state), members.data.test)
    packed = io.BytesIO()
    np.savez_compressed(packed, predictions=predictions)
    write_atomically(path / "predictions.npz", packed.getvalue())


def _outcomes(program: Sequence[Member], path: Path) -> dict[Member, Outcome]:
    """Raises `RunFolderError` where the program's files are not what was written."""
    written = _as_list(read_json(path / "result.json"))
    outcomes = {}
    try:
        with (
            (path / "predictions.npz").open("rb") as file,
            np.load(file, allow_pickle=False) as packed,
        ):
            predictions = packed["predictions"]
        for index, result in enumerate(written):
            member = result.get("member", index)
            validation = result.get("validation")
            outcomes[program[member]] = Outcome(
                validation and float(validation["accuracy"]),
                float(result["test"]["accuracy"]),
                predictions[member],
            )
    except UNREADABLE as error:
        raise RunFolderError(
            f"result.json or predictions.npz in {path} is not what was written "
            f"({type(error).__name__}: {error}): remove {path}, to train its members again"
        ) from None
    return outcomes


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def open_folder(sweep: Sweep, path: Path, config: Config, resume: bool) -> RunFolder:
    """The folder of a sweep, with its plan.json. Refuses to go on with another plan than that."""
    plan = path / "plan.json"
    if resume and (path / "config.json").exists():
        if not plan.exists():
            raise RunFolderError(f"{path} holds no sweep: there is no {plan}")
        kept = read_json(plan)
        if kept != sweep.document:
            different = "; ".join(differences(kept, sweep.document))
            raise RunFolderError(f"{path} holds a sweep with another plan: {different}")
    return RunFolder.open(path, config.to_json(), resume=resume, plan=sweep.document)


def summarise(sweep: Sweep, outcomes: dict[Member, Outcome], labels: np.ndarray) -> dict[str, Any]:
    """What summary.json holds: each setting's numbers, and what their differences are worth."""
    kept, lost = {}, []
    for index, setting in enumerate(sweep.settings):
        found = {m.seed: o for m, o in outcomes.items() if m.setting == index}
        kept[setting.name] = dict(sorted(found.items()))
        lost += [
            {"setting": setting.name, "seed": config.seed}
            for seed, config in enumerate(setting.configs)
            if seed not in found
        ]
    alive = {name: found for name, found in kept.items() if found}
    settings = [
        {
            "setting": name,
            "test": dataclasses.asdict(statistics.summary([o.test for o in found.values()])),
            "validation": _validation_summary(list(found.values())),
            "test_accuracies": {str(seed): o.test for seed, o in found.items()},
        }
        for name, found in alive.items()
    ]
    return {
        "settings": settings,
        "left_out": lost,
        "chosen_by_validation": _chosen(settings),
        # Streams differ in spread; their means stand on one seed of what is held.
        "comparisons": [] if sweep.document["vary_stream"] else _comparisons(alive, labels),
        "variance_shares": _shares(sweep, alive),
    }


def _validation_summary(outcomes: Sequence[Outcome]) -> dict[str, Any] | None:
    values = [outcome.validation for outcome in outcomes if outcome.validation is not None]
    return dataclasses.asdict(statistics.summary(values)) if values else None


def _chosen(settings: Sequence[dict[str, Any]]) -> str | None:
    """The setting with the best mean validation accuracy; the test set chooses nothing."""
    validated = [setting for setting in settings if setting["validation"] is not None]
    if not validated:
        return None
    return max(validated, key=lambda setting: setting["validation"]["mean"])["setting"]


def _comparisons(alive: dict[str, dict[int, Outcome]], labels: np.ndarray) -> list[dict[str, Any]]:
    """Each setting against the first, on the seeds that both this and all others finished."""
    common = sorted(set.intersection(*(set(found) for found in alive.values()))) if alive else []
    if len(alive) < 2 or len(common) < 2:
        return []
    compared = statistics.compare_settings(
        {name: [found[seed].test for seed in common] for name, found in alive.items()},
        predictions={
            name: np.stack([found[seed].predictions for seed in common])
            for name, found in alive.items()
        },
        labels=labels,
    )
    return [dataclasses.asdict(each) | {"sentence": each.sentence} for each in compared]


def _shares(sweep: Sweep, alive: dict[str, dict[int, Outcome]]) -> dict[str, Any] | None:
    """The share of the variance of test accuracy that each stream causes, where streams vary."""
    accuracies = {name: [o.test for o in found.values()] for name, found in alive.items()}
    together = accuracies.pop("all together", [])
    # Of one run, or of runs that all end alike, there is no variance to share.
    if not sweep.document["vary_stream"] or len(set(together)) < 2:
        return None
    shares = statistics.variance_shares(accuracies, together)
    return {name: dataclasses.asdict(share) for name, share in shares.items()}


def summary_csv(summary: dict[str, Any]) -> str:
    """One row a setting: n, mean, standard deviation, 95 % interval, extremes of test accuracy."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    names = ("n", "mean", "standard_deviation", "low", "high", "minimum", "maximum")
    writer.writerow(["setting", *names])
    for setting in summary["settings"]:
        writer.writerow([setting["setting"], *(setting["test"][name] for name in names)])
    return text.getvalue()


def conclude(
    sweep: Sweep,
    folder: RunFolder,
    outcomes: dict[Member, Outcome],
    labels: np.ndarray,
    report: Report,
) -> dict[str, Any]:
    """Write the summary and its figures, and say what may be said. `labels` are the test set's."""
    summary = summarise(sweep, outcomes, labels)
    write_atomically(folder.path / "summary.json", json.dumps(summary, indent=2) + "\n")
    write_atomically(folder.path / "summary.csv", summary_csv(summary))
    lines = [*aligned(*tables.sweep_table(summary)), *tables.sweep_sentences(summary)]
    for line in lines:
        report.say(line)
    draw(sweep, folder.path, summary)
    report.facts({"summary": str(folder.path / "summary.json")})
    return summary


def draw(sweep: Sweep, path: Path, summary: dict[str, Any]) -> None:
    """The pictures of a sweep, from its summary and its programs' metrics.jsonl."""
    chosen = summary["chosen_by_validation"]
    if sweep.document["vary_stream"] or len(sweep.settings) == 1:
        chosen = None
    runs = curves(sweep, path)
    title = f"{path.resolve().name}: {len(sweep.settings)} settings, {sweep.members} runs"
    settings, lost = summary["settings"], summary["left_out"]
    figures.accuracy(path / "accuracy.png", settings, lost, chosen, title=title)
    figures.learning_curves(path / "learning_curves.png", runs, chosen, title=title)
    figures.gradient_norm(path / "gradient_norm.png", runs, chosen, title=title)
    if summary["variance_shares"]:
        shares = summary["variance_shares"]
        figures.variance_shares(path / "variance_shares.png", shares, title=title)


def curves(sweep: Sweep, path: Path) -> list[figures.Runs]:
    """Each setting's runs with their lines, read from the programs' metrics.jsonl."""
    lines: dict[Member, list[Line]] = {}
    for number, program in enumerate(sweep.programs):
        lines |= {member: [] for member in program}
        metrics = path / "programs" / f"{number:03}" / "metrics.jsonl"
        if not metrics.exists():
            continue
        with metrics.open(encoding="utf-8", errors="replace") as file:
            for place, text in enumerate(file, 1):
                if '"split": "train"' in text:  # the steps' lines are many, and not needed
                    continue
                try:
                    line = json_value(text)
                    lines[program[line.get("member", 0)]].append(line)
                except (ConfigError, LookupError, TypeError, AttributeError):
                    raise RunFolderError(
                        f"line {place} of {metrics} is not what was written: {text.strip()[:80]!r}"
                    ) from None
    return [
        figures.Runs(
            setting.name,
            tuple(lines[Member(index, seed)] for seed in range(len(setting.configs))),
            setting.configs[0].optimizer.clip_norm,
        )
        for index, setting in enumerate(sweep.settings)
    ]
