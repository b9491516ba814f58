"""The command line: flags from the config's fields, faults as one message and an exit code."""

import argparse
import contextlib
import dataclasses
import gc
import os
import shlex
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import jax
import tyro

from mlp_research import contracts
from mlp_research.config import FAMILIES, PRESETS, Config, ConfigFileError, Execution, read_config
from mlp_research.contracts import ContractError
from mlp_research.errors import ConfigError, Failure
from mlp_research.models import ModelConfig
from mlp_research.storage.environment import trained_on
from mlp_research.system import compile_cache
from mlp_research.system.stopping import Stopped

Unprefixed = tyro.conf.arg(name="")
PartFiles = Annotated[
    tuple[Path, ...], tyro.conf.arg(name="with", metavar="FILE"), tyro.conf.UseAppendAction
]


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
    part_files: PartFiles = ()
    """Python file that defines parts of your own; repeat it for several files."""


Flags = TypeVar("Flags", bound=RunFlags)


def parse(flags: type[Flags], argv: Sequence[str], description: str) -> tuple[str, Flags]:
    """Return (name of the preset, flags) of a command line `[PRESET] [--with FILE] [--flag ...]`.

    The files of parts, the preset and the kind of each part fix the config's type and defaults; the
    rest is one parse. A usage error prints what is wrong and exits with code 2.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--with", action="append", default=[], type=Path, dest="part_files")
    for family in FAMILIES:
        early.add_argument(f"--{family}", f"--{family}.kind", dest=family)
    known, rest = early.parse_known_args(argv)
    bring(known.part_files)
    if known.model and ":" in known.model:
        known.model = kind_in_file(known.model)
    preset = rest.pop(0) if rest and not rest[0].startswith("-") else None
    if preset is not None and preset not in PRESETS:
        early.error(f"preset {preset!r} is unknown: choose one of {', '.join(PRESETS)}")
    kept = _kept(rest)
    if kept is not None and preset is not None:
        early.error(f"--resume takes the config of the run folder: leave out the preset {preset}")
    default, execution = kept or (PRESETS[preset or "default"], Execution())
    kinds = {name: getattr(known, name) for name in FAMILIES if getattr(known, name) is not None}
    config = default.with_kinds(kinds)
    default_flags = flags(config=config, execution=execution, part_files=tuple(known.part_files))
    parsed = tyro.cli(
        flags,
        default=default_flags,
        args=rest,
        description=f"{description}\n\n{_choices()}",
        config=(tyro.conf.AvoidSubcommands,),
    )
    if parsed.compile_cache:
        compile_cache.enable()
    if parsed.resume and parsed.run_dir is None:
        early.error("--resume needs --run-dir: which run goes on?")
    return preset or "default", parsed


def _kept(rest: list[str]) -> tuple[Config, Execution] | None:
    """The config of the run folder that is resumed, if one is, and where its data lay."""
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--resume", action="store_true")
    early.add_argument("--run-dir", "--run_dir", type=Path)
    known, _ = early.parse_known_args(rest)
    if not known.resume or known.run_dir is None:
        return None
    try:
        config = read_config(known.run_dir)
        return config, Execution(data_dir=trained_on(known.run_dir))
    except ConfigFileError as error:
        _exit(1, str(error))


def bring(files: Iterable[Path]) -> None:
    """Run files of parts under contracts, so that their kinds are known.

    Raises `ConfigError` for a file that cannot be run.
    """
    for file in files:
        _import(file, f"--with {file}")


def kind_in_file(name: str) -> str:
    """Return the kind of the model's config that `path.py:ConfigName` names, its file being run.

    Raises `ConfigError` where there is none of this name.
    """
    path, colon, class_name = name.rpartition(":")
    if not colon:
        raise ConfigError(f"--model {name}: give path.py:ConfigName, a file and a config in it")
    found = vars(_import(Path(path), f"--model {name}")).get(class_name)
    if not (isinstance(found, type) and issubclass(found, ModelConfig)):
        raise ConfigError(f"--model {name}: {path} has no ModelConfig named {class_name}")
    return str(found.model_fields["kind"].default)


def _import(file: Path, flag: str) -> types.ModuleType:
    if not file.is_file():
        raise ConfigError(f"{flag}: there is no file {file}")
    try:
        return contracts.import_under_contracts(file, file.stem)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(file.resolve())]
        if isinstance(error, SyntaxError):
            lines.append(error.lineno)
        where = f"line {lines[-1]}: " if lines else ""
        raise ConfigError(f"{flag}: {where}{type(error).__name__}: {error}") from None


def _choices() -> str:
    kinds = "; ".join(f"--{name}: {', '.join(family.kinds)}" for name, family in FAMILIES.items())
    return (
        f"presets: {', '.join(PRESETS)}; {kinds}. Each kind has its own flags. --with FILE brings "
        "kinds of your own; --model path.py:ConfigName does so for one model."
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
    """Return the command that goes on with a run. It names the files of parts again.

    A run folder runs no code by itself.
    """
    early = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    early.add_argument("--model", "--model.kind", default="")
    early.add_argument("--with", action="append", default=[], dest="part_files")
    known = early.parse_known_args(sys.argv[1:])[0]
    words = ["python", sys.argv[0], "--resume", "--run-dir", str(run_dir)]
    for file in known.part_files:
        words += ["--with", file]
    return shlex.join([*words, *(["--model", known.model] if ":" in known.model else [])])


def _exit(code: int, message: str) -> NoReturn:
    print(message, file=sys.stderr, flush=True)
    sys.exit(code)
