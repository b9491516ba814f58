"""The augmentations: random changes of the images in training."""

from mlp_research.augmentations.base import Augmentation as Augmentation
from mlp_research.augmentations.base import NoAugmentation as NoAugmentation
from mlp_research.augmentations.geometric import Affine as Affine
from mlp_research.augmentations.geometric import Elastic as Elastic
from mlp_research.augmentations.geometric import Shift as Shift
