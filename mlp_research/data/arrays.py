"""The kind `arrays`: one .npz file; and rows from arrays that a program has in memory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mlp_research.data.base import Arrays, DataConfig, DataError, Rows
from mlp_research.data.checks import described, pieces
from mlp_research.data.idx_folder import visible_names
from mlp_research.data.npz import read_npz

NAMES = ("x", "y", "x_test", "y_test")
GROUP_NAMES = ("groups", "groups_test")


class ArraysConfig(DataConfig, frozen=True):
    """One .npz file with the arrays x, y, x_test and y_test: --data.dir is it or its folder."""

    kind: Literal["arrays"] = "arrays"

    def read(self, directory: Path) -> tuple[Rows, Rows]:
        """Return (training rows, test rows) of an .npz file, as np.savez writes it.

        Features are x and x_test: uint8, or floats, which become float32 (float64 and float16 are
        rounded). Labels are y and y_test, of any type of integer; groups and groups_test may be
        there. Other arrays are not looked at, and no pickle is read.

        Raises `DataError` for a file that cannot be used.
        """
        path = directory if directory.is_file() else _find(directory)
        found = read_npz(path, NAMES, GROUP_NAMES)
        return _rows({name: found.get(name) for name in (*NAMES, *GROUP_NAMES)}, f" in {path}")


def rows_of_arrays(arrays: Arrays) -> tuple[Rows, Rows]:
    """Return (training rows, test rows) of (x, y, x_test, y_test), or with (groups, groups_test).

    The arrays are not copied, but for floats that are not float32. Raises `DataError` for what
    cannot be such arrays; see `checks.checked` for the rest.
    """
    names = (*NAMES, *GROUP_NAMES)
    if not isinstance(arrays, tuple | list) or len(arrays) not in (len(NAMES), len(names)):
        raise DataError(
            f"the data are {described(arrays)}: give (x, y, x_test, y_test), and groups and "
            "groups_test after them where there are any"
        )
    return _rows(dict(zip(names, arrays, strict=False)), "")


def _find(directory: Path) -> Path:
    """Return the one .npz file of a folder; hidden files are not looked at."""
    names = visible_names(directory)
    found = [name for name in names if name.endswith(".npz")]
    if len(found) == 1:
        return directory / found[0]
    shown = ", ".join((found or names)[:12]) or "nothing"
    raise DataError(
        f"{directory} holds {len(found)} .npz files, not one ({shown}): name the file by --data.dir"
    )


def _rows(arrays: Mapping[str, Any], where: str) -> tuple[Rows, Rows]:
    parts = []
    for x, y, groups in (("x", "y", "groups"), ("x_test", "y_test", "groups_test")):
        names = (f"{x}{where}", f"{y}{where}", f"{groups}{where}")
        features = _as_float32(arrays[x], names[0])
        parts.append(Rows(features, arrays[y], arrays.get(groups), names=names))
    return parts[0], parts[1]


def _as_float32(array: Any, name: str) -> Any:
    """Return floats of two or eight bytes, or of another byte order, as float32; all else as it is.

    Raises `DataError` for a finite number that is too large for float32.
    """
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f" or array.ndim < 2:
        return array
    is_masked = isinstance(array, np.ma.MaskedArray)
    if is_masked or array.dtype == np.float32 or array.dtype.itemsize > 8 or array.size == 0:
        return array
    converted = np.empty(array.shape, np.float32)
    for piece in pieces(len(array), array[0].size):
        given = array[piece]
        with np.errstate(over="ignore"):
            converted[piece] = given
        too_large = np.isinf(converted[piece]) & np.isfinite(given)
        if too_large.any():
            place = tuple(int(index[0]) for index in np.nonzero(too_large))
            raise DataError(
                f"{name} row {piece.start + place[0]} holds {given[place]}, which is infinite in "
                "float32: scale the features"
            )
    return converted
