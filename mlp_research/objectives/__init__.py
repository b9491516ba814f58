"""The objectives: what a step descends, and what evaluation adds up."""

from mlp_research.objectives.base import RESERVED as RESERVED
from mlp_research.objectives.base import Objective as Objective
from mlp_research.objectives.cross_entropy import CrossEntropy as CrossEntropy
from mlp_research.objectives.cross_entropy import cross_entropy as cross_entropy
from mlp_research.objectives.sums import Evaluation as Evaluation
from mlp_research.objectives.sums import Measured as Measured
from mlp_research.objectives.sums import Sums as Sums
from mlp_research.objectives.sums import is_correct as is_correct
from mlp_research.objectives.sums import masked_sums as masked_sums
from mlp_research.objectives.sums import summed as summed
