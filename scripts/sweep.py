"""Many seeds and settings in few programs: python scripts/sweep.py [PRESET] [--vary ...]."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Literal

import jax

from mlp_research.terminal import command_line


@dataclasses.dataclass(frozen=True)
class SweepFlags(command_line.RunFlags):
    """What is varied, and how its members are computed."""

    seeds: int = 8
    """Runs of each setting: seeds --seed, --seed + 1, ..."""
    vary: tuple[str, ...] = ()
    """FIELD=V1,V2 ...: all combinations are trained; the first values are the reference."""
    vary_stream: tuple[Literal["init", "order", "augmentation", "dropout"], ...] = ()
    """Let each of these streams of chance vary alone, and all together."""
    members_per_program: int | None = None
    """Most members of one program, to bound memory; by default all that can share one."""
    lift: Literal["map", "vmap"] | None = None
    """Members of one device one after the other (by default on CPUs, to the bit) or batched."""
    record: str | None = None
    """Write the summary into docs/results.md, under this title."""


PLANNED = ("seeds", "vary", "vary_stream", "members_per_program")


def main(argv: Sequence[str]) -> None:
    use_a_device_for_each_core()
    preset, flags = command_line.parse(
        SweepFlags, argv, "Train many seeds and settings, and say what their differences are worth."
    )
    # Only now: --help and a usage error need none of it.
    from benchmarks import results_page

    from mlp_research.data import datasets
    from mlp_research.storage.run_folder import default_run_dir
    from mlp_research.sweep import design, run, tables
    from mlp_research.system.stopping import Stopped
    from mlp_research.terminal.report import Report

    run_dir = flags.run_dir or default_run_dir(f"sweep-{preset}", flags.config)
    flags = with_kept_plan(flags)
    data = datasets.load(flags.execution.data_dir, flags.config.data)
    config, labels = flags.config.on(data), data.test.labels
    del data  # each program loads its own
    plan = design.plan(
        config, flags.seeds, flags.vary, flags.vary_stream, flags.members_per_program
    )
    report = Report()
    report.facts({"sweep": str(run_dir)} | design.cost(plan, flags.execution))
    with run.open_folder(plan, run_dir, config, flags.resume) as folder:
        if folder.left_behind:
            report.say(f"taken over from {folder.left_behind}, which is gone")
        try:
            outcomes = run.run(plan, folder, flags.execution, flags.lift, report)
        except Stopped as stop:
            raise Stopped(stop.signal, run_dir) from None
        summary = run.conclude(plan, folder, outcomes, labels, report)
    if flags.record is not None:
        command = " ".join(["python scripts/sweep.py", *without(argv, "--run-dir", "--record")])
        body = tables.sweep_section(summary)
        results_page.record(results_page.DOCUMENT, flags.record, flags.record, command, body)


def without(argv: Sequence[str], *flags: str) -> list[str]:
    """The command line without these flags and their values."""
    kept, words = [], iter(argv)
    for word in words:
        if word in flags:
            next(words, None)
        else:
            kept.append(word)
    return kept


def use_a_device_for_each_core() -> None:
    """Members lie on devices: on a CPU, one device for each core, unless the user chose."""
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))


def with_kept_plan(flags: SweepFlags) -> SweepFlags:
    """On --resume, what was not given anew is as the folder's plan has it."""
    from mlp_research.storage.run_folder import RunFolderError, read_json

    path = flags.run_dir / "plan.json" if flags.run_dir else None
    if not flags.resume or path is None or not path.exists():
        return flags
    kept = read_json(path)
    if not isinstance(kept, dict) or not kept.keys() >= {*PLANNED}:
        raise RunFolderError(f"{path} is not what the sweep wrote: put it back")
    defaults = {field.name: field.default for field in dataclasses.fields(flags)}
    missing = {
        name: tuple(kept[name]) if isinstance(kept[name], list) else kept[name]
        for name in PLANNED
        if getattr(flags, name) == defaults[name]
    }
    return dataclasses.replace(flags, **missing)


if __name__ == "__main__":
    command_line.run(main)
