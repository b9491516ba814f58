"""Small made data of every kind, and a table of all that is wrong with data and must be refused."""

import gzip
import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from mlp_research.data import ArraysConfig, DataConfig, DataError, IdxConfig, Rows, save_idx
from mlp_research.data.datasets import load

IDX, ARRAYS = IdxConfig(validation=2), ArraysConfig(validation=2)
Arrays = dict[str, Any]
Change = Callable[[Arrays], object]
Call = Callable[[], object]
Make = Callable[[Path], Call]
"""From an empty folder to the call that must be refused."""
GIVEN: dict[str, Callable[[], Any]] = {}
"""What `GivenConfig.read` returns, by case."""


class GivenConfig(DataConfig, frozen=True):
    """A kind of a user's, which returns or raises whatever a test wants."""

    kind: Literal["given"] = "given"
    case: str = ""

    def read(self, directory: Path) -> tuple[Rows, Rows]:
        return GIVEN[self.case]()


def made(shape: tuple[int, ...] = (3,), dtype: Any = np.float32, classes: int = 3) -> Arrays:
    """Arrays of 6 rows to train on and 4 to test on, with groups."""
    random = np.random.default_rng(0)
    is_float = np.dtype(dtype).kind == "f"
    x = random.normal(size=(10, *shape)) if is_float else random.integers(0, 256, (10, *shape))
    y, groups = np.arange(10) % 3 * (classes - 1) // 2, np.arange(10) * 1000 - 1
    whole = {"x": x.astype(dtype), "y": y, "groups": groups}
    train = {name: array[:6].copy() for name, array in whole.items()}
    return train | {f"{name}_test": array[6:].copy() for name, array in whole.items()}


def pairs(arrays: Arrays) -> tuple[tuple, tuple, tuple]:
    """(features, labels) to train on and to test on, and the groups of both."""
    ordered = [("x", "y"), ("x_test", "y_test"), ("groups", "groups_test")]
    train, test, groups = ((arrays[one], arrays[other]) for one, other in ordered)
    return train, test, groups


def in_order(arrays: Arrays) -> Any:
    return tuple(array for pair in pairs(arrays) for array in pair)


def saved(folder: Path, arrays: Arrays, groups: bool = True) -> Path:
    train, test, grouping = pairs(arrays)
    save_idx(folder, train=train, test=test, groups=grouping if groups else None)
    return folder


def packed(folder: Path) -> Path:
    """The folder with each file gzipped in place of the raw one."""
    for path in list(folder.iterdir()):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    return folder


def idx_bytes(array: np.ndarray, number: int) -> bytes:
    header = struct.pack(f">{1 + array.ndim}I", (number << 8) + array.ndim, *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


# IDX files.
IMAGES, TEST_IMAGES = "train-images-idx3-float", "t10k-images-idx3-float"
LABELS, TEST_LABELS = "train-labels-idx1-ubyte", "t10k-labels-idx1-ubyte"
GROUPS = "train-groups-idx1-int"
BILLIONS = struct.pack(">4I", 0x0D03, 2**32 - 1, 28, 28)
MIB = bytes(2**20)


def files(*changes: Callable[[Path], object], zipped: bool = False) -> Make:
    """Reading a folder of float images in IDX files of which some were changed."""

    def make(folder: Path) -> Call:
        saved(folder, made((4, 3)))
        for change in changes:
            change(folder)
        if zipped:
            packed(folder)
        return lambda: load(folder, IDX)

    return make


NUMBERS = {8: "u1", 11: "i2", 12: "i4", 13: "f4", 14: "f8"}


def put(name: str, values: Any, number: int) -> Callable[[Path], object]:
    """A file of these values in one of the types of IDX."""
    array = np.asarray(values, NUMBERS[number])
    return lambda folder: (folder / name).write_bytes(idx_bytes(array, number))


def gone(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def content(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def with_value(shape: tuple[int, ...], value: float, *places: tuple[int, ...]) -> np.ndarray:
    array = np.zeros(shape, np.float32)
    for place in places:
        array[place] = value
    return array


NAN, INF = float("nan"), float("inf")
FROM_IDX: dict[str, tuple[Make, list[str]]] = {
    "colour beside grey": (
        files(gone(TEST_IMAGES), put("t10k-images-idx4-float", np.ones((4, 4, 3, 3)), 13)),
        ["shape 4 x 3 x 3", "shape", "of 4 x 3:"],
    ),
    "bytes beside floats": (
        files(gone(TEST_IMAGES), put("t10k-images-idx3-ubyte", np.ones((4, 4, 3)), 8)),
        ["type uint8", "of float32"],
    ),
    "not a number": (
        files(put(IMAGES, with_value((6, 4, 3), NAN, (3, 0, 1)), 13)),
        [IMAGES, "row 3 holds nan", "1 of 6 rows"],
    ),
    "infinite": (
        files(put(TEST_IMAGES, with_value((4, 4, 3), -INF, (1, 0, 1), (1, 2, 2), (3, 0, 0)), 13)),
        [TEST_IMAGES, "row 1 holds -inf", "2 of 4 rows"],
    ),
    "negative labels": (
        files(
            gone(LABELS),
            put("train-labels-idx1-short", [0, 1, -1, 0, 1, 1], 11),
        ),
        ["train-labels-idx1-short row 2 has the label -1", "counted from 0"],
    ),
    "a label beyond all": (
        files(gone(LABELS), put("train-labels-idx1-int", [0, 2**31 - 1] * 3, 12)),
        ["row 1 has the label 2147483647", "at most 2147483646"],
    ),
    "a foreign label": (
        files(gone(TEST_LABELS), put("t10k-labels-idx1-int", [0, 1, 3, 1], 12)),
        ["row 2 has the label 3", "3 classes"],
    ),
    "groups of one part": (
        files(gone("t10k-groups-idx1-int")),
        ["groups of the train rows, but not of the test rows"],
    ),
    "groups of the other part": (
        files(gone(GROUPS)),
        ["groups of the test rows, but not of the train rows"],
    ),
    "groups that were cut": (
        files(content(GROUPS, lambda b: b[:-4])),
        ["holds 28 bytes", "32 bytes"],
    ),
    "other groups": (
        files(put(GROUPS, np.arange(5), 12)),
        ["6 images", f"{GROUPS} holds 5 groups"],
    ),
    "groups twice": (
        files(put("train-writers-idx1-short", np.arange(6), 11)),
        ["2 files", "train-writers-idx1-short", GROUPS],
    ),
    "images twice": (
        files(put("train-images-idx2-float", np.ones((6, 3)), 13)),
        ["2 files", "train-images-idx2-float", IMAGES],
    ),
    "bytes that are named floats": (
        files(put(IMAGES, np.ones((6, 4, 3)), 8)),
        [IMAGES, "0x00000803", "0x00000d03"],
    ),
    "floats that were cut": (files(content(IMAGES, lambda b: b[:-1])), ["303 bytes", "304 bytes"]),
    "floats and more": (files(content(IMAGES, lambda b: b + b"1234")), ["308 bytes", "304 bytes"]),
    "packed floats that were cut": (
        files(content(IMAGES, lambda b: b[:-4]), zipped=True),
        ["300 bytes", "304 bytes"],
    ),
    "no features": (
        files(gone(IMAGES), put("train-images-idx2-float", np.ones((6, 0)), 13)),
        ["empty", "6 x 0"],
    ),
    "a type that is not read": (
        files(gone(IMAGES), put("train-images-idx3-double", np.ones((6, 4, 3)), 14)),
        ["lacks train-images-idx3-ubyte", "train-images-idx3-double"],
    ),
    "images without a dimension": (
        files(gone(IMAGES), put("train-images-idx1-ubyte", np.ones(6), 8)),
        ["lacks train-images-idx3-ubyte", "train-images-idx1-ubyte"],
    ),
    "a folder for groups": (
        files(gone(GROUPS), lambda folder: (folder / GROUPS).mkdir()),
        [GROUPS, "not a file"],
    ),
    "floats by the billion": (
        files(content(IMAGES, lambda b: BILLIONS + bytes(1000))),
        ["1016 bytes", "4294967295 x 28 x 28"],
    ),
    "packed floats by the billion": (
        files(content(IMAGES, lambda b: BILLIONS + bytes(1000)), zipped=True),
        ["1016 bytes", "4294967295 x 28 x 28"],
    ),
    "a bomb of floats": (
        files(content(IMAGES, lambda b: b + 64 * MIB), zipped=True),
        ["more", "304 bytes"],
    ),
}


# .npz files.
def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, array)
    return file.getvalue()


def npy_of(header: str, body: bytes = b"", version: int = 1, size: int | None = None) -> bytes:
    """An .npy whose header is any text, and which says any length of it."""
    length = len(header) if size is None else size
    return (
        b"\x93NUMPY"
        + bytes([version, 0])
        + struct.pack("<H" if version == 1 else "<I", length)
        + header.encode()
        + body
    )


def says(shape: str, dtype: str = "<f4") -> str:
    return f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': {shape}}}"


def archived(members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        for name, inside in members.items():
            archive.writestr(f"{name}.npy", inside)
    return file.getvalue()


def sound_members() -> dict[str, bytes]:
    return {name: npy(array) for name, array in made().items()}


def npz(whole: Callable[[], bytes]) -> Make:
    """Reading an .npz of these bytes."""

    def make(folder: Path) -> Call:
        (folder / "set.npz").write_bytes(whole())
        return lambda: load(folder, ARRAYS)

    return make


def member(inside: Callable[[], bytes], method: int = zipfile.ZIP_STORED) -> Make:
    """Reading an .npz whose x is other bytes."""
    return npz(lambda: archived(sound_members() | {"x": inside()}, method))


def entry(field: int, new: bytes) -> Make:
    """Reading an .npz with a field of the first entry of its list of members written over."""

    def whole() -> bytes:
        sound = archived(sound_members())
        place = sound.index(b"PK\x01\x02") + field
        return sound[:place] + new + sound[place + len(new) :]

    return npz(whole)


def two_of_a_name() -> bytes:
    members = sound_members()
    return archived(members | {"q": members["x"]}).replace(b"q.npy", b"x.npy")


def a_long_list() -> bytes:
    one = struct.pack("<4s4B4H3L5H2L", b"PK\1\2", 20, 0, 20, 0, *(0,) * 14)
    entries = one * 40_000
    return entries + struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, 40_000, 40_000, len(entries), 0, 0)


def changed_npz(change: Change, dtype: Any = np.float32) -> Make:
    """Reading an .npz of arrays that were changed first."""

    def make(folder: Path) -> Call:
        arrays = made(dtype=dtype)
        change(arrays)
        np.savez(folder / "set.npz", allow_pickle=True, **arrays)
        return lambda: load(folder, ARRAYS)

    return make


def setting(name: str, value: Any) -> Change:
    """Another array in the place of one."""
    return lambda arrays: arrays.update({name: value})


def value(name: str, place: Any, number: Any) -> Change:
    """Another number in one place of an array."""
    return lambda arrays: arrays[name].__setitem__(place, number)


def without(*names: str) -> Change:
    return lambda arrays: [arrays.pop(name) for name in names]


def two_archives(folder: Path) -> Call:
    for name in ("one.npz", "two.npz"):
        (folder / name).write_bytes(archived(sound_members()))
    return lambda: load(folder, ARRAYS)


def archive_folder(folder: Path) -> Call:
    (folder / "set.npz").mkdir()
    return lambda: load(folder, ARRAYS)


FROM_NPZ: dict[str, tuple[Make, list[str]]] = {
    "none": (lambda folder: lambda: load(folder, ARRAYS), ["0 .npz files", "nothing"]),
    "two": (two_archives, ["2 .npz files", "one.npz, two.npz", "--data.dir"]),
    "no folder": (lambda folder: lambda: load(folder / "no", ARRAYS), ["cannot be read"]),
    "a folder for the file": (archive_folder, ["set.npz", "not a file"]),
    "nothing in it": (npz(lambda: b""), ["set.npz is not a sound .npz file"]),
    "no zip": (npz(lambda: b"x,y\n1,2\n" * 99), ["not a sound .npz", "not a zip file"]),
    "cut": (npz(lambda: archived(sound_members())[:-30]), ["set.npz is not a sound .npz file"]),
    "cut in front": (npz(lambda: archived(sound_members())[30:]), ["not a sound .npz file"]),
    "a bit flipped": (
        npz(lambda: archived(sound_members()).replace(b"\xff\xff\xff\xff", b"\xff\xff\xff\xfe")),
        ["not a sound .npz file", "CRC"],
    ),
    "a name missing": (changed_npz(without("y_test")), ["lacks y_test", "it holds x, y"]),
    "the names of Keras": (
        npz(lambda: archived({"x_train": npy(np.ones(3)), "y_train": npy(np.ones(3))})),
        ["lacks x, y, x_test, y_test", "it holds x_train, y_train"],
    ),
    "names that rule a terminal": (
        npz(lambda: archived({"\x1b[2J\n\nx": b""})),
        ["lacks x, y", "it holds ?[2J x."],
    ),
    "no member": (npz(lambda: archived({})), ["lacks x, y", "nothing"]),
    "two of a name": (npz(two_of_a_name), ["two arrays of one name"]),
    "Python objects": (
        changed_npz(setting("x", np.array([{}] * 6))),
        ["x in", "Python objects", "run code"],
    ),
    "objects in a field": (
        member(lambda: npy_of(says("(1,)", "|O"), b"cos\nsystem\n(S'true'\ntR.")),
        ["x in", "Python objects"],
    ),
    "words": (changed_npz(setting("y", np.array(["a"] * 6))), ["y in", "<U1 of 6"]),
    "records": (changed_npz(setting("x", np.zeros((6, 3), "i4,f4"))), ["x in", "|V8 of 6 x 3"]),
    "complex numbers": (changed_npz(setting("x", np.zeros((6, 3), "c8"))), ["x in", "<c8"]),
    "long doubles": (changed_npz(setting("x", np.zeros((6, 3), np.longdouble))), ["x in", "<f16"]),
    "dates": (changed_npz(setting("y", np.zeros(6, "M8[s]"))), ["y in", "<M8[s]"]),
    "no .npy": (member(lambda: b"1 2 3\n" * 9), ["x in", "not a sound .npy", "magic"]),
    "an empty .npy": (member(lambda: b""), ["x in", "not a sound .npy"]),
    "a later .npy": (member(lambda: npy_of("", version=9)), ["x in", "version (9, 0)"]),
    "a header that is code": (
        member(lambda: npy_of("__import__('os').abort()")),
        ["x in", "not a sound .npy"],
    ),
    "a header that is deep": (
        member(lambda: npy_of("(" * 9000)),
        ["x in", "not a sound .npy"],
    ),
    "a header without end": (
        member(lambda: npy_of(" " * 2**20, version=2, size=2**31), zipfile.ZIP_DEFLATED),
        ["x in", "not a sound .npy", "2147483648"],
    ),
    "a size below nothing": (
        member(lambda: npy_of(says("(-6, -3)"), bytes(72))),
        ["x in", "-6 x -3"],
    ),
    "a header of billions": (
        member(lambda: npy_of(says(f"({2**40}, {2**40})"), bytes(72))),
        ["x in", f"{2**40} x {2**40}", "promises"],
    ),
    "packed billions": (
        member(lambda: npy_of(says(f"({2**33}, 3)"), 16 * MIB), zipfile.ZIP_DEFLATED),
        ["x in", f"{2**33} x 3", "promises"],
    ),
    "less than promised": (
        member(lambda: npy_of(says("(6, 3)"), bytes(71))),
        ["promises", "6 x 3"],
    ),
    "more than promised": (member(lambda: npy_of(says("(6, 3)"), bytes(73))), ["holds more"]),
    "a bomb": (
        member(lambda: npy_of(says("(6, 3)"), 64 * MIB), zipfile.ZIP_DEFLATED),
        ["x in", "holds more", "6 x 3"],
    ),
    "another packing": (
        member(lambda: npy_of(says(f"({2**24},)"), 64 * MIB), zipfile.ZIP_BZIP2),
        ["x in", "packed as np.savez_compressed never does"],
    ),
    "locked": (entry(8, b"\1\0"), ["packed as np.savez_compressed never does"]),
    "arrays over one another": (entry(20, b"\xff\xff\xff\x7f"), ["lie over one another"]),
    "a size that lies": (entry(24, b"\x90\0\0\0"), ["not a sound .npz file", "CRC"]),
    "a place that lies": (entry(42, b"\xff\xff\xff\x7f"), ["not a sound .npz file"]),
    "a long list of members": (npz(a_long_list), ["list of members", "1840000 bytes"]),
    "too large for float32": (
        changed_npz(value("x", (2, 1), -1e300), np.float64),
        ["x in", "row 2 holds -1e+300", "infinite in float32"],
    ),
    "no number": (
        changed_npz(value("x_test", (1, 2), NAN), np.float16),
        ["x_test in", "row 1 holds nan", "1 of 4 rows"],
    ),
    "wide integers": (
        changed_npz(setting("x", np.ones((6, 3), np.int64))),
        ["x in", "int64 of 6 x 3", "uint8"],
    ),
    "true and false": (changed_npz(setting("x", np.ones((6, 3), bool))), ["x in", "bool of 6 x 3"]),
    "labels that are floats": (changed_npz(setting("y", np.ones(6))), ["y in", "float64 of 6"]),
    "labels in rows": (
        changed_npz(setting("y", np.eye(6, dtype=int))),
        ["y in", "int64 of 6 x 6", "one dimension"],
    ),
    "groups of one part": (
        changed_npz(without("groups_test")),
        ["groups of the train rows, but none of the test rows"],
    ),
    "a group beyond 64 bits": (
        changed_npz(setting("groups", np.array([0, 1, 2**63, 3, 4, 5], np.uint64))),
        ["groups in", f"row 2 is {2**63}", "2 ** 63"],
    ),
    "one dimension": (changed_npz(setting("x", np.ones(6))), ["x in", "float64 of 6", "dimension"]),
    "no dimension": (changed_npz(setting("x", np.float32(1))), ["x in", "no dimension"]),
    "no rows": (changed_npz(setting("x", np.ones((0, 3)))), ["x in"]),
}


# Arrays in Python.
def memory(change: Change, dtype: Any = np.float32) -> Make:
    def make(folder: Path) -> Call:
        arrays = made(dtype=dtype)
        change(arrays)
        return lambda: load(folder, IDX, in_order(arrays))

    return make


def passed(value: Callable[[], Any]) -> Make:
    return lambda folder: lambda: load(folder, IDX, value())


MASKED = np.ma.masked_array(np.ones((6, 3), np.float32), mask=np.eye(6, 3, dtype=bool))
FROM_ARRAYS: dict[str, tuple[Make, list[str]]] = {
    "three": (passed(lambda: in_order(made())[:3]), ["a tuple of 3", "(x, y, x_test, y_test)"]),
    "five": (passed(lambda: in_order(made())[:5]), ["a tuple of 5", "groups_test after"]),
    "seven": (passed(lambda: (*in_order(made()), 1)), ["a tuple of 7"]),
    "pairs": (passed(lambda: pairs(made())[:2]), ["a tuple of 2"]),
    "a list": (memory(setting("x", [[1.0, 2.0, 3.0]] * 6)), ["x is a list", "NumPy array"]),
    "no labels": (memory(setting("y", None)), ["y is None", "integers"]),
    "an array of JAX": (memory(setting("x", jnp.ones((6, 3)))), ["x is an ArrayImpl", "NumPy"]),
    "a mask": (memory(setting("x", MASKED)), ["x is a masked array of float32"]),
    "objects": (memory(setting("x", np.array([[None]] * 6))), ["x is object of 6 x 1"]),
    "a label below 0": (memory(value("y", 4, -7)), ["y row 4 has the label -7", "from 0"]),
    "a test label below 0": (memory(value("y_test", 0, -1)), ["y_test row 0 has the label -1"]),
    "one class": (memory(setting("y", np.zeros(6, int))), ["y holds only the label 0"]),
    "a label unseen": (memory(value("y_test", 1, 5)), ["y_test row 1", "label 5", "3 classes"]),
    "a label of 64 bits": (
        memory(setting("y", np.array([0, 1, 2**63, 0, 1, 2], np.uint64))),
        ["y row 2 has the label 9223372036854775808", "at most 2147483646"],
    ),
    "labels that are floats": (memory(setting("y", np.ones(6))), ["y is float64 of 6"]),
    "fewer labels": (memory(setting("y", np.arange(5))), ["x holds 6 rows", "y holds 5 labels"]),
    "fewer test rows": (
        memory(setting("x_test", np.ones((3, 3), np.float32))),
        ["x_test holds 3 rows", "y_test holds 4 labels"],
    ),
    "other features": (
        memory(setting("x_test", np.ones((4, 2), np.float32))),
        ["x_test holds rows of shape 2", "x of 3"],
    ),
    "other types": (
        memory(setting("x_test", np.ones((4, 3), np.uint8))),
        ["x_test holds rows of type uint8", "x of float32"],
    ),
    "no number": (memory(value("x", (5, 0), NAN)), ["x row 5 holds nan", "1 of 6 rows"]),
    "infinity in float64": (memory(value("x", (0, 0), INF), "f8"), ["x row 0 holds inf"]),
    "groups of one part": (memory(setting("groups", None)), ["groups of the test rows, but none"]),
    "groups that are floats": (memory(setting("groups", np.ones(6))), ["groups is float64 of 6"]),
    "fewer groups": (memory(setting("groups", np.arange(5))), ["groups holds 5 groups"]),
    "no row": (memory(setting("x", np.ones((0, 3), np.float32))), ["x is empty", "0 x 3"]),
}


# What a user's `read` returns.
def returned(value: Callable[[], Any]) -> Make:
    def make(folder: Path) -> Call:
        GIVEN["bad"] = value
        return lambda: load(folder, GivenConfig(validation=2, case="bad"))

    return make


def rows(end: str = "", **fields: Any) -> Rows:
    arrays = made()
    values: dict[str, Any] = {"features": arrays[f"x{end}"], "labels": arrays[f"y{end}"]}
    return Rows(**values | fields)


def raising(error: Exception) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


WHERE = "bad_data.py:"
FROM_READ: dict[str, tuple[Make, list[str]]] = {
    "nothing": (
        returned(lambda: None),
        [WHERE, "read of data given", "are None", "be a pair"],
    ),
    "a list": (returned(lambda: [rows(), rows("_test")]), [WHERE, "are a list", "must be a pair"]),
    "one part": (returned(rows), [WHERE, "are a Rows", "must be a pair"]),
    "three parts": (returned(lambda: (rows(),) * 3), [WHERE, "a tuple of 3"]),
    "arrays": (
        returned(lambda: pairs(made())[:2]),
        [WHERE, "the training rows are a tuple of 2", "Rows(features, labels)"],
    ),
    "a test part that is none": (
        returned(lambda: (rows(), None)),
        [WHERE, "the test rows are None"],
    ),
    "features in a list": (
        returned(lambda: (rows(features=[[1.0]] * 6), rows("_test"))),
        [WHERE, "train features is a list", "uint8", "float32"],
    ),
    "float64": (
        returned(lambda: (rows(), rows("_test", features=np.ones((4, 3))))),
        [WHERE, "test features is float64 of 4 x 3", "float32"],
    ),
    "another order of bytes": (
        returned(lambda: (rows(features=np.ones((6, 3), ">f4")), rows("_test"))),
        [WHERE, "train features is >f4 of 6 x 3"],
    ),
    "an array of JAX": (
        returned(lambda: (rows(features=jnp.ones((6, 3))), rows("_test"))),
        [WHERE, "train features is an ArrayImpl"],
    ),
    "labels that are true or false": (
        returned(lambda: (rows(labels=np.ones(6, bool)), rows("_test"))),
        [WHERE, "train labels is bool of 6", "integers"],
    ),
    "no labels": (
        returned(lambda: (rows(labels=None), rows("_test"))),
        [WHERE, "train labels is None", "integers"],
    ),
    "groups in a list": (
        returned(lambda: (rows(groups=[1] * 6), rows("_test"))),
        [WHERE, "train groups is a list"],
    ),
    "names that are none": (
        returned(lambda: (rows(names=None, labels=np.arange(5)), rows("_test"))),
        [WHERE, "train labels holds 5 labels"],
    ),
    "not finite": (
        returned(lambda: (rows(), rows("_test", features=np.full((4, 3), np.float32(NAN))))),
        [WHERE, "test features row 0 holds nan", "4 of 4 rows"],
    ),
    "an error of its own": (
        returned(raising(KeyError("pixels"))),
        [WHERE, "in raise_it: KeyError", "pixels"],
    ),
    "an error in words": (
        returned(raising(DataError("the server has no such set: name another"))),
        ["the server has no such set: name another"],
    ),
}


# What `save_idx` is given.
def saving(change: Change = dict, before: Callable[[Path], object] = str, **given: Any) -> Make:
    def make(folder: Path) -> Call:
        arrays = made()
        change(arrays)
        before(folder)
        train, test, groups = pairs(arrays)
        chosen = {"train": train, "test": test, "groups": groups} | given
        return lambda: save_idx(folder / "new", **chosen)

    return make


def there(name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> None:
        (folder / "new").mkdir()
        (folder / "new" / name).touch()

    return make


FROM_SAVE: dict[str, tuple[Make, list[str]]] = {
    "no pair": (saving(train=made()["x"]), ["train is float32 of 6 x 3", "(features, labels)"]),
    "nothing to train on": (saving(train=None), ["train is None", "(features, labels)"]),
    "no pair, nor groups": (saving(test=None, groups=None), ["test is None"]),
    "three": (saving(test=in_order(made())[:3]), ["test is a tuple of 3"]),
    "groups of one part": (saving(groups=(np.arange(6),)), ["groups is a tuple of 1"]),
    "no test groups": (
        saving(setting("groups_test", None)),
        ["groups of the train rows, but none"],
    ),
    "a list": (saving(setting("x", [[1.0]] * 6)), ["x is a list"]),
    "wide integers": (saving(setting("x", np.ones((6, 3), int))), ["x is int64 of 6 x 3"]),
    "no number": (saving(value("x", (1, 1), NAN)), ["x row 1 holds nan"]),
    "an unseen label": (saving(value("y_test", 3, 9)), ["y_test row 3 has the label 9"]),
    "labels apart": (saving(setting("y", np.arange(7))), ["6 rows", "7 labels"]),
    "groups beyond 32 bits": (
        saving(value("groups_test", 2, 2**31)),
        ["groups of t10k", "2147483648 in row 2", "32 bits"],
    ),
    "too many dimensions": (
        saving(
            lambda arrays: arrays.update(
                {name: arrays[name].reshape(-1, 3, *(1,) * 8) for name in ("x", "x_test")}
            )
        ),
        ["3 x 1 x 1", "at most 8"],
    ),
    "data there": (saving(before=there(LABELS)), [LABELS, "already", "another folder"]),
    "other data there": (
        saving(before=there("emnist-test-images-idx3-ubyte.gz")),
        ["emnist-test-images-idx3-ubyte.gz", "already"],
    ),
    "a list of checksums there": (saving(before=there("SHA256SUMS")), ["SHA256SUMS", "already"]),
    "a file for the folder": (
        saving(before=lambda folder: (folder / "new").touch()),
        ["new cannot be written"],
    ),
}
