"""Data: where the rows of an experiment come from, and which of them are used. Each is a part.

A part only reads. The split, the checks of what it gave, the checksum and the count of rows that
stand in both parts are the package's own, and so the same for every kind.
"""

import abc
import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, no_type_check

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt

from mlp_research.errors import Failure
from mlp_research.parts import Part

if TYPE_CHECKING:
    Pair = tuple[np.ndarray, np.ndarray]
    Arrays = (
        tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
        | tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]
    )
else:  # what is wrong with them is said once, by `checks`, whether contracts are on or off
    Pair = Arrays = object


class DataError(Failure, ValueError):
    """Data that cannot be used: which file or array, the numbers, and what to do."""


@no_type_check  # as above
@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows of one part of a data set, as a kind of data gives them."""

    features: np.ndarray
    """uint8 (pixels of 0 to 255) or float32, of shape [examples, ...]: 28 x 28, 32 x 32 x 3, 13."""
    labels: np.ndarray
    """Integers of shape [examples]: the class of each, counted from 0."""
    groups: np.ndarray | None = None
    """Integers of shape [examples], where each belongs to a group: the writer of each digit."""
    names: tuple[str, str, str] = ("", "", "")
    """What messages call the three, such as the files that they are read from."""


class DataConfig(Part, abc.ABC, frozen=True):
    """Where the rows come from, and which of the training rows are trained on."""

    validation: NonNegativeInt = 5000
    """Rows held out for validation: the last ones of the training rows, never trained on."""
    limit: PositiveInt | None = None
    """Train only on the first N rows, to overfit a few examples; by default all that are left."""
    normalize: bool = False
    """Standardise each feature by its mean and standard deviation over the training rows."""
    crc32: Annotated[int, Field(ge=0, lt=2**32)] | None = None
    """Checksum that the data must have; by default that of what the run finds first and keeps."""

    @abc.abstractmethod
    def read(self, directory: Path) -> tuple[Rows, Rows]:
        """Return (training rows, test rows). `directory` is that of --data.dir.

        Raises `DataError` for what cannot be used.
        """
