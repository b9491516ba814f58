"""The models: one file for each architecture, known by their kinds."""

from mlp_research.models.base import Model as Model
from mlp_research.models.base import ModelConfig as ModelConfig
from mlp_research.models.mixer import Mixer as Mixer
from mlp_research.models.mixer import MixerConfig as MixerConfig
from mlp_research.models.mlp import MLP as MLP
from mlp_research.models.mlp import MLPConfig as MLPConfig
from mlp_research.models.residual import ResidualConfig as ResidualConfig
from mlp_research.models.residual import ResidualMLP as ResidualMLP
