"""Data sets: files, splits, the order of batches, and batches themselves."""

from mlp_research.data.arrays import ArraysConfig as ArraysConfig
from mlp_research.data.base import DataConfig as DataConfig
from mlp_research.data.base import DataError as DataError
from mlp_research.data.base import Rows as Rows
from mlp_research.data.idx_folder import IdxConfig as IdxConfig
from mlp_research.data.writing import save_idx as save_idx
