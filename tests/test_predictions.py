"""Counts by class, calibration and worst mistakes are what a hand-made case says."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlp_research.analysis import predictions

CHANCES = np.array(
    [
        [0.7, 0.2, 0.1],  # right, 0.7 sure
        [0.1, 0.8, 0.1],  # wrong, 0.8 sure
        [0.3, 0.3, 0.4],  # right, 0.4 sure
        [0.9, 0.1, 0.0],  # wrong, 0.9 sure
        [0.1, 0.8, 0.1],  # wrong, 0.8 sure, like the second row
    ]
)
LABELS = np.array([0, 0, 2, 1, 2], np.uint8)


def test_probabilities_are_the_softmax_and_sum_to_one():
    logits = np.log(np.array([[1, 2, 5], [4, 4, 4]], np.float32))
    expected = [[1 / 8, 2 / 8, 5 / 8], [1 / 3, 1 / 3, 1 / 3]]
    np.testing.assert_allclose(predictions.probabilities(logits), expected, rtol=1e-6)


def test_huge_logits_overflow_nothing():
    chances = predictions.probabilities(np.array([[3e38, -3e38], [-3e38, -3e38]], np.float32))
    np.testing.assert_array_equal(chances, [[1, 0], [0.5, 0.5]])


def test_a_logit_that_is_not_finite_is_refused_with_its_row():
    logits = np.zeros((4, 2), np.float32)
    logits[2, 1] = np.nan
    with pytest.raises(
        predictions.NotFiniteError, match=r"1 of 4 rows are not finite; the first is row 2"
    ):
        predictions.probabilities(logits)


def test_confusion_counts_have_labels_down_and_predictions_across():
    counts = predictions.confusion_counts(LABELS, CHANCES.argmax(axis=1), 4)
    expected = np.zeros((4, 4))
    for label, prediction in [(0, 0), (0, 1), (2, 2), (1, 0), (2, 1)]:
        expected[label, prediction] += 1
    np.testing.assert_array_equal(counts, expected)


def test_counts_of_many_classes_do_not_wrap_around_the_labels_bytes():
    labels = np.array([200, 255], np.uint8)
    counts = predictions.confusion_counts(labels, np.array([255, 200], np.uint8), 256)
    assert counts[200, 255] == counts[255, 200] == 1
    assert counts.sum() == 2


def test_recall_and_precision_by_hand_and_nan_where_there_is_nothing_to_divide():
    counts = np.array([[3, 1, 0], [2, 2, 0], [0, 0, 0]])
    np.testing.assert_array_equal(predictions.recall(counts), [3 / 4, 2 / 4, np.nan])
    np.testing.assert_array_equal(predictions.precision(counts), [3 / 5, 2 / 3, np.nan])


def test_calibration_error_by_hand():
    confidences = np.array([0.9, 0.8, 0.3])  # the first two share the upper of two bins
    correct = np.array([True, False, True])
    expected = 2 / 3 * abs(1 / 2 - 0.85) + 1 / 3 * abs(1 - 0.3)
    assert predictions.calibration_error(confidences, correct, bins=2) == pytest.approx(expected)


def test_a_bin_holds_its_upper_end_and_not_its_lower():
    # Apart they are 0.5 and 1 off; in one bin their differences would cancel to 0.25.
    confidences, correct = np.array([0.5, 1.0]), np.array([True, False])
    assert predictions.calibration_error(confidences, correct, bins=2) == pytest.approx(0.75)


def test_a_sure_and_right_model_is_calibrated_and_a_sure_and_wrong_one_not_at_all():
    sure = np.ones(8)
    assert predictions.calibration_error(sure, np.ones(8, bool)) == 0
    assert predictions.calibration_error(sure, np.zeros(8, bool)) == 1


@given(st.integers(2, 20), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_calibration_error_equals_the_sum_over_bins_of_the_paper(bins, rows, seed):
    generator = np.random.default_rng(seed)
    confidences, correct = generator.uniform(size=rows), generator.uniform(size=rows) < 0.6
    expected = 0.0
    for bin_ in range(bins):
        inside = (confidences > bin_ / bins) & (confidences <= (bin_ + 1) / bins)
        if inside.any():
            gap = abs(correct[inside].mean() - confidences[inside].mean())
            expected += inside.mean() * gap
    found = predictions.calibration_error(confidences, correct, bins)
    assert found == pytest.approx(expected, abs=1e-12)


def test_brier_score_by_hand_and_at_its_ends():
    chances = np.array([[0.7, 0.3], [0.4, 0.6]])
    labels = np.array([0, 0], np.uint8)
    expected = (0.3**2 + 0.3**2 + 0.6**2 + 0.6**2) / 2
    assert predictions.brier_score(chances, labels) == pytest.approx(expected)
    assert predictions.brier_score(np.eye(3), np.array([0, 1, 2])) == 0
    assert predictions.brier_score(np.eye(3), np.array([1, 2, 0])) == 2


def test_brier_score_leaves_its_input_alone():
    before = CHANCES.copy()
    predictions.brier_score(CHANCES, LABELS)
    np.testing.assert_array_equal(CHANCES, before)


def test_brier_score_of_ignorance_is_one_minus_one_over_classes():
    assert predictions.brier_score(np.full((6, 10), 0.1), np.arange(6)) == pytest.approx(0.9)


def test_the_worst_are_wrong_rows_by_falling_probability_and_then_in_order():
    assert predictions.worst(CHANCES, LABELS, 25).tolist() == [3, 1, 4]
    assert predictions.worst(CHANCES, LABELS, 2).tolist() == [3, 1]


def test_a_model_without_mistakes_has_no_worst():
    assert predictions.worst(np.eye(3), np.array([0, 1, 2]), 25).tolist() == []
