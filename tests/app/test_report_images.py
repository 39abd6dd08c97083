"""What a report shows of a model that classifies images."""

from __future__ import annotations

import math
import re
from base64 import b64decode
from io import BytesIO

import numpy as np
import pytest
from PIL import Image

from ms_accum.app import report_images
from ms_accum.app.report_images import Answers, Wrong, interval, probabilities
from report_pages import NAMES, NONE, Elements, answers_of, cells, counted, image_page, metrics_of, subject

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


# The sections


@pytest.fixture
def answers(rng):
    return answers_of(rng)


def test_accuracy_and_interval():
    text = image_page(subject(), counted(), NONE)
    assert "99.85 % <small>(2,007 of 2,010 images)</small>" in text
    assert "95 % interval: 99.6 % to 99.9 %." in text
    assert "Recorded after training: 97.78 % (352 of 360).<" in text
    assert "(352 of 360), on other images.<" in image_page(subject(same_data=False), counted(), NONE)
    assert "Recorded" not in image_page(subject(record=None), counted(), NONE)


def test_table_by_class():
    assert cells(image_page(subject(), counted(), NONE), "classes") == [
        ["ant", "10", "8", "80.0 %", "bee (2)"],
        ["bee", "0", "0", "no images", "none"],
        ["cow", "2,000", "1,999", "100.0 %", "bee (1)"],
    ]


def test_confusion_matrix():
    text = image_page(subject(), counted(), NONE)
    assert cells(text, "matrix") == [["ant", "8", "2", "0"], ["bee", "0", "0", "0"], ["cow", "0", "1", "1,999"]]
    kinds = re.findall(r'<td class="(right|wrong|zero)"(?: style="--s:([0-9.]+)")?>', text)
    right, wrong, zero = "right", "wrong", ("zero", "")
    first = [(right, "0.80"), (wrong, "1.00"), zero]  # mistakes: 2 of 10 is the largest part of a class
    assert kinds == [*first, zero, (right, "0.00"), zero, zero, (wrong, "0.05"), (right, "1.00")]


def test_model_without_mistakes():
    text = image_page(subject(), counted(np.diag([3, 4, 5])), NONE)
    assert "There is no wrong answer." in text and "<img" not in text and 'class="wrong"' not in text


@pytest.mark.parametrize(
    ("probability", "words"),
    [(0.98, "98.0 %"), (0.504, "50.4 %"), (0.9949, "99.5 %"), (0.99999, "over 99.9 %"), (1.0, "over 99.9 %")]
    + [(float("nan"), "no probability")],
)
def test_most_certain_wrong_answers(probability, words, answers):
    answers.worst = [Wrong(1234, 2, 0, probability, np.zeros((1, 4, 6)))]
    (image,) = Elements(image_page(subject(), answers, NONE)).with_tag("img")
    assert image["alt"] == f"Test image 1,234: is cow, predicted ant, {words}"
    assert (image["width"], image["height"]) == ("6", "4")


def test_pictures_are_those_of_wrong_answers(answers):
    images = Elements(image_page(subject(), answers, NONE)).with_tag("img")
    assert len(images) == len(answers.worst) > 3
    assert f">{len(images)} of {answers.total - answers.right} wrong answers: those" in image_page(
        subject(), answers, NONE
    )
    for image, answer in zip(images, answers.worst):
        picture = Image.open(BytesIO(b64decode(image["src"].partition("base64,")[2])))
        expected = np.rint((answer.image[0] + 0.5) * 255)
        assert np.array_equal(np.array(picture), expected)
        assert f"is {NAMES[answer.label]}, predicted {NAMES[answer.guess]}" in image["alt"]


def picture_of(image, mean, std):
    return np.array(Image.open(BytesIO(report_images._picture(image, mean, std))))


def test_picture_is_input_before_normalization(rng):
    for shape, mean, std in (((3, 5, 4), (0.1, 0.2, 0.3), (0.5, 0.6, 0.7)), ((1, 5, 4), 0.3, 0.4)):
        expected = rng.randint(0, 256, shape).astype(np.uint8)
        scale = [np.reshape(np.array(value, np.float32), (-1, 1, 1)) for value in (mean, std)]
        image = ((expected / 255 - scale[0]) / scale[1]).astype(np.float32)
        shown = expected.transpose(1, 2, 0) if shape[0] == 3 else expected[0]
        assert np.array_equal(picture_of(image, mean, std), shown)


def test_picture_of_nan_is_black():
    assert np.array_equal(picture_of(np.full((1, 2, 2), np.nan), 0.5, 1), np.zeros((2, 2)))
    assert picture_of(np.array([[[-9.0, 9.0, np.inf, -np.inf]]]), 0.5, 1).tolist() == [[0, 255, 255, 0]]


@pytest.mark.slow
def test_cifar_page_is_small(rng):
    answers = answers_of(rng, rows=10_000, classes=10, side=32, channels=3)  # noise: no image is larger
    assert len(answers.worst) == 24
    text = image_page(
        subject(), answers, metrics_of(10_000), names=NAMES + tuple("abcdefg"), mean=[0.5] * 3, std=[1] * 3
    )
    assert len(text.encode()) < 500_000
