"""The figures of an evaluation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ms_accum.app.report_images import Answers, interval, probabilities

pytestmark = pytest.mark.host


def by_counting(labels, guesses, classes):
    pairs = list(zip(labels.tolist(), guesses.tolist()))
    return [[pairs.count((label, guess)) for guess in range(classes)] for label in range(classes)]


def coverage(bounds, accuracy, total):
    """Return how often, of all samples of `total` rows, the interval holds the true part."""
    log_of = np.concatenate([[0], np.cumsum(np.log(np.arange(1, total + 1)))])
    covered = 0.0
    for right in range(total + 1):
        low, high = bounds(right, total)
        chance = log_of[total] - log_of[right] - log_of[total - right]
        chance += right * np.log(accuracy) + (total - right) * np.log1p(-accuracy)
        covered += np.exp(chance) * (low <= accuracy <= high)
    return covered


def wald_interval(right, total):
    """Return the interval of the textbooks, which is wrong near 0 and 1."""
    part = right / total
    half = 1.96 * np.sqrt(part * (1 - part) / total)
    return part - half, part + half


ACCURACIES = np.linspace(0.9, 0.99, 30)


def test_interval_covers_accuracy_in_95_percent():
    assert np.mean([coverage(interval, part, 100) for part in ACCURACIES]) == pytest.approx(0.95, abs=0.01)
    assert np.mean([coverage(wald_interval, part, 100) for part in ACCURACIES]) < 0.92


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (9753, 10_000, 0.9721, 0.9782)],
)
def test_interval_is_wilsons(right, total, low, high):
    assert interval(right, total) == pytest.approx((low, high), abs=1e-4)


def test_interval_without_rows_is_0_to_1():
    assert interval(0, 0) == (0.0, 1.0)


def test_probabilities_are_softmax(rng):
    scores = rng.randn(5, 4)
    expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probabilities(scores), expected, rtol=1e-12)
    np.testing.assert_allclose(probabilities(scores + 5000), expected, rtol=1e-9)  # exp alone would overflow


def test_nonfinite_scores_have_no_probability():
    nan, inf = np.nan, np.inf
    computed = probabilities(np.array([[nan, 1.0], [inf, 1.0], [-inf, 1.0], [0.0, 0.0]], np.float32))
    np.testing.assert_array_equal(computed, [[nan, nan], [nan, nan], [0, 1], [0.5, 0.5]])


def worst_of(labels, guesses, certain, keep):
    """Return the numbers of the most certain wrong answers, by definition."""
    numbers = [n for n in range(len(labels)) if labels[n] != guesses[n]]
    return sorted(numbers, key=lambda n: math.inf if math.isnan(certain[n]) else -certain[n])[:keep]


def test_most_certain_wrong_answers_come_first_ties_by_row():
    scores = np.log([[0.5, 0.5], [0.1, 0.9], [0.9, 0.1], [0.2, 0.8], [0.1, 0.9], [0.3, 0.7]])
    scores[3] = np.nan
    answers = Answers(2, keep=3)
    answers.add(np.zeros((6, 1, 1, 1)), scores, np.array([1, 0, 0, 1, 0, 0]))
    assert [wrong.row for wrong in answers.worst] == [1, 4, 5]  # then row 0, and last row 3
    answers.add(np.zeros((1, 1, 1, 1)), np.log([[0.8, 0.2]]), np.array([1]))
    assert [wrong.row for wrong in answers.worst] == [1, 4, 6]
    everything = Answers(2)
    everything.add(np.zeros((6, 1, 1, 1)), scores, np.array([1, 0, 0, 1, 0, 0]))
    assert [wrong.row for wrong in everything.worst] == [1, 4, 5, 0, 3]


# Collecting


def random_answers(rng, rows=500, classes=10):
    labels = rng.randint(0, classes, rows)
    scores = rng.randn(rows, classes).astype(np.float32)
    scores[np.arange(rows), labels] += 1
    images = np.arange(rows, dtype=np.float32).reshape(-1, 1, 1, 1) * np.ones((1, 1, 2, 2), np.float32)
    return images, scores, labels


def collected(images, scores, labels, size, kind=Answers):
    answers = kind(10)
    for start in range(0, len(labels), size):
        answers.add(*(array[start : start + size] for array in (images, scores, labels)))
    return answers


def check_collected(kind, rng):
    images, scores, labels = random_answers(rng)
    guesses = scores.argmax(axis=1)
    certain = probabilities(scores)[np.arange(len(labels)), guesses]
    expected = worst_of(labels, guesses, certain, 24)
    for size in (1, 7, 100, 500):
        answers = collected(images, scores, labels, size, kind)
        assert answers.counts.tolist() == by_counting(labels, guesses, 10)
        assert (answers.right, answers.total) == (int(np.sum(labels == guesses)), 500)
        assert [answer.row for answer in answers.worst] == expected
        for answer in answers.worst:
            assert (answer.label, answer.guess) == (labels[answer.row], guesses[answer.row])
            assert answer.probability == pytest.approx(certain[answer.row])
            assert answer.image.shape == (1, 2, 2) and np.all(answer.image == answer.row)


def test_result_does_not_depend_on_batches(rng):
    check_collected(Answers, rng)


class KeepsTheFirst(Answers):
    """Keeps the first wrong answers instead of the most certain ones."""

    def add(self, images, scores, labels):
        before = self.worst
        super().add(images, scores, labels)
        self.worst = before if len(before) == 24 else self.worst


class CountsEachBatchFromZero(Answers):
    """Numbers the rows of each batch from 0."""

    def add(self, images, scores, labels):
        self._rows = 0
        super().add(images, scores, labels)


@pytest.mark.parametrize("mutant", [KeepsTheFirst, CountsEachBatchFromZero])
def test_wrong_collecting_is_detected(mutant, rng):
    with pytest.raises(AssertionError):
        check_collected(mutant, rng)


def test_images_are_copied_from_batch(rng):
    images, scores, labels = random_answers(rng, 50)
    answers = Answers(10)
    answers.add(images, scores, labels)
    images[:] = -1
    assert all(np.all(answer.image == answer.row) for answer in answers.worst)


def test_number_of_kept_images_is_limited(rng):
    answers = collected(*random_answers(rng), 100)
    assert len(answers.worst) == 24
    assert all(answer.image.base is None for answer in answers.worst)  # a view would keep its batch


@pytest.mark.parametrize(("label", "name"), [(10, "labels"), (-1, "labels")])
def test_label_out_of_range_is_rejected(label, name, rng):
    images, scores, labels = random_answers(rng, 5)
    labels[3] = label
    with pytest.raises(ValueError, match=f"'{name}' must be 0 to 9, but got {label}"):
        Answers(10).add(images, scores, labels)


def test_answer_out_of_range_is_rejected(rng):
    images, scores, labels = random_answers(rng, 5, classes=12)
    scores[0, 11] = 99
    with pytest.raises(ValueError, match="'answers' must be 0 to 9, but got 11"):
        Answers(10).add(images, scores, labels.clip(0, 9))
