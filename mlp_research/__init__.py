"""Multilayer perceptrons in JAX and Equinox: research whose numbers can be believed."""

# ruff: noqa: E402

import gc
from typing import TYPE_CHECKING, Any

_collecting = gc.isenabled()
gc.disable()  # imports make what lasts: looking for garbage among it takes a sixth of their time

from mlp_research import contracts

contracts.install()  # before the modules whose functions it checks

from mlp_research.augmentations import Affine, Augmentation, Elastic, NoAugmentation, Shift
from mlp_research.base_config import Fraction, NonNegativeFloat, PositiveFloat
from mlp_research.config import (
    PRESETS,
    Config,
    EvaluationConfig,
    Execution,
    StreamsConfig,
    TrainConfig,
)
from mlp_research.contracts import Checked, ContractError
from mlp_research.data import ArraysConfig, DataConfig, DataError, IdxConfig, Rows, save_idx
from mlp_research.errors import ConfigError, Failure
from mlp_research.fit import Result, fit
from mlp_research.models import (
    BATCH,
    MLP,
    BatchNorm,
    Mixer,
    MixerConfig,
    MLPConfig,
    Model,
    ModelConfig,
    ResidualConfig,
    ResidualMLP,
    Stateful,
)
from mlp_research.objectives import CrossEntropy, Objective, summed
from mlp_research.optimizers import (
    AdamConfig,
    AdamWConfig,
    LionConfig,
    OptimizerConfig,
    SGDConfig,
    matrices,
)
from mlp_research.optimizers.schedules import (
    ConstantConfig,
    LinearConfig,
    OneCycleConfig,
    ScheduleConfig,
    WarmupCosineConfig,
)
from mlp_research.parts import TRACED, Part, Traced
from mlp_research.prng import example_keys
from mlp_research.probes import Examples, NoProbe, Probe, UpdateRatio, WeightNorms
from mlp_research.programs.single import Experiment
from mlp_research.starts import RunStart, SeedStart, Start

if _collecting:
    gc.enable()

if TYPE_CHECKING:
    from mlp_research.testing import (
        check_augmentation,
        check_data,
        check_model,
        check_objective,
        check_optimizer,
        check_probe,
        check_start,
    )

CHECKS = (
    *("check_model", "check_objective", "check_optimizer"),
    *("check_augmentation", "check_data", "check_start", "check_probe"),
)
"""Imported when they are first asked for: only tests need them."""

__all__ = [
    "BATCH",
    "MLP",
    "PRESETS",
    "TRACED",
    "AdamConfig",
    "AdamWConfig",
    "Affine",
    "ArraysConfig",
    "Augmentation",
    "BatchNorm",
    "Checked",
    "Config",
    "ConfigError",
    "ConstantConfig",
    "ContractError",
    "CrossEntropy",
    "DataConfig",
    "DataError",
    "Elastic",
    "EvaluationConfig",
    "Examples",
    "Execution",
    "Experiment",
    "Failure",
    "Fraction",
    "IdxConfig",
    "LinearConfig",
    "LionConfig",
    "MLPConfig",
    "Mixer",
    "MixerConfig",
    "Model",
    "ModelConfig",
    "NoAugmentation",
    "NoProbe",
    "NonNegativeFloat",
    "Objective",
    "OneCycleConfig",
    "OptimizerConfig",
    "Part",
    "PositiveFloat",
    "Probe",
    "ResidualConfig",
    "ResidualMLP",
    "Result",
    "Rows",
    "RunStart",
    "SGDConfig",
    "ScheduleConfig",
    "SeedStart",
    "Shift",
    "Start",
    "Stateful",
    "StreamsConfig",
    "Traced",
    "TrainConfig",
    "UpdateRatio",
    "WarmupCosineConfig",
    "WeightNorms",
    "check_augmentation",
    "check_data",
    "check_model",
    "check_objective",
    "check_optimizer",
    "check_probe",
    "check_start",
    "example_keys",
    "fit",
    "matrices",
    "save_idx",
    "summed",
]


def __getattr__(name: str) -> Any:
    if name in CHECKS:
        from mlp_research import testing

        return getattr(testing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
