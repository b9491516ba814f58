"""Multilayer perceptrons in JAX and Equinox: research whose numbers can be believed."""

import gc
from typing import TYPE_CHECKING, Any

_collecting = gc.isenabled()
gc.disable()  # imports make what lasts: looking for garbage among it takes a quarter of their time

from mlp_research import contracts  # noqa: E402

contracts.install()  # before the modules whose functions it checks

from mlp_research.config import PRESETS as PRESETS  # noqa: E402
from mlp_research.config import Config as Config  # noqa: E402
from mlp_research.config import Execution as Execution  # noqa: E402
from mlp_research.contracts import Checked as Checked  # noqa: E402
from mlp_research.contracts import ContractError as ContractError  # noqa: E402
from mlp_research.datasets import DataConfig as DataConfig  # noqa: E402
from mlp_research.experiment import Experiment as Experiment  # noqa: E402
from mlp_research.fit import Result as Result  # noqa: E402
from mlp_research.fit import fit as fit  # noqa: E402
from mlp_research.frozen import ConfigError as ConfigError  # noqa: E402
from mlp_research.frozen import Failure as Failure  # noqa: E402
from mlp_research.models import MLP as MLP  # noqa: E402
from mlp_research.models import Mixer as Mixer  # noqa: E402
from mlp_research.models import MixerConfig as MixerConfig  # noqa: E402
from mlp_research.models import MLPConfig as MLPConfig  # noqa: E402
from mlp_research.models import ModelConfig as ModelConfig  # noqa: E402
from mlp_research.models import ResidualConfig as ResidualConfig  # noqa: E402
from mlp_research.models import ResidualMLP as ResidualMLP  # noqa: E402

if TYPE_CHECKING:
    from mlp_research.testing import check_loader as check_loader
    from mlp_research.testing import check_model as check_model
    from mlp_research.testing import check_optimizer as check_optimizer

if _collecting:
    gc.enable()


def __getattr__(name: str) -> Any:
    """The checks, imported when they are first asked for: only tests need them."""
    if name in ("check_loader", "check_model", "check_optimizer"):
        from mlp_research import testing

        return getattr(testing, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
