"""How good is a model, class by class, and which of its wrong answers are the most certain?

This module uses NumPy only. The functions have no state. `Answers` collects while a model is evaluated.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MOST_WRONG = 24
"""int, the number of wrong answers that are kept with their images."""
_Z = 1.959964  # 95 % of a normal distribution are within this number of standard deviations


class Wrong(NamedTuple):
    """A wrong answer."""

    row: int
    """The number of the image in the test split, from 0."""
    label: int
    """The class of the image."""
    guess: int
    """The class that the model predicts."""
    probability: float
    """The probability that the model gives to `guess`; NaN if its scores are not finite."""
    image: np.ndarray
    """The input of the network, of shape (channels, height, width)."""


class ClassFigures(NamedTuple):
    """The figures of one class."""

    rows: int
    """Images of the class."""
    right: int
    """Right answers."""
    mistaken_for: int | None
    """The most frequent wrong answer; None if there is no wrong answer."""
    times: int
    """How often that is the answer."""

    @property
    def accuracy(self) -> float | None:
        """Optional[float], the part of right answers; None for a class without images."""
        return self.right / self.rows if self.rows else None


def interval(right: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of an accuracy, which stays within 0 and 1 for few rows, too."""
    if not total:
        return 0.0, 1.0
    part, spread = right / total, _Z**2 / total
    centre = (part + spread / 2) / (1 + spread)
    half = math.sqrt(part * (1 - part) * spread + spread**2 / 4) / (1 + spread)
    return max(0.0, centre - half), min(1.0, centre + half)


def confusion(labels: np.ndarray, guesses: np.ndarray, classes: int) -> np.ndarray:
    """Return how often each class (row) gets each answer (column)."""
    counts = np.zeros((classes, classes), np.int64)
    np.add.at(counts, (labels, guesses), 1)
    return counts


def by_class(counts: np.ndarray) -> list[ClassFigures]:
    """Return the figures of each class from the confusion matrix."""
    found = []
    for number, row in enumerate(counts):
        wrong = np.where(np.arange(len(row)) == number, 0, row)
        worst = int(wrong.argmax())
        mistaken_for = worst if wrong[worst] else None
        found.append(ClassFigures(int(row.sum()), int(row[number]), mistaken_for, int(wrong[worst])))
    return found


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Return the softmax of each row of scores; NaN for a row in which one is NaN, or infinity is the largest."""
    scores = np.asarray(scores, np.float64)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        parts = np.exp(scores - scores.max(axis=1, keepdims=True))
        return parts / parts.sum(axis=1, keepdims=True)


def most_wrong(labels: np.ndarray, guesses: np.ndarray, certain: np.ndarray, count: int) -> np.ndarray:
    """Return the numbers of at most `count` wrong answers, the most certain first.

    Args:
        labels (numpy.ndarray): the classes.
        guesses (numpy.ndarray): the predicted classes.
        certain (numpy.ndarray): the probabilities of the predicted classes; NaN comes last.
        count (int): how many.
    """
    wrong = np.flatnonzero(labels != guesses)
    certain = certain[wrong]
    order = np.argsort(-np.where(np.isnan(certain), -1.0, certain), kind="stable")
    return wrong[order[:count]]


class Answers:
    """The answers of a model, collected batch by batch; of the images only those of the most certain wrong ones.

    Args:
        classes (int): number of classes.
        keep (int): number of wrong answers that are kept with their images. Default: ``24``.
    """

    def __init__(self, classes: int, keep: int = MOST_WRONG):
        self._keep, self._rows = keep, 0
        self.counts = np.zeros((classes, classes), np.int64)
        """numpy.ndarray, the confusion matrix: how often each class (row) got each answer (column)."""
        self.worst: list[Wrong] = []
        """list[Wrong], the most certain wrong answers, the most certain first."""

    @property
    def right(self) -> int:
        """int, the number of right answers."""
        return int(np.trace(self.counts))

    @property
    def total(self) -> int:
        """int, the number of answers."""
        return int(self.counts.sum())

    def add(self, images: Any, scores: Any, labels: Any) -> None:
        """Add a batch: the inputs of the network, its scores for each class, and the classes.

        Raises:
            ValueError: If a class is out of range.
        """
        images, scores, labels = np.asarray(images), np.asarray(scores), np.asarray(labels)
        guesses = scores.argmax(axis=1)
        for name, found in (("labels", labels), ("answers", guesses)):
            _check_range(name, found, len(self.counts))
        self.counts += confusion(labels, guesses, len(self.counts))
        certain = probabilities(scores)[np.arange(len(guesses)), guesses]
        new = [
            Wrong(self._rows + int(n), int(labels[n]), int(guesses[n]), float(certain[n]), images[n].copy())
            for n in most_wrong(labels, guesses, certain, self._keep)
        ]
        self._rows += len(guesses)
        self.worst = _worst([*self.worst, *new], self._keep)


def _worst(answers: Sequence[Wrong], count: int) -> list[Wrong]:
    """Return at most `count` of these wrong answers, the most certain first."""
    certain = np.array([answer.probability for answer in answers])
    every = np.arange(len(answers))
    return [answers[n] for n in most_wrong(every, every + 1, certain, count)]


def _check_range(name: str, found: np.ndarray, classes: int) -> None:
    outside = found[(found < 0) | (found >= classes)]
    if len(outside):
        raise ValueError(f"For 'Answers', '{name}' must be 0 to {classes - 1}, but got {outside[0]}.")
