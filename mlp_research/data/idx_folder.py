"""The kind `idx`: a folder of four IDX files, as MNIST comes."""

import os
import re
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from mlp_research.data.base import DataConfig, DataError, Rows
from mlp_research.data.idx import CHECKSUMS, opened, read_idx

PARTS = ("train", "t10k|test")
"""What a file's name says of the part it belongs to. EMNIST says test, and puts words before."""
ROLES = {
    "features": r"images-idx([2-9])-(ubyte|float)",
    "labels": r"labels-idx(1)-(ubyte|short|int)",
    "groups": r"(?:writers|groups)-idx(1)-(ubyte|short|int)",
}
"""How the name ends; .gz may follow."""
_LONGEST_LIST = 2**20  # Bytes of SHA256SUMS that are read.


class _File(NamedTuple):
    path: Path
    dimensions: int
    kind: str


class _Files(NamedTuple):
    """The files of one part."""

    features: _File
    labels: _File
    groups: _File | None


class IdxConfig(DataConfig, frozen=True):
    """Four IDX files in a folder, gzipped or raw."""

    kind: Literal["idx"] = "idx"

    def read(self, directory: Path) -> tuple[Rows, Rows]:
        """Return (training rows, test rows) of a folder of four IDX files.

        A file is known by the end of its name, train-images-idx3-ubyte: idx4 for height x width x
        channels, idx2 for rows of a table; float for ubyte; labels also short or int. Of a raw file
        and its gzipped twin the raw one is read. train-writers-idx1-short and its t10k twin (or
        groups for writers), where they are there, become the rows' groups. Where the folder holds
        SHA256SUMS, it must list all of these files, by the checksum of the unpacked content.

        Raises `DataError` for files that cannot be used.
        """
        parts = _find(directory)
        files = [file.path for part in parts for file in part if file is not None]
        checksums = _read_checksums(directory, files)

        def read(file: _File) -> np.ndarray:
            return read_idx(file.path, file.dimensions, checksums[file.path], file.kind)

        def rows(part: _Files) -> Rows:
            groups = None if part.groups is None else read(part.groups)
            features, labels, grouping = ("" if file is None else str(file.path) for file in part)
            names = (features, labels, grouping)
            return Rows(read(part.features), read(part.labels), groups, names=names)

        train, test = parts
        return rows(train), rows(test)


def data_files(directory: Path) -> list[str]:
    """Return the names in a folder that this kind would read, or that would forbid others."""
    ends = [f"(?:{part})-{pattern}" for part in PARTS for pattern in ROLES.values()]
    known = re.compile(rf"(?:{'|'.join(ends)})(?:\.gz)?\Z")
    return [name for name in visible_names(directory) if known.search(name) or name == CHECKSUMS]


def _find(directory: Path) -> tuple[_Files, _Files]:
    """Return the files of both parts; hidden files are not looked at."""
    names = visible_names(directory)
    parts, missing = [], []
    for part in PARTS:
        features, labels, groups = (
            _find_one(directory, names, f"(?:{part})-{pattern}") for pattern in ROLES.values()
        )
        for file, usual in ((features, "images-idx3-ubyte"), (labels, "labels-idx1-ubyte")):
            if file is None:
                missing.append(" or ".join(f"{word}-{usual}" for word in part.split("|")))
        if features is not None and labels is not None:
            parts.append(_Files(features, labels, groups))
    if missing:
        shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
        raise DataError(
            f"{directory} lacks {', '.join(missing)} (with or without .gz). "
            f"It holds {shown or 'nothing'}: add the files or name another folder"
        )
    train, test = parts
    if (train.groups is None) != (test.groups is None):
        there, lacking = ("train", "test") if test.groups is None else ("test", "train")
        raise DataError(
            f"{directory} holds the groups of the {there} rows, but not of the {lacking} rows: add "
            f"their file, or take the other away"
        )
    return train, test


def _find_one(directory: Path, names: list[str], pattern: str) -> _File | None:
    """Return the one file whose name ends so, if there is one: the raw one before its twin."""
    stems = sorted({name.removesuffix(".gz") for name in names})
    found = {stem: end for stem in stems if (end := re.search(rf"(?:{pattern})\Z", stem))}
    if len(found) > 1:
        raise DataError(
            f"{directory} holds {len(found)} files for {next(iter(found.values()))[0]}: "
            f"{', '.join(found)}. Give each data set a folder of its own"
        )
    for stem, end in found.items():
        path = directory / (stem if stem in names else f"{stem}.gz")
        return _File(path, int(end[1]), end[2])
    return None


def visible_names(directory: Path) -> list[str]:
    """Return the names in a folder but hidden ones, sorted. Raises `DataError` for no folder."""
    try:
        return sorted(path.name for path in directory.iterdir() if not path.name.startswith("."))
    except (OSError, ValueError) as error:  # ValueError: a name that no system takes
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(
            f"the data folder {directory} cannot be read ({reason}): name a folder of files"
        ) from None


def _read_checksums(directory: Path, files: list[Path]) -> dict[Path, str | None]:
    """The checksum that each file must have, None where the folder has no list of them."""
    path = directory / CHECKSUMS
    if not os.path.lexists(path):
        return dict.fromkeys(files)
    with opened(path) as file:
        lines = file.read(_LONGEST_LIST).decode(errors="replace").splitlines()
    listed: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        # sha256sum puts a star before the name of a file that it read as binary.
        entry = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](.+)", line)
        if entry is None:
            raise DataError(
                f"{path} line {number} is {line[:100]!r}: it must be the 64 hexadecimal digits of "
                "a SHA-256, two spaces and a file name without .gz"
            )
        digest, name = entry[1].lower(), entry[2]
        if listed.setdefault(name, digest) != digest:
            raise DataError(f"{path} line {number} gives {name} a second checksum: keep one")
    for name in (file.name.removesuffix(".gz") for file in files):
        if name not in listed:
            raise DataError(
                f"{path} does not list {name}: add the SHA-256 of its unpacked content under this "
                f"name, or remove {CHECKSUMS}"
            )
    return {file: listed[file.name.removesuffix(".gz")] for file in files}
