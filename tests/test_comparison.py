"""What is said about several seeds: against closed forms, and in experiments with known truth."""

import dataclasses
import functools
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
from scipy import special, stats

from mlp_research.sweep.statistics import (
    MOST_SEEDS,
    Comparison,
    Interval,
    compare_settings,
    item_evidence,
    mean_interval,
    paired_comparison,
    seeds_needed,
    summary,
    variance_shares,
)

EXPERIMENTS, SEEDS, ITEMS = 2000, 12, 300
COVERAGE = (0.93, 0.97)
FALSE_POSITIVES = 0.06


def accuracies(seeds: int, mean: float = 0.98, seed: int = 0) -> np.ndarray:
    """Counts over 10,000 items, as a test set gives them."""
    generator = np.random.default_rng(seed)
    return np.round(mean + 0.001 * generator.standard_normal(seeds), 4)


def few_resamples(patch: pytest.MonkeyPatch, resamples: int) -> None:
    """The bootstrap of thousands of experiments need not be as fine as that of one."""
    patch.setattr(stats, "bootstrap", functools.partial(stats.bootstrap, n_resamples=resamples))


def ends(interval: Interval) -> tuple[float, float]:
    assert interval.low is not None and interval.high is not None
    return interval.low, interval.high


def covered(interval: Interval, truth: float) -> bool:
    low, high = ends(interval)
    return low <= truth <= high


def predictions_of(correct: np.ndarray, labels: np.ndarray) -> np.ndarray:
    return np.where(correct, labels, (labels + 1) % 10)


@pytest.fixture(scope="module")
def experiments() -> list[tuple[Comparison, float, float]]:
    """2000 comparisons on binary answers, each with its two true differences.

    An item is right where level + skill[seed] + ease[item] + noise > 0, all normal. Given the items
    and over all items, the chance of a right answer is then a normal distribution function.
    """
    generator = np.random.default_rng(1)
    levels, skill, ease = np.reshape([1.0, 1.2], (2, 1, 1)), 0.15, (0.5, 0.6)
    labels = generator.integers(0, 10, ITEMS)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        few_resamples(patch, 499)
        for _ in range(EXPERIMENTS):
            # An item is easy for both settings, or for one of them.
            eases = generator.normal(0, ease[0], ITEMS)
            eases = eases + generator.normal(0, ease[1], (2, 1, ITEMS))
            shift = generator.normal(0, skill, (2, SEEDS, 1))
            correct = levels + shift + eases + generator.standard_normal((2, SEEDS, ITEMS)) > 0
            comparison = paired_comparison(
                *correct.mean(axis=2),
                first_predictions=predictions_of(correct[0], labels),
                other_predictions=predictions_of(correct[1], labels),
                labels=labels,
            )
            here = special.ndtr((levels + eases) / math.hypot(1, skill)).mean(axis=2)
            everywhere = special.ndtr(levels / math.hypot(1, skill, *ease))
            truths = (float(right[1, 0] - right[0, 0]) for right in (here, everywhere[..., 0]))
            found.append((comparison, *truths))
    return found


@pytest.fixture(scope="module")
def null_experiments() -> list[tuple[Comparison, ...]]:
    """2000 sweeps of three settings that are one and the same, on seeds that they share."""
    generator = np.random.default_rng(2)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        # Claims rest on p-values; the bootstrap would take most of the time.
        nothing = SimpleNamespace(confidence_interval=SimpleNamespace(low=0.0, high=0.0))
        patch.setattr(stats, "bootstrap", lambda *_, **__: nothing)
        for _ in range(EXPERIMENTS):
            shared = generator.normal(0.98, 0.001, 8)
            values = np.round(shared + generator.normal(0, 0.001, (3, 8)), 4)
            found.append(compare_settings(dict(zip("abc", values, strict=True))))
    return found


def test_the_t_interval_of_two_and_three_values_has_its_closed_form():
    # The t distribution of 1 degree of freedom is Cauchy's; that of 2 has an algebraic inverse.
    for values, quantile in (
        ([0.97, 0.98], math.tan(math.pi * 0.475)),
        ([0.97, 0.98, 0.984], 0.95 / math.sqrt(2 * 0.975 * 0.025)),
    ):
        n, mean = len(values), sum(values) / len(values)
        deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
        half = quantile * deviation / math.sqrt(n)
        interval = mean_interval(values)
        assert (interval.n, interval.level) == (n, 0.95)
        assert interval.standard_deviation == pytest.approx(deviation, rel=1e-12)
        assert (interval.low, interval.high) == pytest.approx((mean - half, mean + half), rel=1e-12)


def test_one_value_has_a_mean_and_no_interval():
    interval = mean_interval([0.98])
    assert interval.estimate == 0.98
    assert (interval.low, interval.high, interval.standard_deviation) == (None, None, None)


def test_equal_values_have_exactly_no_spread():
    # 0.1 + 0.1 + ... is rounded: a mean by summation is not 0.1, nor is the spread 0.
    interval = mean_interval([0.1] * 7)
    assert (interval.estimate, interval.low, interval.high) == (0.1, 0.1, 0.1)
    assert interval.standard_deviation == 0


def test_a_summary_is_the_interval_and_the_extremes():
    values = accuracies(9)
    row, interval = summary(values), mean_interval(values)
    assert dataclasses.asdict(row) == {
        "n": 9,
        "mean": interval.estimate,
        "standard_deviation": interval.standard_deviation,
        "low": interval.low,
        "high": interval.high,
        "minimum": min(values),
        "maximum": max(values),
    }


def test_the_paired_test_is_the_t_test_of_related_samples():
    first, other = accuracies(11, seed=1), accuracies(11, 0.981, seed=2)
    comparison = paired_comparison(first, other)
    expected = stats.ttest_rel(other, first)
    assert comparison.p_value == pytest.approx(expected.pvalue, rel=1e-6)
    bounds = expected.confidence_interval(0.95)
    assert comparison.difference.low == pytest.approx(bounds.low, rel=1e-6)
    assert comparison.difference.high == pytest.approx(bounds.high, rel=1e-6)


def test_the_p_value_of_three_seeds_has_its_closed_form():
    first, other = [0.9800, 0.9810, 0.9790], [0.9815, 0.9820, 0.9800]
    gains = [0.0015, 0.0010, 0.0010]
    mean = sum(gains) / 3
    t = mean / math.sqrt(sum((gain - mean) ** 2 for gain in gains) / 2) * math.sqrt(3)
    p_value = paired_comparison(first, other).p_value
    assert p_value == pytest.approx(1 - t / math.sqrt(2 + t**2), rel=1e-6)


def test_the_bootstrap_is_repeated_by_its_seed_and_by_nothing_else():
    first, other = accuracies(16, seed=1), accuracies(16, seed=2)
    once, again = (paired_comparison(first, other, bootstrap_seed=3) for _ in range(2))
    different = paired_comparison(first, other, bootstrap_seed=4)
    assert once == again
    assert once.bootstrap != different.bootstrap
    assert once.difference == different.difference


def test_exchanging_the_settings_changes_only_the_sign():
    first, other = accuracies(16, seed=1), accuracies(16, 0.982, seed=2)
    there, back = paired_comparison(first, other), paired_comparison(other, first)
    assert back.difference.estimate == -there.difference.estimate
    assert back.p_value == there.p_value
    assert " is better by " in there.sentence and " is worse by " in back.sentence


def test_mcnemar_is_the_exact_binomial_sum():
    generator = np.random.default_rng(3)
    labels = generator.integers(0, 10, 60)
    first, other = generator.random((5, 60)) < 0.8, generator.random((5, 60)) < 0.9
    items = paired_comparison(
        first.mean(axis=1),
        other.mean(axis=1),
        first_predictions=predictions_of(first, labels),
        other_predictions=predictions_of(other, labels),
        labels=labels,
    ).items
    assert items is not None

    def binomial(wins: int, losses: int) -> float:
        n = wins + losses
        tail = sum(math.comb(n, k) for k in range(min(wins, losses) + 1)) / 2**n
        return min(1.0, 2 * tail)

    for seed in range(5):
        wins = sum(b and not a for a, b in zip(first[seed], other[seed], strict=True))
        losses = sum(a and not b for a, b in zip(first[seed], other[seed], strict=True))
        assert items.mcnemar_per_seed[seed] == pytest.approx(binomial(wins, losses), rel=1e-9)
    columns = list(zip(first.sum(axis=0).tolist(), other.sum(axis=0).tolist(), strict=True))
    wins, losses = sum(b > a for a, b in columns), sum(a > b for a, b in columns)
    assert (items.other_better, items.first_better) == (wins, losses)
    assert items.mcnemar == pytest.approx(binomial(wins, losses), rel=1e-9)


def test_an_item_counts_once_however_many_seeds_repeat_its_answer():
    one = np.zeros((1, 40))
    one[0, :7] = 1
    repeated = item_evidence(np.repeat(one, 10, axis=0))
    assert repeated.mcnemar == pytest.approx(2 / 2**7)
    assert repeated.mcnemar_per_seed == pytest.approx([2 / 2**7] * 10)


def test_the_mean_squares_are_those_of_the_definition():
    d = np.random.default_rng(5).integers(-1, 2, (4, 7)).astype(float)
    evidence = item_evidence(d)
    grand, rows, columns = d.mean(), d.mean(axis=1), d.mean(axis=0)
    of_seed = 7 * sum((row - grand) ** 2 for row in rows) / 3
    of_item = 4 * sum((column - grand) ** 2 for column in columns) / 6
    rest = sum(
        (d[s, i] - rows[s] - columns[i] + grand) ** 2 for s in range(4) for i in range(7)
    ) / (3 * 6)
    assert evidence.residual_variance == pytest.approx(rest)
    assert evidence.seed_variance == pytest.approx((of_seed - rest) / 7)
    assert evidence.item_variance == pytest.approx((of_item - rest) / 4)
    # Seeds and residual together are what the t interval over seeds rests on.
    assert evidence.of_mean[0] + evidence.of_mean[2] == pytest.approx(np.var(rows, ddof=1) / 4)
    assert sum(evidence.of_mean) == pytest.approx((of_seed + of_item - rest) / 28)
    # Satterthwaite, for the sum of mean squares that has this expectation.
    assert of_item > rest
    total = of_seed + of_item - rest
    degrees = total**2 / (of_seed**2 / 3 + of_item**2 / 6 + rest**2 / 18)
    half = stats.t.ppf(0.975, max(degrees, 3)) * math.sqrt(total / 28)
    assert ends(evidence.difference) == pytest.approx((grand - half, grand + half))


def test_the_interval_for_new_items_stays_within_the_t_of_its_smaller_side():
    # Mean squares that nearly cancel would leave Satterthwaite's formula with no degrees at all.
    generator = np.random.default_rng(9)
    for _ in range(300):
        evidence = item_evidence(generator.integers(-1, 2, (4, 6)).astype(float))
        seed, item, residual = evidence.of_mean
        error = math.sqrt(max(seed + residual, 0.0) + max(item, 0.0))
        low, high = ends(evidence.difference)
        assert (high - low) / 2 <= stats.t.ppf(0.975, 3) * error * (1 + 1e-9)


def test_the_anova_recovers_the_variances_that_made_the_data():
    generator = np.random.default_rng(5)
    truth = {"seed_variance": 0.01, "item_variance": 0.25, "residual_variance": 1.0}
    found = {name: [] for name in truth}
    for _ in range(400):
        d = generator.normal(0, 1.0, (10, 80))
        d += generator.normal(0, 0.1, (10, 1)) + generator.normal(0, 0.5, (1, 80))
        evidence = item_evidence(d)
        for name, values in found.items():
            values.append(getattr(evidence, name))
    for name, values in found.items():
        error = np.std(values, ddof=1) / math.sqrt(len(values))
        assert abs(np.mean(values) - truth[name]) < 3 * error, name
        assert error < 0.05 * truth[name] or name == "seed_variance"
    # Clipping at 0 would make a small variance look larger than it is.
    assert min(found["seed_variance"]) < 0


@pytest.mark.parametrize("effect", [0.4, -0.9, 2.5])
def test_the_seeds_needed_have_the_power_and_one_less_has_not(effect: float):
    needed = seeds_needed(effect, 1.0)
    assert needed is not None
    generator = np.random.default_rng(6)

    def power(n: int) -> float:
        samples = generator.normal(effect, 1, (40_000, n))
        t = math.sqrt(n) * samples.mean(axis=1) / samples.std(axis=1, ddof=1)
        return float(np.mean(np.abs(t) >= stats.t.ppf(0.975, n - 1)))

    assert power(needed) > 0.80 - 0.006
    assert power(needed - 1) < 0.80 + 0.006
    assert seeds_needed(100 * effect, 100.0) == needed


def test_the_seeds_needed_are_the_first_with_power_by_the_noncentral_t():
    for effect in np.linspace(0.2, 4, 40).tolist():
        n, power = 1, 0.0
        while power < 0.80:
            n += 1
            edge, shift = stats.t.ppf(0.975, n - 1), effect * math.sqrt(n)
            lower = stats.nct.sf(edge, n - 1, -shift)  # by symmetry
            power = stats.nct.sf(edge, n - 1, shift) + lower
        assert seeds_needed(effect, 1.0) == n


def test_seeds_needed_says_none_where_no_number_would_do():
    assert seeds_needed(0.0, 0.001) is None
    assert seeds_needed(0.0, 0.0) is None
    assert seeds_needed(1e-9, 0.001) is None
    assert seeds_needed(1.0, 1e-12) == 2
    smallest = 2.81 / math.sqrt(MOST_SEEDS)
    assert (seeds_needed(smallest, 1.0) or 0) > 0.99 * MOST_SEEDS


def test_without_spread_the_exact_sign_test_decides():
    for n in range(2, 9):
        counts = 1900 + 1900 * (np.arange(n) % 5)
        first, other = counts / 10_000, (counts + 7) / 10_000
        assert np.ptp(other - first) > 0  # equal as counts, but not as floats
        comparison = paired_comparison(first, other)
        assert comparison.difference.standard_deviation == 0
        assert comparison.p_value == 2 / 2**n
        assert comparison.claimed == (n >= 6)
        assert comparison.seeds_needed == 6


def test_a_setting_against_itself_claims_nothing():
    first = accuracies(16)
    labels = np.arange(10_000) % 10
    correct = np.arange(10_000) < np.round(first * 10_000)[:, None]
    predictions = predictions_of(correct, labels)
    (comparison,) = compare_settings(
        {"a": first, "b": first}, predictions={"a": predictions, "b": predictions}, labels=labels
    )
    assert not comparison.claimed and comparison.p_value == 1
    assert comparison.seeds_needed is None
    assert comparison.bootstrap == comparison.difference
    assert comparison.sentence == "b: no difference above 0.00 points can be claimed from 16 seeds"
    assert comparison.items is not None and comparison.items.mcnemar == 1


def test_the_intervals_hold_the_truth_in_93_to_97_of_100_experiments(experiments):
    kinds = {
        "t, new seeds on these items": [covered(c.difference, t) for c, t, _ in experiments],
        "bootstrap": [covered(c.bootstrap, t) for c, t, _ in experiments],
        "new seeds and items": [covered(c.items.difference, t) for c, _, t in experiments],
    }
    for name, hits in kinds.items():
        assert COVERAGE[0] <= np.mean(hits) <= COVERAGE[1], (name, np.mean(hits))
    # The t interval over seeds is not one for new items: the other one is needed.
    for_new_items = np.mean([covered(c.difference, t) for c, _, t in experiments])
    assert for_new_items < COVERAGE[0]


def test_the_interval_of_a_mean_holds_the_truth_in_93_to_97_of_100_experiments():
    generator = np.random.default_rng(7)
    samples = generator.normal(0.98, 0.001, (EXPERIMENTS, 5))
    hits = np.mean([covered(mean_interval(sample), 0.98) for sample in samples])
    assert COVERAGE[0] <= hits <= COVERAGE[1]


def test_equal_settings_are_claimed_to_differ_at_most_6_times_in_100(null_experiments):
    single = np.mean([sweep[0].p_value <= 0.05 for sweep in null_experiments])
    assert 0.03 <= single <= FALSE_POSITIVES
    any_claim = np.mean([any(one.claimed for one in sweep) for sweep in null_experiments])
    assert any_claim <= FALSE_POSITIVES
    # Without Holm's correction two comparisons would be wrong more often.
    uncorrected = np.mean([any(c.p_value <= 0.05 for c in sweep) for sweep in null_experiments])
    assert uncorrected > FALSE_POSITIVES


def test_holm_multiplies_the_smallest_by_all_and_never_falls():
    results = {"first": accuracies(12)}
    for number in range(5):
        results[str(number)] = accuracies(12, 0.98 + 0.0004 * number, seed=number + 1)
    comparisons = compare_settings(results)
    ranked = sorted(comparisons, key=lambda one: one.p_value)
    for k, one in enumerate(ranked):
        expected = max((5 - j) * ranked[j].p_value for j in range(k + 1))
        assert one.adjusted_p_value == pytest.approx(min(1.0, expected))
        assert one.comparisons == 5
    assert [one.name for one in comparisons] == list(results)[1:]


def test_the_sentences_are_plain_in_both_directions():
    first = accuracies(16)
    # Eight gains of 0.42 and eight of 0.20 points: mean 0.31, t(15) * 0.1136 / 4 = 0.0605.
    gain = np.tile([0.0042, 0.0020], 8)
    better, worse, unclear = compare_settings(
        {
            "dropout 0": first,
            "dropout 0.2": first + gain,
            "dropout 0.5": first - gain,
            "dropout 0.1": first + np.tile([0.0019, -0.0019], 8),
        }
    )
    size = "0.31 +- 0.06 points; 4 seeds would have shown it"
    assert better.sentence == f"dropout 0.2 is better by {size}"
    assert worse.sentence == f"dropout 0.5 is worse by {size}"
    # t(15) * 0.19 * sqrt(16 / 15) / 4 = 0.1046.
    nothing = "no difference above 0.10 points can be claimed from 16 seeds"
    assert unclear.sentence == f"dropout 0.1: {nothing}"


def test_the_sentence_follows_the_corrected_decision():
    first = accuracies(16)
    gain = np.tile([0.0016, -0.0004], 8)
    noise = np.tile([0.0010, -0.0010], 8)
    alone = paired_comparison(first, first + gain / 2.1, name="b")
    assert alone.claimed
    settings = {"a": first, "b": first + gain / 2.1} | dict.fromkeys(("c", "d", "e"), first + noise)
    among_four = compare_settings(settings)[0]
    assert among_four.p_value == alone.p_value
    assert not among_four.claimed
    assert among_four.sentence.startswith("b: no difference above ")


def test_a_bare_success_says_how_many_seeds_it_takes():
    first = accuracies(8)
    comparison = paired_comparison(first, first + np.tile([0.0014, 0.0], 4), name="wider")
    assert comparison.claimed and (comparison.seeds_needed or 0) > 8
    assert comparison.sentence.endswith(
        f"; {comparison.seeds_needed} seeds would show it 4 times in 5"
    )


def test_a_difference_of_few_items_is_not_promised_for_new_ones():
    labels = np.arange(100) % 10
    correct = np.arange(100) < np.array([90, 90, 90, 89, 90, 90, 90, 90])[:, None]
    other = correct | (np.arange(100) == 95) | (np.arange(100) == 96)
    comparison = paired_comparison(
        correct.mean(axis=1),
        other.mean(axis=1),
        first_predictions=predictions_of(correct, labels),
        other_predictions=predictions_of(other, labels),
        labels=labels,
    )
    assert comparison.claimed and comparison.items is not None
    low, high = (f"{points:+.2f}" for points in comparison.items.difference.points)
    assert low.startswith("-") and high.startswith("+")
    assert f" on these test items (on new ones {low} to {high}); " in comparison.sentence


def test_a_share_is_the_ratio_of_variances():
    alone, together = accuracies(32, seed=1), accuracies(32, seed=2)
    shares = variance_shares({"init": alone, "order": together}, together)
    assert list(shares) == ["init", "order"]
    assert shares["init"].estimate == pytest.approx(np.var(alone) / np.var(together))
    assert shares["order"].estimate == pytest.approx(1.0)
    assert covered(shares["init"], shares["init"].estimate)
    # As a share of itself the resamples must be drawn apart, or the interval would be 1 to 1.
    assert covered(shares["order"], 0.9) and covered(shares["order"], 1.1)


def test_a_stream_without_effect_has_no_share():
    shares = variance_shares({"dropout": [0.98] * 8}, accuracies(8))
    assert (shares["dropout"].estimate, *ends(shares["dropout"])) == (0, 0, 0)


def test_a_share_over_hardly_any_spread_has_no_upper_end():
    shares = variance_shares({"init": accuracies(8)}, [0.98] * 7 + [0.981])
    assert shares["init"].low is not None and shares["init"].low > 0
    assert shares["init"].high is None


def test_the_share_intervals_hold_the_truth_in_93_to_97_of_100_experiments(monkeypatch):
    few_resamples(monkeypatch, 499)
    generator = np.random.default_rng(8)
    hits = []
    for _ in range(EXPERIMENTS // 2):
        alone = generator.normal(0.98, 0.001 * math.sqrt(0.4), 32)
        together = generator.normal(0.98, 0.001, 32)
        hits.append(covered(variance_shares({"init": alone}, together)["init"], 0.4))
    assert COVERAGE[0] <= np.mean(hits) <= COVERAGE[1]


def test_everything_can_be_written_as_strict_json():
    records = [
        summary([0.98]),
        *variance_shares({"init": accuracies(8)}, [0.98] * 7 + [0.981]).values(),
        paired_comparison(accuracies(4), accuracies(4)),
        item_evidence(np.zeros((3, 5))),
    ]
    for record in records:
        text = json.dumps(dataclasses.asdict(record), allow_nan=False)
        assert json.loads(text).keys() == dataclasses.asdict(record).keys()


@pytest.mark.parametrize(
    ("first", "other", "message"),
    [
        ([0.9, 0.8], [0.9, 0.8, 0.7], "first has 2 seeds, other 3"),
        ([0.9], [0.9], r"first has the shape \(1,\): at least 2"),
        ([0.9, 0.8], [0.9, math.nan], r"other\[1\] is nan"),
        ([0.9, math.inf], [0.9, 0.8], r"first\[1\] is inf"),
        ([0.9, 0.8], [98.1, 0.9], r"other\[0\] is 98.1, not a fraction, 0 to 1"),
        ([0.9, -0.1], [0.9, 0.8], r"first\[1\] is -0.1"),
    ],
)
def test_unusable_accuracies_are_refused_with_their_numbers(first, other, message):
    with pytest.raises(ValueError, match=message):
        paired_comparison(first, other)


def test_unusable_predictions_are_refused_with_their_numbers():
    labels = np.array([1, 2, 3, 4])
    right = np.tile(labels, (2, 1))
    values = [1.0, 1.0]
    with pytest.raises(ValueError, match="labels, or none of them"):
        paired_comparison(values, values, first_predictions=right, other_predictions=right)
    give = functools.partial(paired_comparison, labels=labels, other_predictions=right)
    with pytest.raises(ValueError, match=r"first_predictions .* \(3, 4\), should have \(2, 4\)"):
        give(values, values, first_predictions=np.tile(labels, (3, 1)))
    with pytest.raises(ValueError, match=r"first\[1\] is 0.75, but 1.0 of its predictions"):
        give([1.0, 0.75], values, first_predictions=right)
    with pytest.raises(ValueError, match="2 seeds and 1 items"):
        item_evidence(np.zeros((2, 1)))


def test_other_unusable_input_is_refused_with_its_numbers():
    with pytest.raises(ValueError, match=r"results of \['a'\]"):
        compare_settings({"a": [0.9, 0.8]})
    with pytest.raises(ValueError, match=r"predictions of \['a'\]"):
        compare_settings({"a": [0.9, 0.8], "b": [0.9, 0.8]}, predictions={"a": np.zeros((2, 3))})
    with pytest.raises(ValueError, match=r"3 times 0\.98"):
        variance_shares({"init": accuracies(3)}, [0.98] * 3)
    with pytest.raises(ValueError, match=r"init\[0\] is 98"):
        variance_shares({"init": [98.0, 97.0]}, accuracies(3))
    with pytest.raises(ValueError, match=r"values\[1\] is nan, not finite"):
        mean_interval([0.9, math.nan])
    with pytest.raises(ValueError, match="at least 1"):
        summary([])
