"""Are the figures of an evaluation right?"""

from __future__ import annotations

import numpy as np
import pytest

from ms_accum.results.diagnosis import Answers, by_class, confusion, interval, most_wrong, probabilities

pytestmark = pytest.mark.host

LABELS = np.array([0, 0, 0, 1, 1, 2, 2, 2])
GUESSES = np.array([0, 1, 2, 1, 2, 2, 1, 1])
COUNTS = [[1, 1, 1], [0, 1, 1], [0, 2, 1]]


def by_counting(labels, guesses, classes):
    pairs = list(zip(labels.tolist(), guesses.tolist()))
    return [[pairs.count((label, guess)) for guess in range(classes)] for label in range(classes)]


def test_the_confusion_matrix_has_a_row_for_each_class():
    found = confusion(LABELS, GUESSES, 3).tolist()
    assert found == by_counting(LABELS, GUESSES, 3) == COUNTS
    assert confusion(GUESSES, LABELS, 3).tolist() != COUNTS  # its transpose is another one


def coverage(bounds, part, total):
    """Return how often, of all samples of `total` rows, the interval holds the true part."""
    log_of = np.concatenate([[0], np.cumsum(np.log(np.arange(1, total + 1)))])
    found = 0.0
    for right in range(total + 1):
        low, high = bounds(right, total)
        chance = log_of[total] - log_of[right] - log_of[total - right]
        chance += right * np.log(part) + (total - right) * np.log1p(-part)
        found += np.exp(chance) * (low <= part <= high)
    return found


def walds(right, total):
    """Return the interval of the textbooks, which is wrong near 0 and 1."""
    part = right / total
    half = 1.96 * np.sqrt(part * (1 - part) / total)
    return part - half, part + half


PARTS = np.linspace(0.9, 0.99, 30)


def test_the_interval_holds_the_accuracy_as_often_as_it_says():
    assert np.mean([coverage(interval, part, 100) for part in PARTS]) == pytest.approx(0.95, abs=0.01)
    assert np.mean([coverage(walds, part, 100) for part in PARTS]) < 0.92


@pytest.mark.parametrize(
    ("right", "total", "low", "high"),
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (9753, 10_000, 0.9721, 0.9782)],
)
def test_the_interval_is_wilsons(right, total, low, high):
    assert interval(right, total) == pytest.approx((low, high), abs=1e-4)


def test_without_rows_nothing_is_known():
    assert interval(0, 0) == (0.0, 1.0)


def test_the_figures_of_each_class():
    found = by_class(np.array([[1, 1, 3], [0, 0, 0], [0, 0, 4]]))
    assert [tuple(each) for each in found] == [(5, 1, 2, 3), (0, 0, None, 0), (4, 4, None, 0)]
    assert [each.accuracy for each in found] == [0.2, None, 1.0]


def test_right_answers_are_not_the_most_frequent_mistake():
    assert by_class(np.array([[90, 2], [9, 1]]))[0].mistaken_for == 1


def test_the_probabilities_are_the_softmax(rng):
    scores = rng.randn(5, 4)
    expected = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(probabilities(scores), expected, rtol=1e-12)
    np.testing.assert_allclose(probabilities(scores + 5000), expected, rtol=1e-9)  # exp alone would overflow


def test_scores_that_are_not_finite_have_no_probability_and_others_keep_theirs():
    nan, inf = np.nan, np.inf
    found = probabilities(np.array([[nan, 1.0], [inf, 1.0], [-inf, 1.0], [0.0, 0.0]], np.float32))
    np.testing.assert_array_equal(found, [[nan, nan], [nan, nan], [0, 1], [0.5, 0.5]])


def check_most_wrong(choose):
    labels, guesses = np.array([0, 1, 2, 0, 1, 2]), np.array([1, 1, 0, 2, 0, 1])
    certain = np.array([0.5, 0.99, 0.8, np.nan, 0.8, 0.9])
    assert choose(labels, guesses, certain, 9).tolist() == [5, 2, 4, 0, 3]
    assert choose(labels, guesses, certain, 2).tolist() == [5, 2]
    assert choose(labels, labels, certain, 2).tolist() == []


def test_the_most_certain_wrong_answers_come_first_and_equal_ones_by_row():
    check_most_wrong(most_wrong)


@pytest.mark.parametrize(
    "mutant",
    [
        lambda labels, guesses, certain, count: np.argsort(-certain)[:count],  # right ones, too
        lambda labels, guesses, certain, count: most_wrong(labels, guesses, 1 - certain, count),
        lambda labels, guesses, certain, count: most_wrong(labels, guesses, certain, count + 1),
        lambda labels, guesses, certain, count: most_wrong(labels, guesses, np.nan_to_num(certain, nan=1.0), count),
    ],
    ids=["right ones", "least certain", "one more", "NaN first"],
)
def test_other_choices_are_found(mutant):
    with pytest.raises(AssertionError):
        check_most_wrong(mutant)


# Collecting


def made_up(rng, rows=500, classes=10):
    labels = rng.randint(0, classes, rows)
    scores = rng.randn(rows, classes).astype(np.float32)
    scores[np.arange(rows), labels] += 1
    images = np.arange(rows, dtype=np.float32).reshape(-1, 1, 1, 1) * np.ones((1, 1, 2, 2), np.float32)
    return images, scores, labels


def collected(images, scores, labels, size, kind=Answers):
    answers = kind(10)
    for start in range(0, len(labels), size):
        answers.add(*(each[start : start + size] for each in (images, scores, labels)))
    return answers


def check_collected(kind, rng):
    images, scores, labels = made_up(rng)
    guesses = scores.argmax(axis=1)
    certain = probabilities(scores)[np.arange(len(labels)), guesses]
    expected = most_wrong(labels, guesses, certain, 24)
    for size in (1, 7, 100, 500):
        answers = collected(images, scores, labels, size, kind)
        assert answers.counts.tolist() == by_counting(labels, guesses, 10)
        assert (answers.right, answers.total) == (int(np.sum(labels == guesses)), 500)
        assert [each.row for each in answers.worst] == expected.tolist()
        for each in answers.worst:
            assert (each.label, each.guess) == (labels[each.row], guesses[each.row])
            assert each.probability == pytest.approx(certain[each.row])
            assert each.image.shape == (1, 2, 2) and np.all(each.image == each.row)


def test_batches_give_what_all_rows_at_once_give(rng):
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
def test_collecting_otherwise_is_found(mutant, rng):
    with pytest.raises(AssertionError):
        check_collected(mutant, rng)


def test_images_are_kept_though_the_batch_is_used_again(rng):
    images, scores, labels = made_up(rng, 50)
    answers = Answers(10)
    answers.add(images, scores, labels)
    images[:] = -1
    assert all(np.all(each.image == each.row) for each in answers.worst)


def test_only_so_many_images_are_kept(rng):
    answers = collected(*made_up(rng), 100)
    assert len(answers.worst) == 24
    assert all(each.image.base is None for each in answers.worst)  # a view would keep its batch


@pytest.mark.parametrize(("label", "name"), [(10, "labels"), (-1, "labels")])
def test_a_label_out_of_range_is_rejected(label, name, rng):
    images, scores, labels = made_up(rng, 5)
    labels[3] = label
    with pytest.raises(ValueError, match=f"'{name}' must be 0 to 9, but got {label}"):
        Answers(10).add(images, scores, labels)


def test_an_answer_out_of_range_is_rejected(rng):
    images, scores, labels = made_up(rng, 5, classes=12)
    scores[0, 11] = 99
    with pytest.raises(ValueError, match="'answers' must be 0 to 9, but got 11"):
        Answers(10).add(images, scores, labels.clip(0, 9))
