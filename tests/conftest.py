"""Eight CPU devices, no silent broadcasting between ranks, equal programs compiled once."""

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# JAX reads these when it is imported. The workers of a parallel session inherit them, and share
# its compile cache; so do the processes that tests start.
if "PYTEST_XDIST_WORKER" not in os.environ:
    _compile_cache = tempfile.TemporaryDirectory(prefix="mlp-research-tests-")
    os.environ |= {
        "JAX_NUM_CPU_DEVICES": "8",
        "JAX_NUMPY_RANK_PROMOTION": "raise",
        "JAX_COMPILATION_CACHE_DIR": _compile_cache.name,
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

import equinox as eqx
import jax

from mlp_research.config import FAMILIES
from mlp_research.fit import fit
from mlp_research.terminal.report import Report
from tests.made import small_config, small_execution, write_data

# A shell lets its background jobs ignore Ctrl-C, and they pass that on to what they start.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def memory_is_given_back() -> Iterator[None]:
    """A session compiles thousands of programs, and a worker would keep gigabytes of them."""
    yield
    eqx.clear_caches()
    jax.clear_caches()
    gc.collect()


@pytest.fixture
def only_the_packages_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave only the package's kinds of parts, and afterwards those that were there before."""
    for family in FAMILIES.values():
        own = {kind: c for kind, c in family.kinds.items() if c.__module__.startswith("mlp_")}
        monkeypatch.setattr(family, "kinds", own)


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small made data set; see `made.write_data`."""
    return write_data(tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="session")
def other_data_dir(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The made data set but for one pixel of its last training image."""
    other = Path(shutil.copytree(data_dir, tmp_path_factory.mktemp("other") / "other-data"))
    images = other / "train-images-idx3-ubyte"
    content = bytearray(images.read_bytes())
    content[-1] ^= 1
    images.write_bytes(content)
    return other


@pytest.fixture(scope="session")
def trained(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished small run, to be read or copied."""
    run_dir = tmp_path_factory.mktemp("trained") / "run"
    fit(small_config(), small_execution(data_dir), run_dir=run_dir, report=Report(quiet=True))
    return run_dir
