"""The starts: the parameters before the first step."""

from mlp_research.starts.base import SeedStart as SeedStart
from mlp_research.starts.base import Start as Start
from mlp_research.starts.run import RunStart as RunStart
