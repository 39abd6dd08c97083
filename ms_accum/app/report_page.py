"""Writes the report of an evaluation: one HTML file with the accuracy, the mistakes, and the curves of the run.

The page has no scripts and loads no other files. Every text is escaped, because paths and records are not
trusted.
"""

from __future__ import annotations

import base64
import io
import math
import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from .. import _check
from ..saving.files import check_inside, write_bytes
from .plots import check_installed, curves_of, draw
from .series import Metrics

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


# The page

MARK = "<!-- ms_accum: report of an evaluation. The next report replaces a file that begins with this line. -->"
"""str, the first line of each page, by which it is recognized."""
# Nothing is loaded and nothing is run, whatever a text in the page may hold.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'"


class Subject(NamedTuple):
    """What was evaluated, and on what."""

    path: str
    """The file of the model."""
    model: str
    """The name of the model."""
    data: str
    """The test images, in words."""
    names: Sequence[str]
    """The names of the classes."""
    mean: Any
    """What was subtracted from the values of an image / 255: a number, or one for each channel."""
    std: Any
    """What the difference was divided by."""
    record: Mapping[str, Any] | None
    """The record of the model; None if it has none."""
    same_data: bool
    """Whether the record is about the same test images."""
    versions: Mapping[str, str]
    """The versions of the software that evaluates."""


def page(subject: Subject, answers: Answers, metrics: Metrics | str) -> str:
    """Return the page about an evaluation.

    Args:
        subject (Subject): what was evaluated, and on what.
        answers (Answers): the answers of the model.
        metrics (Union[Metrics, str]): those of the run that trained it, or why there are none.
    """
    title = f"Evaluation of {_text(os.path.basename(subject.path))}"
    sections = {
        "Accuracy": _accuracy(subject, answers),
        "By class": _classes(subject, answers),
        "Confusion matrix": _matrix(subject, answers),
        "Most certain wrong answers": _gallery(subject, answers),
        "The run": _run(subject, metrics),
        "Settings and versions": _settings(subject),
    }
    body = "\n".join(f"<section>\n<h2>{name}</h2>\n{content}\n</section>" for name, content in sections.items())
    return f"""{MARK}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{STYLE}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="note">{_text(subject.model)} on {_text(subject.data)}; {_text(subject.path)}</p>
{body}
</main>
</body>
</html>
"""


def _text(value: object) -> str:
    """Return a text that is safe between tags and in attributes, without characters that are not shown."""
    return escape(_check.one_line(value, _check.LINE), quote=True)


def _percent(fraction: float, digits: int = 2) -> str:
    return f"{100 * fraction:.{digits}f}\u00a0%"  # no line ends before the sign


def _table(kind: str, label: str, caption: str, head: str, rows: Iterable[str]) -> str:
    """Return a table in a box that scrolls by itself, also by keyboard."""
    body = "\n".join(rows)
    return (
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0">\n<table class="{kind}">\n'
        f"<caption><span>{caption}</span></caption>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _head(*names: str) -> str:
    cells = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f"<tr>{cells}</tr>"


def _accuracy(subject: Subject, answers: Answers) -> str:
    low, high = interval(answers.right, answers.total)
    counts = f"{answers.right:,} of {answers.total:,} images"
    lines = [
        f'<p class="big">{_percent(answers.right / answers.total)} <small>({counts})</small></p>',
        f"<p>95\u00a0% interval: {_percent(low, 1)} to {_percent(high, 1)}.</p>",
        '<p class="note">Wilson\'s interval, for the choice of the test images. It does not cover other seeds.</p>',
    ]
    if subject.record and subject.record["total"]:
        right, total = subject.record["correct"], subject.record["total"]
        images = "" if subject.same_data else ", on other images"
        lines.append(f"<p>Recorded after training: {_percent(right / total)} ({right:,} of {total:,}){images}.</p>")
    return "\n".join(lines)


def _classes(subject: Subject, answers: Answers) -> str:
    rows = []
    for number, (name, counts) in enumerate(zip(subject.names, answers.counts)):
        total, right = counts.sum(), counts[number]
        mistakes = np.where(np.arange(len(counts)) == number, 0, counts)
        worst = int(mistakes.argmax())
        accuracy = _percent(right / total, 1) if total else "no images"
        wrong = f"{_text(subject.names[worst])} ({mistakes[worst]:,})" if mistakes[worst] else "none"
        cells = f'<td>{total:,}</td><td>{right:,}</td><td>{accuracy}</td><td class="text">{wrong}</td>'
        rows.append(f'<tr><th scope="row">{_text(name)}</th>{cells}</tr>')
    head = _head("Class", "Images", "Right", "Accuracy", "Most frequent wrong answer")
    return _table("classes", "Figures by class", "Right answers of each class", head, rows)


def _matrix(subject: Subject, answers: Answers) -> str:
    """Return the confusion matrix; mistakes have a scale of their own, or the few there are would not be seen."""
    counts = answers.counts
    fractions = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    mistakes = fractions - np.diag(np.diag(fractions))
    shades = np.sqrt(mistakes / (mistakes.max() or 1.0))  # rare ones stay visible beside a frequent one
    np.fill_diagonal(shades, np.diag(fractions))
    rows = []
    for row, name in enumerate(subject.names):
        cells = ""
        for column in range(len(subject.names)):
            kind = "right" if column == row else "wrong" if counts[row, column] else "zero"
            shade = "" if kind == "zero" else f' style="--s:{shades[row, column]:.2f}"'
            cells += f'<td class="{kind}"{shade}>{counts[row, column]:,}</td>'
        rows.append(f'<tr><th scope="row">{_text(name)}</th>{cells}</tr>')
    span = f'<th scope="colgroup" colspan="{len(subject.names)}">Predicted class</th>'
    head = f'<tr><th scope="col" rowspan="2">Class</th>{span}</tr>{_head(*map(_text, subject.names))}'
    caption = (
        "Images of each class (rows) by predicted class (columns). Framed, blue: right answers. Orange: mistakes. A "
        "stronger colour is a larger part of the class; mistakes have a scale of their own."
    )
    return _table("matrix", "Confusion matrix", caption, head, rows)


def _gallery(subject: Subject, answers: Answers) -> str:
    if not answers.worst:
        return "<p>There is no wrong answer.</p>"
    items = []
    for wrong in answers.worst:
        label, guess = _text(subject.names[wrong.label]), _text(subject.names[wrong.guess])
        if math.isnan(wrong.probability):
            certainty = "no probability"
        elif wrong.probability >= 0.9995:  # of a wrong answer, never 100 %
            certainty = "over 99.9\u00a0%"
        else:
            certainty = _percent(wrong.probability, 1)
        description = f"is {label}, predicted {guess}, {certainty}"
        address = _data_address(_picture(wrong.image, subject.mean, subject.std))
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


def _data_address(png: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _run(subject: Subject, metrics: Metrics | str) -> str:
    """Return the curves of the run; the model may be one from the middle of it."""
    if isinstance(metrics, str):
        return f"<p>There are no curves of the run: {_text(metrics)}.</p>"
    updates = metrics.numbers("update")
    last = updates[np.isfinite(updates)].max(initial=0)
    model_update = subject.record["updates"] if subject.record else last
    mark = model_update if model_update < last else None
    skipped = sum(window.get("skipped") is True for window in metrics.windows)
    note = f"From <code>metrics.jsonl</code> beside the model, up to update {last:,.0f}."
    if skipped:
        note += f" Windows skipped: {skipped:,}."
    try:
        check_installed()
    except ImportError as error:
        figure = f"<p>The curves are not drawn: {_text(error)}</p>"
    else:
        if mark is not None:
            note += f" The dashed line is this model, at update {mark:,}."
        address = _data_address(draw([metrics], ["png"], mark=mark)["png"])
        figure = f'<img class="curves" src="{address}" alt="Curves of the run, with the values in the table below">'
    rows = []
    for label, updates, values in curves_of(metrics):
        finite = np.isfinite(updates) & np.isfinite(values)
        updates, values = updates[finite], values[finite]
        if len(values):
            indices = (0, len(values) - 1, values.argmin(), values.argmax())
            cells = "".join(f"<td>{values[index]:,.4g} at {updates[index]:,.0f}</td>" for index in indices)
            rows.append(f'<tr><th scope="row">{label}</th>{cells}</tr>')
    head = _head("Value at update", "First", "Last", "Lowest", "Highest")
    return f'<p class="note">{note}</p>\n{figure}\n' + _table("curves", "Curves", "Values of the curves", head, rows)


def _settings(subject: Subject) -> str:
    shown_elsewhere = ("version", "correct", "total")  # shown above, or not about the run
    facts = {name: value for name, value in (subject.record or {}).items() if name not in shown_elsewhere}
    facts.update({f"{name} of the evaluation": version for name, version in subject.versions.items()})
    rows = []
    for name, value in facts.items():
        if isinstance(value, (list, tuple)):
            value = ", ".join(f"{number:g}" for number in value)
        elif isinstance(value, int):
            value = f"{value:,}"
        label, shown = _text(name.replace("_", " ")), _text("none" if value is None else value)
        rows.append(f'<tr><th scope="row">{label}</th><td>{shown}</td></tr>')
    missing = "" if subject.record else "<p>The model has no record: how it was trained is not known.</p>\n"
    caption = "From the record of the model, and the versions that evaluated it"
    return missing + _table("facts", "Settings and versions", caption, _head("Name", "Value"), rows)


# All texts have a contrast of at least 4.5 to 1. Blue and orange differ in all kinds of colour vision, and nothing
# is shown by its colour alone.
STYLE = """
:root{--page:#ffffff;--text:#1b1f24;--muted:#59616b;--soft:#f4f6f8;--right:127 178 240;--wrong:246 163 92}
body{max-width:64rem;margin:0 auto;padding:1rem;background:var(--page);color:var(--text);font:16px/1.5 sans-serif}
h1,p,.facts{overflow-wrap:anywhere}
h2{margin-top:2.5rem}
.note,caption{color:var(--muted);text-align:left}
.big{font-size:2rem;margin:0}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.3rem .6rem;border:1px solid #d0d7de;text-align:right}
th{background:var(--soft)}
th:first-child,td.text,.facts td{text-align:left}
.matrix .zero{color:var(--muted)}
.matrix .wrong{background:rgb(var(--wrong)/var(--s))}
.matrix .right{background:rgb(var(--right)/var(--s));font-weight:700;outline:2px solid var(--text);outline-offset:-3px}
figure{margin:0;break-inside:avoid}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.5rem,1fr));gap:1rem;list-style:none;padding:0}
.gallery img{width:8rem;height:8rem;image-rendering:pixelated;border:1px solid #d0d7de}
.gallery .note{display:block}
.curves{max-width:100%;height:auto}
@media print{.scroll{overflow:visible}*{print-color-adjust:exact}}
"""


# The file


def report_path(folder: str) -> str:
    """Return the path of the page in a folder, which is made if it is missing.

    Raises:
        OSError: If the folder can't be made, or written to, or the page would be a link out of it.
        ValueError: If there is a file of that name that is not such a page.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise OSError(f"'{folder}' can't be made: {error.strerror}") from error
    path = os.path.join(folder, "report.html")
    check_inside(folder, path)
    _check_replaceable(path)
    try:
        tempfile.TemporaryFile(dir=os.path.dirname(os.path.realpath(path))).close()
    except OSError as error:
        raise OSError(f"'{folder}' can't be written to: {error.strerror}") from error
    return path


def write_page(path: str, text: str) -> None:
    """Write a page in one step: at every moment there is the complete earlier page, or the complete new one.

    Raises:
        OSError: If it can't be written; an earlier page is unchanged.
        ValueError: If there is a file of that name that is not such a page.
    """
    _check_replaceable(path)
    write_bytes(path, text.encode("utf-8", "backslashreplace"))  # a path need not be UTF-8


def _check_replaceable(path: str) -> None:
    is_report = not os.path.exists(path)
    if os.path.isfile(path):
        with open(path, "rb") as file:
            is_report = file.read(len(MARK)) == MARK.encode()
    if not is_report:
        raise ValueError(f"'{path}' exists and is no report of eval.py; give another folder")
