"""Train a model and leave a run folder: python scripts/train.py [PRESET] [--flag VALUE ...]."""

from collections.abc import Sequence

from mlp_research import command_line


def main(argv: Sequence[str]) -> None:
    preset, flags = command_line.parse(
        command_line.RunFlags, argv, "Train a model on a folder of IDX files; by default on MNIST."
    )
    # Only now: --help and a usage error need neither.
    from mlp_research.fit import fit
    from mlp_research.run_folder import default_run_dir

    fit(
        flags.config,
        flags.execution,
        run_dir=flags.run_dir or default_run_dir(preset, flags.config),
        resume=flags.resume,
    )


if __name__ == "__main__":
    command_line.run(main)
