"""The whole experiment as one frozen config: its JSON, its presets, its flags.

`Config` holds what decides the numbers; `Execution` how this machine computes them, which by the
laws changes no number but rounding.
"""

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import tyro
from pydantic import Field, NonNegativeInt, PositiveInt

from mlp_research.augmentations import Augmentation, NoAugmentation
from mlp_research.base_config import BaseConfig, json_value
from mlp_research.data import ArraysConfig, DataConfig, IdxConfig
from mlp_research.data.datasets import DEFAULT_DIRECTORY, Splits
from mlp_research.errors import ConfigError, Failure
from mlp_research.models import MixerConfig, MLPConfig, ModelConfig, ResidualConfig
from mlp_research.objectives import CrossEntropy, Objective
from mlp_research.optimizers import AdamConfig, AdamWConfig, OptimizerConfig
from mlp_research.optimizers.schedules import (
    ConstantConfig,
    LinearConfig,
    OneCycleConfig,
    ScheduleConfig,
    WarmupCosineConfig,
)
from mlp_research.parts import Part, is_family
from mlp_research.prng import SEEDS
from mlp_research.probes import NoProbe, Probe
from mlp_research.starts import SeedStart, Start

FORMAT = 3
"""Number of the format of config.json; it changes when an older version could misread one."""


class TrainConfig(BaseConfig, frozen=True):
    """How long, and on how much at once."""

    epochs: PositiveInt = 10
    """Passes over the training rows."""
    batch_size: PositiveInt = 128
    """Examples of one step, over all devices; the last partial batch of an epoch is left out."""


class EvaluationConfig(BaseConfig, frozen=True):
    """What is evaluated after every epoch beside the validation rows."""

    train_rows: NonNegativeInt = 0
    """Evaluate this many of the first training rows every epoch."""
    test: bool = False
    """Evaluate the test set every epoch; without it the test set is looked at once, at the end."""


Seed = Annotated[int, Field(ge=0, lt=SEEDS)]
STREAMS = ("init", "order", "augmentation", "dropout")
"""The streams of chance of a run."""


class StreamsConfig(BaseConfig, frozen=True):
    """Seeds of single streams, to let one kind of chance vary while the others are held."""

    init: Seed | None = None
    """Seed of the initial weights; by default the run's."""
    order: Seed | None = None
    """Seed of the data order; by default the run's."""
    augmentation: Seed | None = None
    """Seed of the changes of the training images; by default the run's."""
    dropout: Seed | None = None
    """Seed of the dropout masks and of all else that the objective draws; by default the run's."""


class Config(BaseConfig, frozen=True):
    """What decides the numbers of a run."""

    seed: Seed = 0
    """The experiment's only source of chance: weights, data order, augmentation, dropout."""
    streams: StreamsConfig = StreamsConfig()
    data: DataConfig = IdxConfig()
    augmentation: Augmentation = NoAugmentation()
    model: ModelConfig = MLPConfig()
    start: Start = SeedStart()
    objective: Objective = CrossEntropy()
    optimizer: OptimizerConfig = AdamConfig()
    schedule: ScheduleConfig = ConstantConfig()
    probes: Probe = NoProbe()
    train: TrainConfig = TrainConfig()
    evaluation: EvaluationConfig = EvaluationConfig()

    @property
    def parts(self) -> dict[str, Part]:
        """The part of each family, by the family's name."""
        return {name: getattr(self, name) for name in FAMILIES}

    def with_kinds(self, kinds: Mapping[str, str]) -> "Config":
        """Return the config with these kinds of parts, by family, each with its defaults.

        A part that is of its kind already stays as it is. Raises `ConfigError` for an unknown kind.
        """
        chosen: dict[str, Part] = {}
        for name, kind in kinds.items():
            try:
                found = FAMILIES[name].kind_named(kind)
            except ConfigError as error:
                raise ConfigError(f"{name}.{error}") from None
            chosen[name] = self.parts[name] if type(self.parts[name]) is found else found()
        return self.model_copy(update=chosen)

    def stream_seed(self, stream: str) -> int:
        """Return the seed of a stream: its own where it has one, else the run's."""
        own = getattr(self.streams, stream)
        return self.seed if own is None else own

    def identified(self) -> "Config":
        """Return the config with the checksum of what its start reads."""
        return self.model_copy(update={"start": self.start.identified()})

    def with_arrays(self) -> "Config":
        """Return the config for data that are arrays in memory, its other choices of rows kept."""
        if isinstance(self.data, ArraysConfig):
            return self
        shared = DataConfig.model_fields.keys() - {"kind"}
        kept = {name: getattr(self.data, name) for name in shared}
        return self.model_copy(update={"data": ArraysConfig(**kept)})

    def on(self, data: Splits | None) -> "Config":
        """Return the config of a run on this data set, with its checksum; or on any, for None."""
        crc32 = None if data is None else data.crc32
        return self.model_copy(update={"data": self.data.model_copy(update={"crc32": crc32})})

    def to_json(self) -> Any:
        """Return the config as a JSON value."""
        return {"format": FORMAT} | self.model_dump(mode="json")

    @classmethod
    def from_json(cls, text: str, needed: Collection[str] | None = None) -> "Config":
        """Return the config that was written as JSON.

        With `needed`, a part of any other family may be of a kind that is not known here; such a
        part tells its kind, and can do nothing. Raises `ConfigError` for anything else.
        """
        values = json_value(text)
        if not isinstance(values, dict):
            raise ConfigError("not a config: the outermost value must be an object")
        return cls.from_values(values, needed)

    @classmethod
    def from_values(
        cls, values: Mapping[str, Any], needed: Collection[str] | None = None
    ) -> "Config":
        """Return the config of a JSON object as `to_json` makes it; see `from_json`."""
        fields = dict(values)
        written = fields.pop("format", None)
        if written != FORMAT:
            raise ConfigError(
                f"format is {written!r}, but this version of mlp_research reads format {FORMAT}: "
                "use the version that wrote it (environment.json names its commit), or train anew"
            )
        for name in FAMILIES.keys() - (FAMILIES.keys() if needed is None else needed):
            fields[name] = FAMILIES[name].known_or_absent(fields.get(name))
        try:
            return cls(**fields)
        except RecursionError:
            raise ConfigError("not a config: it is nested too deep") from None


FAMILIES: dict[str, type[Part]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and is_family(field.annotation)
}
"""The families of parts, by the name of their field in a config."""


def read_config(run_dir: Path, needed: Collection[str] | None = None) -> Config:
    """Return the config of a run folder. `needed` is as for `Config.from_json`.

    Raises `ConfigFileError` where there is none, or none that can be read.
    """
    path = run_dir / "config.json"
    try:
        return Config.from_json(path.read_text(encoding="utf-8"), needed)
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigFileError(f"{run_dir} holds no run: there is no {path}") from None
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        raise ConfigFileError(f"{path} cannot be used: {error}") from None


class ConfigFileError(Failure):
    """A document of a run folder that is not there or cannot be used."""


def differences(one: Any, other: Any) -> list[str]:
    """One line for each field in which two configs as JSON differ: `train.epochs is 10, not 20`."""
    return [f"{field} is {mine!r}, not {others!r}" for field, mine, others in unlike(one, other)]


def unlike(one: Any, other: Any) -> Iterator[tuple[str, Any, Any]]:
    """(path, value in one, value in the other) of each field in which two JSON values differ."""
    mine, others = dict(_leaves(one)), dict(_leaves(other))
    for field in sorted(mine.keys() | others.keys()):
        if mine.get(field) != others.get(field):
            yield field, mine.get(field), others.get(field)


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """(path, value) of all that is no object and no list of objects."""
    if isinstance(value, dict):
        for name, part in value.items():
            yield from _leaves(part, f"{path}.{name}" if path else name)
    elif isinstance(value, list) and any(isinstance(part, dict) for part in value):
        for index, part in enumerate(value):
            yield from _leaves(part, f"{path}[{index}]")
    else:
        yield path, value


class Execution(BaseConfig, frozen=True):
    """How this machine computes a run. Nothing here changes a number by more than rounding."""

    data_dir: Annotated[Path, tyro.conf.arg(name="data.dir")] = DEFAULT_DIRECTORY
    """Folder of the data: four IDX files, gzipped or raw; or, for --data arrays, one .npz."""
    read_threads: Annotated[
        Annotated[int, Field(ge=0, le=64)] | None, tyro.conf.arg(name="data.read-threads")
    ] = None
    """Threads that gather pixels ahead; by default one where they are read from the disk."""
    resident: Annotated[bool | None, tyro.conf.arg(name="data.resident")] = None
    """Keep the training rows on the device; by default where they are at most 1 GiB."""
    steps_per_call: Annotated[PositiveInt, tyro.conf.arg(name="train.steps-per-call")] = 39
    """Steps of one call of the compiled program."""
    evaluation_batch_size: Annotated[PositiveInt, tyro.conf.arg(name="evaluation.batch-size")] = (
        1000
    )
    """Examples evaluated at once, over all devices."""
    mesh_data: Annotated[PositiveInt | None, tyro.conf.arg(name="mesh.data")] = None
    """Devices over which each batch is spread; by default all that mesh.model leaves."""
    mesh_model: Annotated[PositiveInt, tyro.conf.arg(name="mesh.model")] = 1
    """Devices over which each dense layer is spread, for layers too wide for one."""


PRESETS: dict[str, Config] = {
    "default": Config(),
    "lesson": Config(
        data=IdxConfig(validation=0), evaluation=EvaluationConfig(train_rows=5000, test=True)
    ),
    "fast": Config(
        data=IdxConfig(validation=0),
        optimizer=AdamWConfig(learning_rate=3e-3),
        schedule=OneCycleConfig(),
        train=TrainConfig(epochs=3),
    ),
    "residual": Config(
        model=ResidualConfig(),
        optimizer=AdamConfig(learning_rate=4e-3),
        schedule=LinearConfig(),
    ),
    "mixer": Config(
        model=MixerConfig(),
        optimizer=AdamConfig(learning_rate=4e-3),
        schedule=LinearConfig(),
    ),
    "wide-dropout": Config(
        data=IdxConfig(validation=0),
        model=MLPConfig(widths=(1024, 1024, 1024), dropout=0.5, input_dropout=0.2),
        optimizer=AdamWConfig(learning_rate=1e-3),
        schedule=OneCycleConfig(),
        train=TrainConfig(epochs=30),
    ),
    "clipped": Config(optimizer=AdamConfig(clip_norm=1.0)),
    "warmup-cosine": Config(
        optimizer=AdamWConfig(clip_norm=1.0),
        schedule=WarmupCosineConfig(warmup_steps=1000, decay_steps=50_000),
    ),
}
"""Named configs; `default` is what runs where none is named."""
