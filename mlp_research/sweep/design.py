"""The plan of a sweep: settings, seeds, and the few programs that train them."""

import dataclasses
import itertools
import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax

from mlp_research.config import FAMILIES, STREAMS, Config, Execution
from mlp_research.errors import ConfigError
from mlp_research.models import summary
from mlp_research.programs.members import program_key
from mlp_research.programs.single import Experiment
from mlp_research.shapes import is_shape


@dataclasses.dataclass(frozen=True)
class Setting:
    """One value of each varied field, and its configs: one for each seed, in the same order."""

    name: str
    configs: tuple[Config, ...]


@dataclasses.dataclass(frozen=True)
class Member:
    """One run of a sweep: the indices of its setting and of its seed."""

    setting: int
    seed: int


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Settings, and the programs that train their members."""

    settings: tuple[Setting, ...]
    programs: tuple[tuple[Member, ...], ...]
    document: dict[str, Any]
    """What plan.json holds."""

    @property
    def members(self) -> int:
        return sum(map(len, self.programs))

    def configs(self, program: Sequence[Member]) -> list[Config]:
        return [self.settings[member.setting].configs[member.seed] for member in program]


def plan(
    base: Config,
    seeds: int,
    vary: Sequence[str] = (),
    streams: Sequence[str] = (),
    members_per_program: int | None = None,
) -> Sweep:
    """The sweep of all combinations of the varied fields, `FIELD=V1,V2`, each with all seeds.

    With `streams` instead, each named stream varies alone, and a last setting varies all of chance.
    Raises `ConfigError` for a field or value that the config does not take.
    """
    if vary and streams:
        raise ConfigError("--vary and --vary-stream are two questions: ask one at a time")
    settings = stream_settings(base, seeds, streams) if streams else grid(base, seeds, vary)
    document = {
        "config": base.to_json(),
        "seeds": seeds,
        "vary": list(vary),
        "vary_stream": list(streams),
        "members_per_program": members_per_program,
    }
    return Sweep(settings, tuple(_programs(settings, members_per_program)), document)


def grid(base: Config, seeds: int, vary: Sequence[str]) -> tuple[Setting, ...]:
    """One setting for each combination of values; the first values make the first setting."""
    varied = [_values(text) for text in vary]
    _check_varied([field for field, _ in varied])
    settings: list[Setting] = []
    for choice in itertools.product(*(values for _, values in varied)):
        fields = {field: value for (field, _), value in zip(varied, choice, strict=True)}
        name = ", ".join(f"{field} {_said(value)}" for field, value in fields.items())
        configs = [
            with_fields(base, fields | {"seed": base.seed + index}) for index in range(seeds)
        ]
        settings.append(Setting(name or "default", tuple(configs)))
    for one, other in itertools.combinations(settings, 2):
        if one.configs == other.configs:
            raise ConfigError(f"--vary names one setting twice: {one.name} and {other.name}")
    return tuple(settings)


def _check_varied(fields: Sequence[str]) -> None:
    """Raise `ConfigError` for a field that is varied twice, or that the seeds are."""
    twice = sorted({field for field in fields if fields.count(field) > 1})
    if twice:
        raise ConfigError(f"--vary {twice[0]} is given twice: give all its values at once")
    if "seed" in fields:
        raise ConfigError(
            "--vary seed: each setting is trained with the same seeds, so that they can be "
            "compared: say how many by --seeds and the first by --seed"
        )


def stream_settings(base: Config, seeds: int, streams: Sequence[str]) -> tuple[Setting, ...]:
    """One setting for each stream, in which it alone varies, and one in which all vary."""
    unknown = set(streams) - set(STREAMS)
    if unknown:
        raise ConfigError(
            f"--vary-stream {', '.join(sorted(unknown))}: choose from {', '.join(STREAMS)}"
        )
    seeded = [base.seed + index for index in range(seeds)]
    alone = [
        Setting(name, tuple(with_fields(base, {f"streams.{name}": seed}) for seed in seeded))
        for name in dict.fromkeys(streams)
    ]
    together = tuple(with_fields(base, {"seed": seed}) for seed in seeded)
    return (*alone, Setting("all together", together))


def with_fields(base: Config, fields: Mapping[str, Any]) -> Config:
    """Return the config with other values at dotted paths.

    The name of a family stands for its kind: another kind brings its defaults. Raises `ConfigError`
    for a path or value that the config does not take.
    """
    names = {field: field.removesuffix(".kind") for field in fields}
    kinds = {names[field]: fields[field] for field in fields if names[field] in FAMILIES}
    values = base.with_kinds(kinds).to_json()
    for field in [field for field in fields if names[field] not in FAMILIES]:
        *path, last = field.split(".")
        holder = values
        for name in path:
            holder = holder.get(name) if isinstance(holder, dict) else None
        if not isinstance(holder, dict) or last not in holder:
            raise ConfigError(f"--vary {field}: the config has no such field")
        holder[last] = fields[field]
    return Config.from_values(values)


def _values(text: str) -> tuple[str, list[Any]]:
    """(field, values) of `FIELD=V1,V2`: a JSON list without its brackets, or bare words."""
    field, equals, listed = text.partition("=")
    if not (field and equals and listed):
        raise ConfigError(f"--vary {text}: give FIELD=VALUE,VALUE, such as model.dropout=0,0.5")
    field = field.replace("-", "_")
    try:
        return field, json.loads(f"[{listed}]")
    except json.JSONDecodeError:
        return field, listed.split(",")


def _said(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


def _programs(
    settings: Sequence[Setting], members_per_program: int | None
) -> Iterator[tuple[Member, ...]]:
    """Members that one compiled program serves, in pieces of at most `members_per_program`."""
    groups: dict[Hashable, list[Member]] = {}
    for index, setting in enumerate(settings):
        for seed, config in enumerate(setting.configs):
            groups.setdefault(program_key(config), []).append(Member(index, seed))
    for group in groups.values():
        size = members_per_program or len(group)
        yield from (tuple(group[i : i + size]) for i in range(0, len(group), size))


def cost(sweep: Sweep, execution: Execution) -> dict[str, str]:
    """What the sweep is and what it will take at least, before it starts."""
    steps, operations, largest = 0, 0.0, 0
    for program in sweep.programs:
        alone = execution.model_copy(update={"mesh_data": 1, "mesh_model": 1})
        experiment = Experiment.of(sweep.configs(program)[0], alone)
        program_steps = experiment.plan.total_steps * len(program)
        steps += program_steps
        operations += program_steps * summary.operations(experiment.step_program())
        leaves = [leaf for leaf in jax.tree.leaves(experiment.template()) if is_shape(leaf)]
        state = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
        largest = max(largest, state * len(program) + experiment.data.train.images.nbytes)
    seconds = operations / summary.largest_rate()
    return {
        "programs": f"{len(sweep.programs)} for {sweep.members} members: "
        f"{len(sweep.settings)} settings x {len(sweep.settings[0].configs)} seeds",
        "steps": f"{steps:,} in all",
        "memory": f"{largest / 1e6:,.0f} MB of states and rows in the largest program",
        "time": f"at least {seconds / 60:.1f} minutes: {operations:.2g} operations at the rate of "
        "a large matrix product",
    }
