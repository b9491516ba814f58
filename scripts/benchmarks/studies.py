"""Tables over seeds and frameworks: what is measured is not speed, or not speed alone."""

import json
import os
from pathlib import Path
from typing import Any

import jax
from benchmarks.measurement import SCRIPTS, Measurement, call, import_peers

from mlp_research.sweep import tables

RATES = {
    "sgd": ("0.03", "0.1", "0.3", "1"),
    "adam": ("3e-4", "1e-3", "3e-3", "1e-2"),
    "adamw": ("3e-4", "1e-3", "3e-3", "1e-2"),
    "lion": ("3e-5", "1e-4", "3e-4", "1e-3"),
}
"""Peak learning rates: four for each rule, three times apart."""
SCHEDULES = ("constant", "warmup-cosine", "one-cycle")
BATCHES = (128, 512)


def models(seeds: int, folder: Path) -> Measurement:
    """Each model with its shipped config and one recipe: accuracy over seeds, time to the MLP's.

    The seeds begin at 1000: none of them was looked at when the configs were chosen.
    """
    recipe = ("--optimizer.learning-rate", "4e-3", "--schedule", "linear", "--seed", "1000")
    rows, values, plain = [], {}, None
    for model in ("mlp", "residual", "mixer"):
        run_dir = folder / model
        words = ("--model", model, *recipe, "--seeds", seeds, "--run-dir", run_dir)
        call(SCRIPTS / "sweep.py", *words)
        (setting,) = json.loads((run_dir / "summary.json").read_text())["settings"]
        result = json.loads((run_dir / "programs" / "000" / "result.json").read_text())[0]
        plain = plain or result["train_seconds"]
        mean, spread = (100 * setting["test"][name] for name in ("mean", "standard_deviation"))
        relative = f"{result['train_seconds'] / plain:.2f}"
        rows.append((model, f"{result['parameters']:,}", f"{mean:.2f}", f"{spread:.2f}", relative))
        values[model] = setting
    headings = ("model", "parameters", "test %", "standard deviation", "time an epoch to mlp's")
    return Measurement("The models", tables.table(headings, rows), values)


def optimizers(seeds: int, folder: Path) -> Measurement:
    """Each rule, schedule and batch size at four learning rates: mean accuracy over seeds."""
    rows, values, chosen = [], {}, {}
    for rule, rates in RATES.items():
        run_dir = folder / rule
        vary = (
            *("--vary", f"schedule={','.join(SCHEDULES)}"),
            f"train.batch-size={','.join(map(str, BATCHES))}",
            f"optimizer.learning-rate={','.join(rates)}",
        )
        words = ("--optimizer", rule, *vary, "--train.epochs", 3, "--seeds", seeds)
        call(SCRIPTS / "sweep.py", *words, "--run-dir", run_dir)
        summary = json.loads((run_dir / "summary.json").read_text())
        values[rule] = summary["settings"]
        found = {setting["setting"]: setting for setting in summary["settings"]}
        for schedule in SCHEDULES:
            for batch in BATCHES:
                cells = [found.get(_name(schedule, batch, rate)) for rate in rates]
                rows.append((rule, schedule, str(batch), ", ".join(rates), *_cells(cells)))
        chosen[rule] = summary["chosen_by_validation"]
    headings = ("rule", "schedule", "batch", "learning rates", "1st", "2nd", "3rd", "4th")
    said = "; ".join(f"{rule}: {setting}" for rule, setting in chosen.items())
    lines = [
        *tables.table(headings, rows),
        "",
        "Test accuracy in percent after 3 epochs, the mean over seeds and behind it their standard "
        "deviation. The best of a row by validation is bold; a dash: every seed ceased to be "
        "finite.",
        "",
        f"Best by validation of each rule: {said}.",
    ]
    return Measurement("Optimizers, learning rates, schedules and batch sizes", lines, values)


def _name(schedule: str, batch: int, rate: str) -> str:
    """As `grid` names a setting."""
    return (
        f"schedule {schedule}, train.batch_size {batch}, optimizer.learning_rate {json.loads(rate)}"
    )


def _cells(settings: list[dict[str, Any] | None]) -> list[str]:
    finished = [setting for setting in settings if setting is not None]
    best = max(finished, key=lambda setting: setting["validation"]["mean"], default=None)
    cells = []
    for setting in settings:
        if setting is None:
            cells.append("-")
            continue
        test = setting["test"]
        text = f"{100 * test['mean']:.2f} ({100 * test['standard_deviation']:.2f})"
        cells.append(f"**{text}**" if setting is best else text)
    return cells


def parity(repeats: int, folder: Path) -> Measurement:
    """One MLP in every framework: the losses of 100 equal steps, and what each looks like."""
    if not os.environ.get("JAX_NUM_CPU_DEVICES"):
        jax.config.update("jax_num_cpu_devices", 4)  # so that the data-parallel ones have shares
    import_peers()
    import parity

    outcomes = parity.measure()
    return Measurement(
        "One MLP in every framework",
        [*parity.table(outcomes), "", *parity.EXPLANATION],
        {each.name: {kind: x.tolist() for kind, x in each.losses.items()} for each in outcomes},
        lambda path: parity.draw(path, outcomes),
    )
