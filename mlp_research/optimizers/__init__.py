"""The optimizers and the schedules of the learning rate."""

from mlp_research.optimizers.base import LearningRate as LearningRate
from mlp_research.optimizers.base import OptimizerConfig as OptimizerConfig
from mlp_research.optimizers.base import Rate as Rate
from mlp_research.optimizers.base import WeightDecay as WeightDecay
from mlp_research.optimizers.base import clip_by_global_norm as clip_by_global_norm
from mlp_research.optimizers.base import matrices as matrices
from mlp_research.optimizers.rules import AdamConfig as AdamConfig
from mlp_research.optimizers.rules import AdamWConfig as AdamWConfig
from mlp_research.optimizers.rules import LionConfig as LionConfig
from mlp_research.optimizers.rules import SGDConfig as SGDConfig
from mlp_research.optimizers.schedules import ConstantConfig as ConstantConfig
from mlp_research.optimizers.schedules import LinearConfig as LinearConfig
from mlp_research.optimizers.schedules import OneCycleConfig as OneCycleConfig
from mlp_research.optimizers.schedules import ScheduleConfig as ScheduleConfig
from mlp_research.optimizers.schedules import WarmupCosineConfig as WarmupCosineConfig
