"""The probes: what is measured of a model while it trains."""

from mlp_research.probes.base import Examples as Examples
from mlp_research.probes.base import NoProbe as NoProbe
from mlp_research.probes.base import Probe as Probe
from mlp_research.probes.norms import UpdateRatio as UpdateRatio
from mlp_research.probes.norms import WeightNorms as WeightNorms
