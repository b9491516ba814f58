"""Multilayer perceptrons in JAX and Equinox: research whose numbers can be believed."""

# ruff: noqa: E402

import gc
from typing import TYPE_CHECKING, Any

_collecting = gc.isenabled()
gc.disable()  # imports make what lasts: looking for garbage among it takes a sixth of their time

from mlp_research import contracts

contracts.install()  # before the modules whose functions it checks

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
    MLP,
    Mixer,
    MixerConfig,
    MLPConfig,
    Model,
    ModelConfig,
    ResidualConfig,
    ResidualMLP,
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
from mlp_research.programs.single import Experiment

if _collecting:
    gc.enable()

if TYPE_CHECKING:
    from mlp_research.testing import check_model, check_objective, check_optimizer

CHECKS = ("check_model", "check_objective", "check_optimizer")
"""Imported when they are first asked for: only tests need them."""

__all__ = [
    "MLP",
    "PRESETS",
    "TRACED",
    "AdamConfig",
    "AdamWConfig",
    "ArraysConfig",
    "Checked",
    "Config",
    "ConfigError",
    "ConstantConfig",
    "ContractError",
    "CrossEntropy",
    "DataConfig",
    "DataError",
    "EvaluationConfig",
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
    "NonNegativeFloat",
    "Objective",
    "OneCycleConfig",
    "OptimizerConfig",
    "Part",
    "PositiveFloat",
    "ResidualConfig",
    "ResidualMLP",
    "Result",
    "Rows",
    "SGDConfig",
    "ScheduleConfig",
    "StreamsConfig",
    "Traced",
    "TrainConfig",
    "WarmupCosineConfig",
    "check_model",
    "check_objective",
    "check_optimizer",
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
