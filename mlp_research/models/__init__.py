"""The models: one file for each architecture, known by their kinds."""

from mlp_research.models.base import BatchNorm as BatchNorm
from mlp_research.models.base import Model as Model
from mlp_research.models.base import ModelConfig as ModelConfig
from mlp_research.models.mixer import Mixer as Mixer
from mlp_research.models.mixer import MixerConfig as MixerConfig
from mlp_research.models.mlp import MLP as MLP
from mlp_research.models.mlp import BatchNormMLP as BatchNormMLP
from mlp_research.models.mlp import MLPConfig as MLPConfig
from mlp_research.models.residual import ResidualConfig as ResidualConfig
from mlp_research.models.residual import ResidualMLP as ResidualMLP
from mlp_research.models.state import BATCH as BATCH
from mlp_research.models.state import Stateful as Stateful
from mlp_research.models.state import advanced as advanced
from mlp_research.models.state import mixes_examples as mixes_examples
from mlp_research.models.state import over_batch as over_batch
from mlp_research.models.state import parameter_mask as parameter_mask
from mlp_research.models.state import parameters_of as parameters_of
from mlp_research.models.state import whole as whole
from mlp_research.models.state import with_model as with_model
from mlp_research.models.state import without_state as without_state
