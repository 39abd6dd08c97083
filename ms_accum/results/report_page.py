"""What does the page about an evaluation show?

The page is one HTML file without scripts and without addresses of other files. Every text that is put in is escaped:
paths and records may be a stranger's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from .. import _check
from .charts import data_address, line_chart, pixels
from .diagnosis import Answers, Wrong, by_class, interval
from .report_file import MARK
from .report_style import style
from .series import Metrics, finite

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
    """What was subtracted from the values of an image / 255."""
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
    sections = (
        ("Accuracy", _accuracy(subject, answers)),
        ("By class", _classes(subject, answers)),
        ("Confusion matrix", _matrix(subject, answers)),
        ("Most certain wrong answers", _gallery(subject, answers)),
        ("The run", _run(subject, metrics)),
        ("Settings and versions", _settings(subject)),
    )
    body = "\n".join(f"<section>\n<h2>{name}</h2>\n{content}\n</section>" for name, content in sections)
    return f"""{MARK}
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style()}</style>
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


def _percent(part: float, digits: int = 2) -> str:
    return f"{100 * part:.{digits}f}\u00a0%"  # no line ends before the sign


def _certainty(probability: float) -> str:
    """Return the probability of a wrong answer as text, which is never 100 %."""
    if np.isnan(probability):
        return "no probability"
    if probability >= 0.9995:
        return "over 99.9\u00a0%"
    return _percent(probability, 1)


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
        others = "" if subject.same_data else ", on other images"
        lines.append(f"<p>Recorded after training: {_percent(right / total)} ({right:,} of {total:,}){others}.</p>")
    return "\n".join(lines)


def _table(caption: str, head: str, rows: Iterable[str], *, kind: str, label: str) -> str:
    """Return a table in a box that scrolls by itself, also by keyboard."""
    body = "\n".join(rows)
    return (
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0">\n<table class="{kind}">\n'
        f"<caption><span>{caption}</span></caption>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def _classes(subject: Subject, answers: Answers) -> str:
    names = subject.names
    rows = []
    for name, found in zip(names, by_class(answers.counts)):
        accuracy = "no images" if found.accuracy is None else _percent(found.accuracy, 1)
        wrong = "none" if found.mistaken_for is None else f"{_text(names[found.mistaken_for])} ({found.times:,})"
        cells = f"<td>{found.rows:,}</td><td>{found.right:,}</td><td>{accuracy}</td>"
        rows.append(f'<tr><th scope="row">{_text(name)}</th>{cells}<td class="text">{wrong}</td></tr>')
    columns = ("Images", "Right", "Accuracy")
    head = '<tr><th scope="col" class="text">Class</th>' + "".join(f'<th scope="col">{each}</th>' for each in columns)
    head += '<th scope="col" class="text">Most frequent wrong answer</th></tr>'
    return _table("Right answers of each class", head, rows, kind="classes", label="Figures by class")


def _matrix(subject: Subject, answers: Answers) -> str:
    """Return the confusion matrix; mistakes have a scale of their own, or the few there are would not be seen."""
    parts = answers.counts / np.maximum(answers.counts.sum(axis=1, keepdims=True), 1)
    mistakes = parts - np.diag(np.diag(parts))
    shades = np.sqrt(mistakes / (mistakes.max() or 1.0))  # rare ones stay visible beside a frequent one
    np.fill_diagonal(shades, np.diag(parts))
    columns = "".join(f'<th scope="col">{_text(name)}</th>' for name in subject.names)
    span = f'<th scope="colgroup" colspan="{len(subject.names)}">Predicted class</th>'
    head = f'<tr><th scope="col" rowspan="2" class="text">Class</th>{span}</tr><tr>{columns}</tr>'
    rows = []
    for number, name in enumerate(subject.names):
        cells = (_cell(answers.counts[number], shades[number], other, number) for other in range(len(subject.names)))
        rows.append(f'<tr><th scope="row">{_text(name)}</th>{"".join(cells)}</tr>')
    caption = (
        "Images of each class (rows) by predicted class (columns). Framed, blue: right answers. Orange: mistakes. A "
        "stronger colour is a larger part of the class; mistakes have a scale of their own."
    )
    return _table(caption, head, rows, kind="matrix", label="Confusion matrix")


def _cell(counts: np.ndarray, shades: np.ndarray, column: int, row: int) -> str:
    kind = "right" if column == row else "wrong" if counts[column] else "zero"
    shade = "" if kind == "zero" else f' style="--s:{shades[column]:.2f}"'
    return f'<td class="{kind}"{shade}>{counts[column]:,}</td>'


def _gallery(subject: Subject, answers: Answers) -> str:
    if not answers.worst:
        return "<p>There is no wrong answer.</p>"
    what = f"{len(answers.worst)} of {answers.total - answers.right:,} wrong answers"
    order = "those with the highest probability of the wrong class, the highest first. Images are numbered from 0."
    items = "\n".join(_wrong(subject, each) for each in answers.worst)
    return f'<p class="note">{what}: {order}</p>\n<ul class="gallery">\n{items}\n</ul>'


def _wrong(subject: Subject, wrong: Wrong) -> str:
    label, guess = (_text(subject.names[each]) for each in (wrong.label, wrong.guess))
    words = f"is {label}, predicted {guess}, {_certainty(wrong.probability)}"
    picture = data_address(pixels(wrong.image, subject.mean, subject.std))
    height, width = wrong.image.shape[1:]
    image = f'<img src="{picture}" width="{width}" height="{height}" alt="Test image {wrong.row:,}: {words}">'
    number = f'<span class="note">image {wrong.row:,}</span>'
    return f"<li><figure>{image}<figcaption>{words}{number}</figcaption></figure></li>"


def _run(subject: Subject, metrics: Metrics | str) -> str:
    """Return the curves of the run; the model may be one from the middle of it."""
    if isinstance(metrics, str):
        return f"<p>There are no curves of the run: {_text(metrics)}.</p>"
    evaluations = [(each.updates, each.results.get("accuracy")) for each in metrics.evaluations]
    drawn = (
        ("Loss", "the mean of each window", _of_windows(metrics, "loss")),
        ("Learning rate", "", _of_windows(metrics, "lr")),
        ("Gradient norm", "before clipping", _of_windows(metrics, "grad_norm")),
        ("Accuracy", "of evaluations during the run", _finite(evaluations)),
    )
    last = max((points[-1][0] for *_, points in drawn if points), default=0.0)
    at = subject.record["updates"] if subject.record else last
    mark = at if at < last else None
    figures = [_figure(name, words, points, mark) for name, words, points in drawn if points]
    skipped = sum(window.get("skipped") is True for window in metrics.windows)
    note = f"From <code>metrics.jsonl</code> beside the model, up to update {last:,.0f}."
    note += f" Windows skipped: {skipped:,}." if skipped else ""
    note += f" The dashed line is this model, at update {mark:,}." if mark is not None else ""
    return f'<p class="note">{note}</p>\n<div class="charts">\n{"".join(figures)}</div>'


def _of_windows(metrics: Metrics, name: str) -> list[tuple[float, float]]:
    updates = [window["update"] for window in metrics.windows]
    return _finite(list(zip(updates, metrics.numbers(name).tolist())))


def _finite(points: Sequence[tuple[Any, Any]]) -> list[tuple[float, float]]:
    """Return what can be drawn of these pairs of update and value, in the order of the updates."""
    found = [(float(x), finite(y)) for x, y in points if 0 <= x < 2**53]
    return sorted((point for point in found if not np.isnan(point[1])), key=lambda point: point[0])


def _figure(name: str, words: str, points: Sequence[tuple[float, float]], mark: float | None) -> str:
    note = f' <span class="note">({words})</span>' if words else ""
    return f"<figure><figcaption>{name}{note}</figcaption>{line_chart(name, points, mark=mark)}</figure>\n"


_LABELS = {
    "dataset": "data set",
    "data": "fingerprint of the training images",
    "test_data": "fingerprint of the test images",
    "rows": "training images",
    "image_size": "side of the images",
    "lr": "learning rate",
    "batch_size": "rows of a micro-batch",
    "mini_steps": "micro-batches in a window",
    "effective_batch": "rows of a window, if given",
    "ranks": "processes",
    "skipped": "skipped windows",
    "zero": "ZeRO stage",
    "ms_accum": "ms_accum",
}
_SHOWN_ABOVE = ("version", "correct", "total")


def _settings(subject: Subject) -> str:
    here = {f"{name}, evaluation": version for name, version in subject.versions.items()}
    record = {name: value for name, value in (subject.record or {}).items() if name not in _SHOWN_ABOVE}
    named = {_LABELS.get(name, name.replace("_", " ")): value for name, value in record.items()}
    rows = [_fact(name, value) for name, value in {**named, **here}.items()]
    missing = "" if subject.record else "<p>The model has no record: how it was trained is not known.</p>\n"
    head = '<tr><th scope="col">Name</th><th scope="col">Value</th></tr>'
    caption = "From the record of the model, and the versions that evaluated it"
    return missing + _table(caption, head, rows, kind="facts", label="Settings and versions")


def _fact(name: str, value: Any) -> str:
    if isinstance(value, (list, tuple)):
        value = ", ".join(f"{each:g}" for each in value)
    elif isinstance(value, int):
        value = f"{value:,}"
    return f'<tr><th scope="row">{_text(name)}</th><td>{"none" if value is None else _text(value)}</td></tr>'
