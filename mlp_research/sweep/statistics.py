"""What numbers from several seeds are worth: intervals, paired comparisons, shares of variance.

Accuracies and differences are fractions; sentences speak of points (hundredths). Intervals hold
95 %; None (JSON has no NaN) says that there is no such number. `items` are test examples.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
from jaxtyping import Float
from scipy import stats

LEVEL, ALPHA, POWER, MOST_SEEDS = 0.95, 0.05, 0.80, 10_000
Values = Sequence[float] | np.ndarray
Array = np.ndarray


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; `n` and `standard_deviation` are of the values."""

    estimate: float
    low: float | None
    high: float | None
    n: int
    standard_deviation: float | None
    level: float = LEVEL

    @property
    def points(self) -> tuple[float, float]:
        """Both ends, in points."""
        low, high = (math.nan if end is None else 100 * end for end in (self.low, self.high))
        return low, high


@dataclass(frozen=True)
class Summary:
    """One setting's row in a table; `low` and `high` are the interval of the mean."""

    n: int
    mean: float
    standard_deviation: float | None
    low: float | None
    high: float | None
    minimum: float
    maximum: float


@dataclass(frozen=True)
class ItemEvidence:
    """What the answers to each item add; `item_evidence` has the formulas.

    `difference` is for new seeds and new items; `of_mean` is what seeds, items and the rest cause
    in its variance. McNemar's p-values are of these very networks on new items, so they decide no
    claim; those per seed are what a study of one seed would have said.
    """

    difference: Interval
    seed_variance: float
    item_variance: float
    residual_variance: float
    of_mean: tuple[float, float, float]
    first_better: int
    other_better: int
    mcnemar: float
    mcnemar_per_seed: tuple[float, ...]


@dataclass(frozen=True)
class Comparison:
    """A setting minus the first one, paired by seed, for new seeds on these test items.

    `difference` and `p_value` are by the paired t test; Holm's `adjusted_p_value` over all
    `comparisons` decides. `seeds_needed` is for one comparison.
    """

    name: str
    difference: Interval
    bootstrap: Interval
    p_value: float
    adjusted_p_value: float
    comparisons: int
    seeds_needed: int | None
    items: ItemEvidence | None

    @property
    def claimed(self) -> bool:
        """Whether the seeds show a difference at 5 %, all comparisons together."""
        return self.adjusted_p_value <= ALPHA

    @property
    def sentence(self) -> str:
        """What may be said, in plain words."""
        n, (low, high) = self.difference.n, self.difference.points
        if not self.claimed:
            bound = f"{max(abs(low), abs(high)):.2f} points"
            return f"{self.name}: no difference above {bound} can be claimed from {n} seeds"
        better, mean = "better" if low + high > 0 else "worse", abs(low + high) / 2
        sentence = f"{self.name} is {better} by {mean:.2f} +- {(high - low) / 2:.2f} points"
        if self.items is not None:
            low, high = self.items.difference.points
            if low <= 0 <= high:
                sentence += f" on these test items (on new ones {low:+.2f} to {high:+.2f})"
        if self.seeds_needed is not None and self.seeds_needed <= n:
            return f"{sentence}; {self.seeds_needed} seeds would have shown it"
        return f"{sentence}; {self.seeds_needed or 'many more'} seeds would show it 4 times in 5"


def mean_interval(values: Values) -> Interval:
    """The mean +- t(n - 1) * standard deviation / sqrt(n); of one value the mean alone."""
    numbers = _checked(values, "values", least=1, accuracies=False)
    n, mean = len(numbers), float(np.mean(numbers))
    if n == 1:
        return Interval(mean, None, None, 1, None)
    spread = float(np.std(numbers, ddof=1))
    if np.ptp(numbers) == 0:  # a sum of equal numbers is rounded
        mean, spread = float(numbers[0]), 0.0
    half = float(stats.t.ppf((1 + LEVEL) / 2, n - 1)) * spread / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, spread)


def summary(values: Values) -> Summary:
    """Size, mean, spread (ddof 1), 95 % interval and extremes of one setting's values."""
    mean, ends = mean_interval(values), (float(np.min(values)), float(np.max(values)))
    return Summary(mean.n, mean.estimate, mean.standard_deviation, mean.low, mean.high, *ends)


def paired_comparison(
    first: Values,
    other: Values,
    *,
    name: str = "the other setting",
    first_predictions: Array | None = None,
    other_predictions: Array | None = None,
    labels: Array | None = None,
    bootstrap_seed: int = 0,
) -> Comparison:
    """What the difference of two settings is worth: accuracies of the same seeds in one order.

    Predicted classes [seeds, items] and labels [items]: all three or none. Where all differences
    are equal, t has no scale; the exact sign test, p = 2 / 2**n, stands in.
    """
    start, end = _checked(first, "first"), _checked(other, "other")
    if len(start) != len(end):
        raise ValueError(f"first has {len(start)} seeds, other {len(end)}: give both the same")
    # To one item of ten million: rounding must not pass for spread where counts differ equally.
    differences = np.round(end - start, 7)
    difference = bootstrap = mean_interval(differences)
    n, mean, spread = len(start), difference.estimate, difference.standard_deviation or 0.0
    p_value = 2.0 ** (1 - n) if mean else 1.0
    if spread > 0:
        p_value = 2 * float(stats.t.sf(abs(mean) / spread * math.sqrt(n), n - 1))
        low, high = _bootstrap((differences,), np.mean, bootstrap_seed)
        bootstrap = replace(difference, low=low, high=high)
    items = None
    if first_predictions is not None and other_predictions is not None and labels is not None:
        right = _right(start, first_predictions, labels, "first")
        items = item_evidence(_right(end, other_predictions, labels, "other") - right)
    elif not (first_predictions is other_predictions is labels is None):
        raise ValueError("give first_predictions, other_predictions and labels, or none of them")
    needed = seeds_needed(mean, spread)
    return Comparison(name, difference, bootstrap, p_value, p_value, 1, needed, items)


def compare_settings(
    results: Mapping[str, Values],
    *,
    predictions: Mapping[str, Array] | None = None,
    labels: Array | None = None,
) -> tuple[Comparison, ...]:
    """Each setting against the first; by Holm (1979) any false claim among all stays at 5 %."""
    said = dict.fromkeys(results) if predictions is None else predictions
    if len(results) < 2 or set(said) != set(results):
        raise ValueError(f"results of {[*results]}, predictions of {[*said]}: give the same, 2+")
    (base, first), *others = results.items()
    compare = partial(paired_comparison, first, first_predictions=said[base], labels=labels)
    found = [compare(other, name=name, other_predictions=said[name]) for name, other in others]
    m, largest = len(found), 0.0
    for rank, at in enumerate(sorted(range(m), key=lambda at: found[at].p_value)):
        largest = min(max(largest, (m - rank) * found[at].p_value), 1.0)
        found[at] = replace(found[at], adjusted_p_value=largest, comparisons=m)
    return tuple(found)


def seeds_needed(difference: float, standard_deviation: float) -> int | None:
    """The fewest seeds whose paired t test shows this difference at 5 % with 80 % power.

    Estimates in, estimate out. None: the difference is 0 or takes more than `MOST_SEEDS`.
    """
    if difference == 0:
        return None
    if standard_deviation == 0:  # the sign test's 2 / 2**n must reach ALPHA
        return math.ceil(1 - math.log2(ALPHA))
    effect = min(abs(difference) / standard_deviation, 1e6)  # beyond this 2 seeds do
    # A known spread would need fewer, so the search begins there. The square of t is noncentral F.
    known = ((stats.norm.ppf(1 - ALPHA / 2) + stats.norm.ppf(POWER)) / effect) ** 2
    for n in range(max(2, int(min(known, MOST_SEEDS))), MOST_SEEDS + 1):
        if stats.ncf.sf(stats.t.ppf(1 - ALPHA / 2, n - 1) ** 2, 1, n - 1, n * effect**2) >= POWER:
            return n
    return None


def item_evidence(cells: Float[Array, "seeds items"]) -> ItemEvidence:
    """From d[seed, item], right by the other setting minus right by the first: -1, 0 or 1.

    Random effects d = mean + a[seed] + b[item] + e[seed, item] by ANOVA (Searle, Casella, McCulloch
    1992): MS_seed = items * sum((d[s] - d)**2) / (seeds - 1), MS_item alike, MS_residual of the
    rest; seed variance (MS_seed - MS_residual) / items, item variance (MS_item - MS_residual) /
    seeds, unbiased, so perhaps just below 0. The mean varies by seed / seeds + item / items +
    residual / (seeds * items), with Satterthwaite's degrees of freedom (1946); without the item
    term by what the t interval has. McNemar's exact test (1947) needs independent cases: the seeds'
    answers to an item are not, so it counts once, for the setting right on it with more seeds.
    """
    seeds, items = cells.shape
    if min(seeds, items) < 2:
        raise ValueError(f"{seeds} seeds and {items} items: at least 2 of each are needed")
    mean, a, b = float(np.mean(cells)), np.mean(cells, axis=1), np.mean(cells, axis=0)
    rest = np.sum((cells - a[:, None] - b + mean) ** 2)
    degrees = np.array([seeds - 1, items - 1, (seeds - 1) * (items - 1)])
    squares = [items * np.var(a, ddof=1), seeds * np.var(b, ddof=1), rest / degrees[2]]
    of_seed, of_item, residual = (float(square) for square in squares)
    seed, item = (of_seed - residual) / items, (of_item - residual) / seeds
    total, freedom = of_seed, float(seeds - 1)
    if item > 0:
        total += of_item - residual
        # The subtracted square can bring Satterthwaite's number below each of its parts.
        freedom = max(
            total**2 / float(np.sum(np.square(squares) / degrees)), float(np.min(degrees))
        )
    half = float(stats.t.ppf((1 + LEVEL) / 2, freedom)) * math.sqrt(total / cells.size)
    new = Interval(mean, mean - half, mean + half, seeds, None)
    of_mean = (seed / seeds, item / items, residual / cells.size)
    wins = [int(np.sum(b > 0)), *np.sum(cells > 0, axis=1).tolist()]
    losses = [int(np.sum(b < 0)), *np.sum(cells < 0, axis=1).tolist()]
    tails = stats.binom.cdf(np.minimum(wins, losses), np.add(wins, losses), 0.5)
    pooled, *each = np.minimum(2 * tails, 1.0).tolist()
    return ItemEvidence(new, seed, item, residual, of_mean, losses[0], wins[0], pooled, (*each,))


def variance_shares(
    streams: Mapping[str, Values], together: Values, *, bootstrap_seed: int = 0
) -> dict[str, Interval]:
    """Which chance matters: the variance when one stream alone varies over that when all vary.

    In `together` all streams varied. Shares need not add up to 1, as streams interact (compare
    Bouthillier et al. 2021). `high` is None where resamples without spread leave it open.
    """

    def fraction(alone: Array, whole: Array, axis: int) -> Array:
        """v / (v + w), finite also where w is 0 (or 1e-34); its quantiles map back to v / w."""
        v, w = np.var(alone, axis=axis, ddof=1), np.var(whole, axis=axis, ddof=1)
        return np.divide(v, v + w, out=np.ones_like(v), where=w > 1e-20)

    whole = _checked(together, "together")
    if np.ptp(whole) == 0:
        raise ValueError(f"together: {len(whole)} times {whole[0]}, there is no variance to share")
    shares = {}
    for name, values in streams.items():
        alone = _checked(values, name)
        low, high = _bootstrap((alone, whole), fraction, bootstrap_seed)
        spread = mean_interval(alone).standard_deviation or 0.0
        estimate = spread**2 / float(np.var(whole, ddof=1))
        upper = high / (1 - high) if high < 1 else None
        shares[name] = Interval(estimate, low / (1 - low), upper, len(alone), spread)
    return shares


def _bootstrap(samples: tuple[Array, ...], statistic: Callable, seed: int) -> tuple[float, float]:
    """Expanded percentiles (Hesterberg 2015), as wide as t is; still too narrow below n = 8."""
    n = min(len(sample) for sample in samples)
    reach = math.sqrt(n / (n - 1)) * float(stats.t.ppf((1 + LEVEL) / 2, n - 1))
    bootstrap = partial(stats.bootstrap, method="percentile", rng=np.random.default_rng(seed))
    ends = bootstrap(samples, statistic, confidence_level=1 - 2 * float(stats.norm.sf(reach)))
    return float(ends.confidence_interval.low), float(ends.confidence_interval.high)


def _right(accuracies: Array, said: Array, labels: Array, name: str) -> Float[Array, "seeds items"]:
    shape = (len(accuracies), labels.size)
    if labels.ndim != 1 or said.shape != shape:
        raise ValueError(f"{name}_predictions have the shape {said.shape}, should have {shape}")
    right = (said == labels).astype(np.float64)
    for at, (given, found) in enumerate(zip(accuracies, np.mean(right, axis=1), strict=True)):
        if abs(given - found) > 1e-6:
            raise ValueError(f"{name}[{at}] is {given}, but {found} of its predictions are right")
    return right


def _checked(values: Values, name: str, least: int = 2, accuracies: bool = True) -> Array:
    numbers = np.asarray(values, np.float64)
    if numbers.ndim != 1 or len(numbers) < least:
        raise ValueError(f"{name} has the shape {numbers.shape}: at least {least} values needed")
    wrong = ~np.isfinite(numbers) | (accuracies & ((numbers < 0) | (numbers > 1)))
    if np.any(wrong):
        at, kind = int(np.argmax(wrong)), "a fraction, 0 to 1" if accuracies else "finite"
        raise ValueError(f"{name}[{at}] is {numbers[at]}, not {kind}: leave a failed seed out")
    return numbers
