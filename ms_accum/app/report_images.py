"""The sections of a report about images: the accuracy, the classes, and the most certain wrong answers."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from .report_page import Subject, data_address, head, percent, shown, table

# The answers of a model


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


class Answers:
    """The answers of a model, collected batch by batch; of the images only those of the most certain wrong ones.

    Args:
        classes (int): number of classes.
        keep (int): number of wrong answers that are kept with their images. Default: ``24``.
    """

    def __init__(self, classes: int, keep: int = 24):
        self._keep = keep
        self._rows = 0
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
        images = np.asarray(images)
        scores = np.asarray(scores)
        labels = np.asarray(labels)
        guesses = scores.argmax(axis=1)
        classes = len(self.counts)
        for name, numbers in (("labels", labels), ("answers", guesses)):
            outside = numbers[(numbers < 0) | (numbers >= classes)]
            if len(outside):
                raise ValueError(f"For 'Answers', '{name}' must be 0 to {classes - 1}, but got {outside[0]}.")
        np.add.at(self.counts, (labels, guesses), 1)
        certain = probabilities(scores)[np.arange(len(guesses)), guesses]
        wrong = [
            Wrong(self._rows + int(n), int(labels[n]), int(guesses[n]), float(certain[n]), images[n].copy())
            for n in np.flatnonzero(labels != guesses)
        ]
        self._rows += len(guesses)
        self.worst = sorted(self.worst + wrong, key=_certainty, reverse=True)[: self._keep]


def probabilities(scores: np.ndarray) -> np.ndarray:
    """Return the softmax of each row of scores; NaN for a row in which one is NaN, or infinity is the largest."""
    scores = np.asarray(scores, np.float64)
    with np.errstate(invalid="ignore"):  # infinity minus infinity
        exponentials = np.exp(scores - scores.max(axis=1, keepdims=True))
        return exponentials / exponentials.sum(axis=1, keepdims=True)


def _certainty(wrong: Wrong) -> float:
    return -1.0 if math.isnan(wrong.probability) else wrong.probability


def interval(right: int, total: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of an accuracy, which stays within 0 and 1 for few rows, too."""
    if not total:
        return 0.0, 1.0
    z = 1.959964  # 95 % of a normal distribution are within this number of standard deviations
    accuracy = right / total
    correction = z**2 / total
    centre = (accuracy + correction / 2) / (1 + correction)
    half = math.sqrt(accuracy * (1 - accuracy) * correction + correction**2 / 4) / (1 + correction)
    return max(0.0, centre - half), min(1.0, centre + half)


# The sections


class ImageData(NamedTuple):
    """The images of a data set."""

    names: Sequence[str]
    """The names of the classes."""
    mean: Any
    """What was subtracted from the values of an image / 255: a number, or one for each channel."""
    std: Any
    """What the difference was divided by."""


def image_sections(subject: Subject, data: ImageData, answers: Answers) -> dict[str, str]:
    """Return the sections of the page, by heading."""
    return {
        "Accuracy": _accuracy(subject, answers),
        "By class": _classes(data, answers),
        "Confusion matrix": _matrix(data, answers),
        "Most certain wrong answers": _gallery(data, answers),
    }


def _accuracy(subject: Subject, answers: Answers) -> str:
    low, high = interval(answers.right, answers.total)
    counts = f"{answers.right:,} of {answers.total:,} images"
    lines = [
        f'<p class="big">{percent(answers.right / answers.total)} <small>({counts})</small></p>',
        f"<p>95\u00a0% interval: {percent(low, 1)} to {percent(high, 1)}.</p>",
        '<p class="note">Wilson\'s interval, for the choice of the test images. It does not cover other seeds.</p>',
    ]
    if subject.record and subject.record["total"]:
        right, total = subject.record["correct"], subject.record["total"]
        images = "" if subject.same_data else ", on other images"
        lines.append(f"<p>Recorded after training: {percent(right / total)} ({right:,} of {total:,}){images}.</p>")
    return "\n".join(lines)


def _classes(data: ImageData, answers: Answers) -> str:
    rows = []
    for number, (name, counts) in enumerate(zip(data.names, answers.counts)):
        total, right = counts.sum(), counts[number]
        mistakes = np.where(np.arange(len(counts)) == number, 0, counts)
        worst = int(mistakes.argmax())
        accuracy = percent(right / total, 1) if total else "no images"
        wrong = f"{shown(data.names[worst])} ({mistakes[worst]:,})" if mistakes[worst] else "none"
        cells = f'<td>{total:,}</td><td>{right:,}</td><td>{accuracy}</td><td class="text">{wrong}</td>'
        rows.append(f'<tr><th scope="row">{shown(name)}</th>{cells}</tr>')
    names = head("Class", "Images", "Right", "Accuracy", "Most frequent wrong answer")
    return table("classes", "Figures by class", "Right answers of each class", names, rows)


def _matrix(data: ImageData, answers: Answers) -> str:
    """Return the confusion matrix; mistakes have a scale of their own, or the few there are would not be seen."""
    counts = answers.counts
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    mistakes = fractions - np.diag(np.diag(fractions))
    shades = np.sqrt(mistakes / (mistakes.max() or 1.0))  # rare ones stay visible beside a frequent one
    np.fill_diagonal(shades, np.diag(fractions))
    rows = []
    for row, name in enumerate(data.names):
        cells = ""
        for column in range(len(data.names)):
            kind = "right" if column == row else "wrong" if counts[row, column] else "zero"
            shade = "" if kind == "zero" else f' style="--s:{shades[row, column]:.2f}"'
            cells += f'<td class="{kind}"{shade}>{counts[row, column]:,}</td>'
        rows.append(f'<tr><th scope="row">{shown(name)}</th>{cells}</tr>')
    span = f'<th scope="colgroup" colspan="{len(data.names)}">Predicted class</th>'
    names = f'<tr><th scope="col" rowspan="2">Class</th>{span}</tr>{head(*map(shown, data.names))}'
    caption = (
        "Images of each class (rows) by predicted class (columns). Framed, blue: right answers. Orange: mistakes. A "
        "stronger colour is a larger part of the class; mistakes have a scale of their own."
    )
    return table("matrix", "Confusion matrix", caption, names, rows)


def _gallery(data: ImageData, answers: Answers) -> str:
    if not answers.worst:
        return "<p>There is no wrong answer.</p>"
    items = []
    for wrong in answers.worst:
        label, guess = shown(data.names[wrong.label]), shown(data.names[wrong.guess])
        if math.isnan(wrong.probability):
            certainty = "no probability"
        elif wrong.probability >= 0.9995:  # of a wrong answer, never 100 %
            certainty = "over 99.9\u00a0%"
        else:
            certainty = percent(wrong.probability, 1)
        description = f"is {label}, predicted {guess}, {certainty}"
        address = data_address(_picture(wrong.image, data.mean, data.std))
        height, width = wrong.image.shape[1:]
        image = f'<img src="{address}" width="{width}" height="{height}" alt="Test image {wrong.row:,}: {description}">'
        number = f'<span class="note">image {wrong.row:,}</span>'
        items.append(f"<li><figure>{image}<figcaption>{description}{number}</figcaption></figure></li>")
    count = f"{len(answers.worst)} of {answers.total - answers.right:,} wrong answers"
    order = "those with the highest probability of the wrong class, the highest first. Images are numbered from 0."
    gallery = "\n".join(items)
    return f'<p class="note">{count}: {order}</p>\n<ul class="gallery">\n{gallery}\n</ul>'


def _picture(image: np.ndarray, mean: Any, std: Any) -> bytes:
    """Return the input of a network, before it was normalized, as a PNG file."""
    mean = np.reshape(np.asarray(mean, np.float64), (-1, 1, 1))
    std = np.reshape(np.asarray(std, np.float64), (-1, 1, 1))
    values = np.nan_to_num(np.asarray(image, np.float64) * std + mean, posinf=1.0, neginf=0.0)
    pixels = np.clip(np.rint(values * 255), 0, 255).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)).save(file, "PNG")
    return file.getvalue()
