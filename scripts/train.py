"""Train a model and leave a run folder: python scripts/train.py [PRESET] [--flag VALUE ...]."""

import dataclasses
from collections.abc import Sequence

from mlp_research import command_line, profiling


@dataclasses.dataclass(frozen=True)
class TrainFlags(command_line.RunFlags):
    """How one run is looked at."""

    dry_run: bool = False
    """Say what the run is and what it costs, and train nothing."""
    profile: str | None = None
    """START:STOP: trace these steps into the run folder's profile/, which TensorBoard opens."""


def main(argv: Sequence[str]) -> None:
    preset, flags = command_line.parse(
        TrainFlags, argv, "Train a model on a folder of IDX files; by default on MNIST."
    )
    profile = None if flags.profile is None else profiling.parse_steps(flags.profile)
    # Only now: --help and a usage error need none of it.
    from mlp_research.experiment import Experiment
    from mlp_research.fit import fit
    from mlp_research.report import Report
    from mlp_research.run_folder import default_run_dir

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


if __name__ == "__main__":
    command_line.run(main)
