"""Train a model and leave a run folder: python scripts/train.py [PRESET] [--flag VALUE ...]."""

import dataclasses
from collections.abc import Sequence
from typing import Annotated

import tyro

from mlp_research.errors import ConfigError
from mlp_research.system import processes, profiling
from mlp_research.terminal import command_line


@dataclasses.dataclass(frozen=True)
class TrainFlags(command_line.RunFlags):
    """How one run is looked at."""

    dry_run: bool = False
    """Say what the run is and what it costs, and train nothing."""
    profile: str | None = None
    """START:STOP: trace these steps into the run folder's profile/, which TensorBoard opens."""
    distributed: bool = False
    """Join other processes that run this command: all compute one run, in one --run-dir."""
    coordinator: Annotated[str | None, tyro.conf.arg(name="distributed.coordinator")] = None
    """HOST:PORT of the first process; by default what the cluster's environment says."""
    processes: Annotated[int | None, tyro.conf.arg(name="distributed.processes")] = None
    """How many processes join; by default what the cluster's environment says."""
    process: Annotated[int | None, tyro.conf.arg(name="distributed.process")] = None
    """Which of them this is, 0 to N - 1; by default what the cluster's environment says."""


def main(argv: Sequence[str]) -> None:
    preset, flags = command_line.parse(
        TrainFlags, argv, "Train a model; by default an MLP on MNIST."
    )
    if flags.distributed:
        join(flags)
    profile = None if flags.profile is None else profiling.parse_steps(flags.profile)
    # Only now: --help and a usage error need none of it.
    from mlp_research.fit import fit
    from mlp_research.programs.single import Experiment
    from mlp_research.storage.run_folder import default_run_dir
    from mlp_research.terminal.report import Report

    if flags.dry_run:
        experiment = Experiment.of(flags.config, flags.execution)
        Report().describe(experiment.facts(0) | experiment.cost(), experiment.layers())
        return
    fit(
        flags.config,
        flags.execution,
        run_dir=flags.run_dir or default_run_dir(preset, flags.config),
        resume=flags.resume,
        profile=profile,
    )


def join(flags: TrainFlags) -> None:
    """Join the other processes before anything is computed."""
    if flags.run_dir is None:
        raise ConfigError("--distributed needs --run-dir: one folder that all processes see")
    processes.join(flags.coordinator, flags.processes, flags.process)


if __name__ == "__main__":
    command_line.run(main)
