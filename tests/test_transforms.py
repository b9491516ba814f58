"""Times are of work that is done, warmed and taken in turn; what the script shows is right."""

import contextlib
import dataclasses
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from benchmarks import derivatives, timing, timing_figures
from benchmarks.timing import Measured, compile_cache_in, in_turn, readable
from matplotlib.figure import Figure

from mlp_research.data.inputs import scaled
from mlp_research.models import MLPConfig
from scripts import transforms
from tests import processes

STEPS, BATCH, PIXELS, CLASSES = 4, 16, 12, 3
CALL = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(processes.ROOT / "scripts")!r})
from benchmarks import results_page
from scripts import transforms
results_page.DOCUMENT = Path("results.md")
transforms.main(sys.argv[1:])
"""


@dataclasses.dataclass(frozen=True)
class Ran:
    """What the script left."""

    printed: str
    document: str
    folder: Path


@pytest.fixture(scope="module")
def ran(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Ran:
    # In a process of its own: it makes JAX forget all that was compiled.
    folder = tmp_path_factory.mktemp("transforms")
    words = ("--repeats", 1, "--steps", STEPS, "--batch-size", BATCH, "--data.dir", data_dir)
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", CALL, *map(str, words), "--record"],
        cwd=folder,
        env=processes.environment() | {"PYTHONPATH": str(processes.ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stderr
    return Ran(ended.stdout, (folder / "results.md").read_text(), folder)


@pytest.fixture(scope="module")
def setting(data_dir: Path) -> transforms.Setting:
    flags = transforms.Flags(steps=STEPS, batch_size=BATCH, data_dir=data_dir)
    return transforms.Setting.of(flags)


@pytest.fixture
def results_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The results of all candidates, in place of their times."""
    found: dict[str, Any] = {}

    def call_once(candidates: dict[str, Callable[[], Any]], repeats: int) -> timing.Times:
        found.update({name: call() for name, call in candidates.items()})
        return {name: [1.0] for name in candidates}

    for module in (transforms, derivatives):
        monkeypatch.setattr(module, "in_turn", call_once)
    return found


def test_every_measurement_is_shown_recorded_and_drawn(ran: Ran):
    names = {
        f"{STEPS} training steps": ("jit", "no jit"),
        "first training step": ("trace", "lower", "compile", "run", "all, no jit"),
        "compile a training step": ("no cache", "empty cache", "from the cache"),
        f"logits of {BATCH} images": ("jit of vmap", "vmap, no jit", "loop over jit"),
        "one training step": ("1 a call", f"{STEPS} a call"),
        "tanh and its derivatives, one call": ("the function", "derivative 4"),
        f"Jacobian, {CLASSES} logits by {PIXELS} pixels": ("jacrev", "jacfwd"),
        f"Hessian, {CLASSES} x {PIXELS} x {PIXELS}": ("ReLU", "tanh", "tanh, times a vector"),
    }
    time = r"[\d.,]+ (us|ms|s)"
    for title, candidates in names.items():
        for name in candidates:
            shown = rf"^{title} +{name} +1 +{time} +{time} +{time} +\S+$"
            assert re.search(shown, ran.printed, re.M), (title, name)
            assert f"| {title} | {name} | 1 | " in ran.document
    assert (ran.folder / "transforms.png").read_bytes().startswith(b"\x89PNG")
    assert "](transforms.png)" in ran.document
    command = "`python scripts/transforms.py --repeats 1 --steps 4 --batch-size 16"
    assert command in ran.document


def test_each_measurement_has_its_sentence(ran: Ran):
    for words in (
        r"jit (has paid after \d+ calls|never pays)",
        r"The first call with jit spends \d+ % of its overhead on tracing",
        r"From a compile cache the step is there in .* in place of",
        r"vmap does the work of a loop over 16 images",
        r"A step takes .* with one a call and .* with 4 a call",
        r"agrees with the closed form to \d\.\de-0[678]",
        r"The Jacobian of 3 logits by 12 pixels",
        r"The largest entry of the logits' Hessian is 0 with ReLU, .* and 0\.\d+ with tanh",
    ):
        assert re.search(words, ran.printed), words
        assert re.search(words, ran.document), words


def test_the_derivatives_are_those_of_tanh(ran: Ran):
    """By the polynomials in t = tanh x that a derivative takes from P to P' (1 - t^2)."""
    polynomial, slope = np.polynomial.Polynomial([0, 1]), np.polynomial.Polynomial([1, 0, -1])
    for name in ("the function", *(f"derivative {order}" for order in (1, 2, 3, 4))):
        row = re.search(rf"^{name} +(\S+) +(\S+) +(\S+) +(\d+)$", ran.printed, re.M)
        assert row is not None
        expected = polynomial(np.tanh(0.5))
        assert float(row[2]) == pytest.approx(expected, abs=1e-7)
        assert float(row[1]) == pytest.approx(expected, rel=1e-6)
        assert float(row[3]) < 1e-6
        polynomial = polynomial.deriv() * slope


@pytest.mark.parametrize(
    ("cost", "without", "with_it", "calls"),
    [(2.0, 0.5, 0.25, 8), (2.1, 0.5, 0.25, 9), (1e-9, 1.0, 0.5, 1), (1.0, 0.5, 0.5, None)],
)
def test_jit_has_paid_at_the_first_call_whose_savings_hold_its_cost(
    cost: float, without: float, with_it: float, calls: int | None
):
    assert timing.calls_until_paid(cost, without, with_it) == calls
    assert timing.calls_until_paid(cost, with_it, without) is None
    if calls is not None:
        assert cost + calls * with_it <= calls * without
        assert cost + (calls - 1) * with_it > (calls - 1) * without


@pytest.mark.long
def test_jit_and_no_jit_train_alike_to_rounding(
    setting: transforms.Setting, results_of: dict[str, Any]
):
    transforms.many_steps(setting, 1)
    compiled, plain = results_of["jit"], results_of["no jit"]
    assert int(compiled.step) == int(plain.step) == STEPS
    leaves = (jax.tree.leaves(eqx.filter(state.model, eqx.is_array)) for state in (compiled, plain))
    for one, other in zip(*leaves, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


def test_every_way_to_map_gives_the_same_logits(
    setting: transforms.Setting, results_of: dict[str, Any]
):
    transforms.mapped(setting, 1)
    assert len(results_of) == 4
    for logits in results_of.values():
        expected = results_of["jit of vmap"]
        assert expected.shape == (BATCH, CLASSES)
        np.testing.assert_allclose(np.stack(list(logits)), expected, rtol=1e-5, atol=1e-6)


def test_every_number_of_steps_a_call_takes_all_steps(
    setting: transforms.Setting, results_of: dict[str, Any]
):
    measured = transforms.chunked(setting, 1)
    assert {name: int(step) for name, step in results_of.items()} == {
        "1 a call": STEPS,
        f"{STEPS} a call": STEPS,
    }
    assert measured.times["1 a call"] == [1 / STEPS]


def test_a_chunk_holds_its_batches_and_counts_only_them(setting: transforms.Setting):
    chunk = transforms.full_chunk(setting.batches[1:3], 5)
    assert int(chunk.count) == 2
    assert chunk.steps.images.shape == (5, BATCH, PIXELS)
    for place, batch in enumerate(setting.batches[1:3]):
        np.testing.assert_array_equal(chunk.steps.images[place], batch.images)


def test_both_jacobians_are_the_difference_quotients(
    setting: transforms.Setting, results_of: dict[str, Any]
):
    model = MLPConfig(activation="tanh").build((4, 3), CLASSES, key=jr.key(3))  # has no kinks
    image = scaled(setting.batches[0].images[0])
    derivatives.jacobian(model, image, 1)
    step = 1e-2
    shifts = step * jnp.eye(PIXELS)
    quotients = [(model(image + shift) - model(image - shift)) / (2 * step) for shift in shifts]
    for name in ("jacrev", "jacfwd"):
        np.testing.assert_allclose(results_of[name], np.stack(quotients, 1), atol=1e-3)
    np.testing.assert_allclose(results_of["grad of one logit"], results_of["jacrev"][0], rtol=1e-5)


def test_a_hessians_product_is_the_closed_form():
    """Of W tanh(V x + b) + c: sum over hidden units of W (-2 t (1 - t^2)) (V u) V."""
    config = MLPConfig(widths=(5,), activation="tanh")
    model = config.build((4, 3), CLASSES, key=jr.key(3))
    image, direction = jr.uniform(jr.key(4), (PIXELS,)), jr.normal(jr.key(5), (PIXELS,))
    hidden, last = model.layers
    t = jnp.tanh(hidden(image))
    weights = -2 * t * (1 - t**2) * (hidden.weight @ direction)
    expected = (last.weight * weights[None]) @ hidden.weight
    found = derivatives.hessian_product(model, image, direction)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


class Late:
    """A result that is there only when it was waited for."""

    def __init__(self, clock: list[float], seconds: float):
        self.clock, self.seconds = clock, seconds

    def block_until_ready(self) -> "Late":
        self.clock[0] += self.seconds
        return self


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The only clock that the timing sees; it stands unless a call moves it."""
    now = [100.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_a_time_includes_the_wait_for_every_result(clock: list[float]):
    times = in_turn({"late": lambda: {"one": Late(clock, 2.0), "two": [Late(clock, 3.0)]}}, 2)
    assert times == {"late": [5.0, 5.0]}


def test_candidates_take_turns_and_the_first_round_is_not_counted(clock: list[float]):
    order: list[str] = []

    def candidate(name: str) -> Callable[[], Late]:
        def call() -> Late:
            order.append(name)
            return Late(clock, 50.0 if order.count(name) == 1 else len(order))

        return call

    times = in_turn({name: candidate(name) for name in ("a", "b")}, 3)
    assert "".join(order) == "ba" + "ab" + "ba" + "ab"
    assert times == {"a": [3.0, 6.0, 7.0], "b": [4.0, 5.0, 8.0]}


def test_a_row_holds_median_extremes_and_ratio_of_medians():
    measured = Measured("task", {"slow": [4.0, 2.0, 9.0], "fast": [0.5, 3.0, 1.0]}, "fast", "")
    assert measured.rows() == [
        ("task", "slow", "3", "4.00 s", "2.00 s", "9.00 s", "4"),
        ("task", "fast", "3", "1.00 s", "500 ms", "3.00 s", "1"),
    ]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (1.234e-5, "12.3 us"),
        (9.999e-4, "1.00 ms"),
        (0.01234, "12.3 ms"),
        (0.99961, "1.00 s"),
        (99.96, "100 s"),
        (1234.5, "1,230 s"),
        (0.0, "0 us"),
    ],
)
def test_seconds_are_readable(seconds: float, text: str):
    assert readable(seconds) == text


def compile_anew() -> None:
    """The same program from a new function: compiled, or read from a cache."""
    jax.jit(lambda values: jnp.sin(values) * 3 + jnp.cos(values))(jnp.ones(7))


def test_compiled_programs_are_kept_only_where_they_shall_be(tmp_path: Path):
    def kept(folder: Path) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in folder.glob("*-cache")}

    outer, inner = tmp_path / "outer", tmp_path / "inner"
    before = jax.config.values["jax_compilation_cache_dir"]
    with compile_cache_in(outer):
        with compile_cache_in(None):
            compile_anew()
        assert not kept(outer)
        with compile_cache_in(inner):
            compile_anew()
            first = kept(inner)
            compile_anew()
            assert first and kept(inner) == first
        compile_anew()
        assert kept(outer)
    assert jax.config.values["jax_compilation_cache_dir"] == before


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Figure]]:
    """The figures that are drawn, kept to be looked at."""
    figures: list[Figure] = []
    plain = timing_figures.picture

    @contextlib.contextmanager
    def kept(path: Path, size: tuple[float, float]) -> Iterator[Figure]:
        with plain(path, size) as figure:
            figures.append(figure)
            yield figure

    monkeypatch.setattr(timing_figures, "picture", kept)
    yield figures


def test_a_picture_shows_medians_and_extremes(tmp_path: Path, drawn: list[Figure]):
    groups = {
        "near": {"one": [2.0, 1.0, 5.0], "two": [3.0, 3.0, 3.0]},
        "far": {"quick": [1e-4, 2e-4], "slow $": [10.0]},
    }
    timing_figures.medians(tmp_path / "times.png", groups, title="Times")
    near, far = drawn[0].axes
    assert (near.get_xscale(), far.get_xscale()) == ("linear", "log")
    assert near.get_xlim()[0] == 0 and near.get_xlim()[1] > 5
    for axes, expected in ((near, [2.0, 3.0]), (far, [1.5e-4, 10.0])):
        ends = [bar.get_x() + bar.get_width() for bar in axes.patches]  # type: ignore[attr-defined]
        np.testing.assert_allclose(ends, expected)
    lines: Any = near.collections[0]
    extremes = [segment[:, 0].tolist() for segment in lines.get_segments()]
    assert extremes == [[1.0, 5.0], [3.0, 3.0]]
    assert near.get_title(loc="left") == "near (n = 3)"
    assert far.get_title(loc="left") == "far (n = 1 and 2, logarithmic)"
    assert [text.get_text().strip() for text in far.texts] == ["150 us", "10.0 s"]
    first = (tmp_path / "times.png").read_bytes()
    timing_figures.medians(tmp_path / "times.png", groups, title="Times")
    assert (tmp_path / "times.png").read_bytes() == first
