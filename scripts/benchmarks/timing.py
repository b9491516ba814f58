"""Times that may be compared: warmed, blocked until the result is there, taken in turn."""

import contextlib
import dataclasses
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache
from jaxtyping import PyTree

Times = dict[str, list[float]]
"""Seconds of each measurement of each candidate, by its name."""
Make = Callable[[], tuple[Callable[[PyTree], PyTree], PyTree]]
HEADINGS = ("what", "how", "n", "median", "least", "largest", "ratio")
"""Of a table of times."""


@dataclasses.dataclass(frozen=True)
class Spread:
    """What is said of measurements that scatter, in their unit."""

    n: int
    median: float
    least: float
    largest: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        return cls(len(values), statistics.median(values), min(values), max(values))


def medians(times: Times) -> list[float]:
    """The median of each candidate, in their order."""
    return [statistics.median(seconds) for seconds in times.values()]


def in_turn(candidates: Mapping[str, Callable[[], Any]], repeats: int) -> Times:
    """Seconds of so many calls of each candidate, each until its result is there.

    A round calls every candidate once, every other round backwards, so that what else the machine
    does falls on all of them alike. The first round warms up and is not counted.
    """
    times: Times = {name: [] for name in candidates}
    for number in range(repeats + 1):
        names = list(candidates)
        for name in names if number % 2 else reversed(names):
            seconds = seconds_of(candidates[name])
            if number:
                times[name].append(seconds)
    return times


def seconds_of(call: Callable[[], Any]) -> float:
    """Seconds until every array of a call's result is there: JAX returns before it has computed."""
    began = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - began


def readable(seconds: float) -> str:
    """Three digits and the unit: 12.3 us, 4.56 ms, 7.89 s."""
    for size, unit in ((1, "s"), (1e-3, "ms")):
        if seconds >= 0.9995 * size:
            return f"{_digits(seconds / size)} {unit}"
    return f"{_digits(seconds / 1e-6)} us"


def _digits(value: float) -> str:
    rounded = float(f"{value:.3g}")
    if rounded >= 100 or rounded == 0:
        return f"{rounded:,.0f}"
    return f"{rounded:.1f}" if rounded >= 10 else f"{rounded:.2f}"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Candidates for one task that were timed, and what their medians say."""

    title: str
    times: Times
    base: str
    """The candidate whose median is 1 in the column of ratios."""
    says: str
    """A sentence for people, with the numbers."""

    def rows(self) -> list[tuple[str, ...]]:
        """A row under `HEADINGS` for each candidate."""
        base = Spread.of(self.times[self.base]).median
        rows = []
        for name, seconds in self.times.items():
            spread = Spread.of(seconds)
            shown = map(readable, (spread.median, spread.least, spread.largest))
            rows.append((self.title, name, str(spread.n), *shown, f"{spread.median / base:.3g}"))
        return rows


def calls_until_paid(cost: float, without: float, with_it: float) -> int | None:
    """The number of calls after which `cost` is won back; None where a call gains nothing."""
    return math.ceil(cost / (without - with_it)) if without > with_it else None


def first_calls(make: Make, repeats: int) -> Times:
    """A first call with jit in its parts, and one without; all that was compiled is forgotten.

    `make` gives a new function of one pytree of arrays, and the arrays. One more first call warms
    up what every compilation shares, and is not counted.
    """
    times: Times = {}
    with compile_cache_in(None):
        _first_call(*make())
        for _ in range(repeats):
            jax.clear_caches()
            parts = _first_call(*make())
            jax.clear_caches()
            function, arrays = make()
            eager = seconds_of(lambda function=function, arrays=arrays: function(arrays))
            for name, seconds in (parts | {"all, no jit": eager}).items():
                times.setdefault(name, []).append(seconds)
    return times


def _first_call(function: Callable[[PyTree], PyTree], arrays: PyTree) -> dict[str, float]:
    marks = [time.perf_counter()]
    traced = jax.jit(function).trace(arrays)
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    compiled = lowered.compile()
    marks.append(time.perf_counter())
    jax.block_until_ready(compiled(arrays))
    marks.append(time.perf_counter())
    names = ("trace", "lower", "compile", "run")
    return {name: end - begin for name, (begin, end) in zip(names, pairwise(marks), strict=True)}


def compile_times(make: Make, repeats: int) -> Times:
    """Compiling a function without a compile cache, into an empty one, and from it.

    `make` as of `first_calls`. The first round warms up and is not counted.
    """
    times: Times = {"no cache": [], "empty cache": [], "from the cache": []}
    for _ in range(repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            for name, place in zip(times, (None, Path(folder), Path(folder)), strict=True):
                with compile_cache_in(place):
                    jax.clear_caches()
                    function, arrays = make()
                    lowered = jax.jit(function).lower(arrays)
                    began = time.perf_counter()
                    lowered.compile()
                    times[name].append(time.perf_counter() - began)
    return {name: seconds[1:] for name, seconds in times.items()}


@contextlib.contextmanager
def compile_cache_in(folder: Path | None) -> Iterator[None]:
    """Compiled programs are kept in a folder, or nowhere; afterwards as before."""
    wanted = {
        "jax_compilation_cache_dir": None if folder is None else str(folder),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    before = {name: jax.config.values[name] for name in wanted}
    try:
        _configure(wanted)
        yield
    finally:
        _configure(before)


def _configure(values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()  # JAX asks only once whether there is a cache
