"""The command line: flags from the config's fields, faults as one message and an exit code."""

import argparse
import contextlib
import dataclasses
import gc
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import jax
import tyro

from mlp_research import compile_cache, contracts
from mlp_research.config import PRESETS, Config, ConfigFileError, Execution, read_config
from mlp_research.contracts import ContractError
from mlp_research.environment import trained_on
from mlp_research.frozen import ConfigError, Failure
from mlp_research.models import MODELS, ModelConfig
from mlp_research.optimizers import OPTIMIZERS, SCHEDULES
from mlp_research.stopping import Stopped

Unprefixed = tyro.conf.arg(name="")


@dataclasses.dataclass(frozen=True)
class RunFlags:
    """Where a run is kept."""

    config: Annotated[Config, Unprefixed]
    execution: Annotated[Execution, Unprefixed]
    run_dir: Path | None = None
    """Folder of the run; by default runs/<preset>-<model>-seed<N>-<UTC time>."""
    resume: bool = False
    """Go on with the run in --run-dir; its config is the default of every flag."""
    compile_cache: bool = True
    """Keep compiled programs in the user's cache, so that the next start is quicker."""


Flags = TypeVar("Flags", bound=RunFlags)


def parse(flags: type[Flags], argv: Sequence[str], description: str) -> tuple[str, Flags]:
    """(name of the preset, flags) of a command line `[PRESET] [--model NAME] [--flag VALUE ...]`.

    The preset and the kinds of model, optimizer and schedule fix the config's type and defaults;
    the rest is one parse. A usage error prints what is wrong and exits with code 2.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--model", "--model.kind")
    early.add_argument("--optimizer", "--optimizer.kind", choices=OPTIMIZERS)
    early.add_argument("--schedule", "--schedule.kind", choices=SCHEDULES)
    kinds, rest = early.parse_known_args(argv)
    preset = rest.pop(0) if rest and not rest[0].startswith("-") else None
    if preset is not None and preset not in PRESETS:
        early.error(f"preset {preset!r} is unknown: choose one of {', '.join(PRESETS)}")
    model = model_class(kinds.model) if kinds.model else None
    kept = _kept(rest, model)
    if kept is not None and preset is not None:
        early.error(f"--resume takes the config of the run folder: leave out the preset {preset}")
    default, execution = kept or (PRESETS[preset or "default"], Execution())
    chosen = {
        "model": model,
        "optimizer": OPTIMIZERS.get(kinds.optimizer),
        "schedule": SCHEDULES.get(kinds.schedule),
    }
    config = default.model_copy(
        update={
            field: kind()
            for field, kind in chosen.items()
            if kind is not None and not isinstance(getattr(default, field), kind)
        }
    )
    parsed = tyro.cli(
        flags,
        default=flags(config=config, execution=execution),
        args=rest,
        description=f"{description}\n\n{_choices()}",
        config=(tyro.conf.AvoidSubcommands,),
    )
    if parsed.compile_cache:
        compile_cache.enable()
    if parsed.resume and parsed.run_dir is None:
        early.error("--resume needs --run-dir: which run goes on?")
    return preset or "default", parsed


def _kept(rest: list[str], model: type[ModelConfig] | None) -> tuple[Config, Execution] | None:
    """The config of the run folder that is resumed, if one is, and where its data lay."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--resume", action="store_true")
    early.add_argument("--run-dir", "--run_dir", type=Path)
    known, _ = early.parse_known_args(rest)
    if not known.resume or known.run_dir is None:
        return None
    try:
        config = read_config(known.run_dir, model)
        return config, Execution(data_dir=trained_on(known.run_dir))
    except ConfigFileError as error:
        _exit(1, str(error))


def model_class(name: str) -> type[ModelConfig]:
    """A model's config from the table, or from a file of the user's own: `path.py:ConfigName`.

    Raises `ConfigError` where there is none of this name.
    """
    if name in MODELS:
        return MODELS[name]
    path, colon, class_name = name.rpartition(":")
    if not colon:
        known = ", ".join(MODELS)
        raise ConfigError(
            f"model {name!r} is unknown: choose one of {known}, or path.py:ConfigName"
        )
    if not Path(path).is_file():
        raise ConfigError(f"--model {name}: there is no file {path}")
    try:
        module = contracts.import_under_contracts(Path(path), Path(path).stem)
    except Exception as error:
        raise ConfigError(f"--model {name}: {type(error).__name__}: {error}") from None
    found = vars(module).get(class_name)
    if not (isinstance(found, type) and issubclass(found, ModelConfig)):
        raise ConfigError(f"--model {name}: {path} has no ModelConfig named {class_name}")
    return found


def _choices() -> str:
    def names(table: Mapping[str, Any]) -> str:
        return ", ".join(table)

    return (
        f"presets: {names(PRESETS)}; --model: {names(MODELS)} or path.py:ConfigName; "
        f"--optimizer: {names(OPTIMIZERS)}; --schedule: {names(SCHEDULES)}. "
        "Each kind has its own flags."
    )


def run(main: Callable[[Sequence[str]], None]) -> NoReturn:
    """Call a script's `main` with the command line and exit.

    Codes: 0; 1 failure; 2 usage; 143 and 130 after a stop by signal that was saved.
    """
    gc.freeze()  # what start-up made lasts to the end
    try:
        with _no_interrupt_ignored():
            main(sys.argv[1:])
    except Stopped as stop:
        _exit(128 + stop.signal, f"{stop}\ngo on with: {_resume_command(stop.run_dir)}")
    except KeyboardInterrupt:
        _exit(130, "interrupted")
    except ConfigError as error:
        _exit(2, str(error))
    except (Failure, ContractError) as error:
        _exit(1, str(error))
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        _exit(
            1,
            f"a device's memory does not suffice ({str(error).splitlines()[0]}): lower "
            "model.widths or train.batch_size, or spread the layers by mesh.model",
        )
    sys.exit(0)


@contextlib.contextmanager
def _no_interrupt_ignored() -> Iterator[None]:
    """Python drops what is raised while it collects garbage, where JAX has a callback: Ctrl-C too.

    The loop of a run has no need of this: there a signal is noted, and nothing is raised.
    """
    hook = sys.unraisablehook

    def heard(lost: Any) -> None:
        if issubclass(lost.exc_type, KeyboardInterrupt):
            print("interrupted", file=sys.stderr, flush=True)
            os._exit(130)
        hook(lost)

    sys.unraisablehook = heard
    try:
        yield
    finally:
        sys.unraisablehook = hook


def _resume_command(run_dir: Path) -> str:
    """A run folder stores no code: the file of a model from outside is named again."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--model", "--model.kind", default="")
    model = early.parse_known_args(sys.argv[1:])[0].model
    words = ["python", sys.argv[0], "--resume", "--run-dir", str(run_dir)]
    return shlex.join([*words, *(["--model", model] if ":" in model else [])])


def _exit(code: int, message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    sys.exit(code)
