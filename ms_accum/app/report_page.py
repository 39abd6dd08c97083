"""Writes the report of an evaluation: one HTML file with the results, and the curves of the run.

The page has no scripts and loads no other files. Every text is escaped, because paths and records are not
trusted.
"""

from __future__ import annotations

import base64
import os
import tempfile
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any, NamedTuple

import numpy as np

from .. import _check
from ..saving.files import check_inside, write_bytes
from .plots import check_installed, curves_of, draw
from .series import Metrics

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
    """The test split, in words."""
    record: Mapping[str, Any] | None
    """The record of the model; None if it has none."""
    same_data: bool
    """Whether the record is about the same test split."""
    versions: Mapping[str, str]
    """The versions of the software that evaluates."""


def page(subject: Subject, sections: Mapping[str, str], metrics: Metrics | str) -> str:
    """Return the page about an evaluation.

    Args:
        subject (Subject): what was evaluated, and on what.
        sections (Mapping[str, str]): the results, as HTML by heading.
        metrics (Union[Metrics, str]): those of the run that trained the model, or why there are none.
    """
    title = f"Evaluation of {shown(os.path.basename(subject.path))}"
    sections = {**sections, "The run": _run(subject, metrics), "Settings and versions": _settings(subject)}
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
<p class="note">{shown(subject.model)} on {shown(subject.data)}; {shown(subject.path)}</p>
{body}
</main>
</body>
</html>
"""


def shown(value: object) -> str:
    """Return a text that is safe between tags and in attributes, without characters that are not shown."""
    return escape(_check.one_line(value, _check.LINE), quote=True)


def percent(fraction: float, digits: int = 2) -> str:
    """Return a fraction in percent."""
    return f"{100 * fraction:.{digits}f}\u00a0%"  # no line ends before the sign


def table(kind: str, label: str, caption: str, head: str, rows: Iterable[str]) -> str:
    """Return a table in a box that scrolls by itself, also by keyboard."""
    body = "\n".join(rows)
    return (
        f'<div class="scroll" role="region" aria-label="{label}" tabindex="0">\n<table class="{kind}">\n'
        f"<caption><span>{caption}</span></caption>\n<thead>{head}</thead>\n<tbody>\n{body}\n</tbody>\n</table>\n</div>"
    )


def head(*names: str) -> str:
    """Return the first row of a table."""
    cells = "".join(f'<th scope="col">{name}</th>' for name in names)
    return f"<tr>{cells}</tr>"


def data_address(png: bytes) -> str:
    """Return the address of a picture that is in the page itself."""
    return f"data:image/png;base64,{base64.b64encode(png).decode()}"


def _run(subject: Subject, metrics: Metrics | str) -> str:
    """Return the curves of the run; the model may be one from the middle of it."""
    if isinstance(metrics, str):
        return f"<p>There are no curves of the run: {shown(metrics)}.</p>"
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
        figure = f"<p>The curves are not drawn: {shown(error)}</p>"
    else:
        if mark is not None:
            note += f" The dashed line is this model, at update {mark:,}."
        address = data_address(draw([metrics], ["png"], mark=mark)["png"])
        picture = f'<img class="curves" src="{address}" alt="Curves of the run, with the values in the table below">'
        figure = f'<div class="scroll wide" role="region" aria-label="Figure" tabindex="0">{picture}</div>'
    rows = []
    for label, updates, values in curves_of(metrics):
        finite = np.isfinite(updates) & np.isfinite(values)
        updates, values = updates[finite], values[finite]
        if len(values):
            indices = (0, len(values) - 1, values.argmin(), values.argmax())
            cells = "".join(f"<td>{values[index]:,.4g} at {updates[index]:,.0f}</td>" for index in indices)
            rows.append(f'<tr><th scope="row">{label}</th>{cells}</tr>')
    names = head("Value at update", "First", "Last", "Lowest", "Highest")
    return f'<p class="note">{note}</p>\n{figure}\n' + table("curves", "Curves", "Values of the curves", names, rows)


def _settings(subject: Subject) -> str:
    # Shown above, or not about the run.
    shown_elsewhere = ("version", "correct", "total", "loss", "predicted", "characters", "vocabulary")
    facts = {name: value for name, value in (subject.record or {}).items() if name not in shown_elsewhere}
    facts.update({f"{name} of the evaluation": version for name, version in subject.versions.items()})
    rows = []
    for name, value in facts.items():
        if isinstance(value, (list, tuple)):
            value = ", ".join(f"{number:g}" for number in value)
        elif isinstance(value, int):
            value = f"{value:,}"
        label, content = shown(name.replace("_", " ")), shown("none" if value is None else value)
        rows.append(f'<tr><th scope="row">{label}</th><td>{content}</td></tr>')
    missing = "" if subject.record else "<p>The model has no record: how it was trained is not known.</p>\n"
    caption = "From the record of the model, and the versions that evaluated it"
    return missing + table("facts", "Settings and versions", caption, head("Name", "Value"), rows)


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
th:first-child,td.text,.facts td,.facts th,.positions th:last-child{text-align:left}
.matrix .zero{color:var(--muted)}
.matrix .wrong{background:rgb(var(--wrong)/var(--s))}
.matrix .right{background:rgb(var(--right)/var(--s));font-weight:700;outline:2px solid var(--text);outline-offset:-3px}
figure{margin:0;break-inside:avoid}
.gallery{display:grid;grid-template-columns:repeat(auto-fill,minmax(8.5rem,1fr));gap:1rem;list-style:none;padding:0}
.gallery img{width:8rem;height:8rem;image-rendering:pixelated;border:1px solid #d0d7de}
.gallery .note{display:block}
img.curves{width:100%;min-width:44rem;height:auto}
.sample,.line{font-family:monospace;white-space:pre-wrap;overflow-wrap:anywhere}
.sample{margin:1rem 0 0;padding:.6rem;background:var(--soft);border:1px solid #d0d7de}
.line{margin:0;line-height:1.8}
.lines{padding-left:2rem}
.lines .note{margin:0 0 .8rem}
.given{border-bottom:2px dotted var(--muted)}
.b1,.b2,.b3,.b4{border-bottom:1px solid var(--text);background:rgb(var(--wrong)/.2)}
.b2{border-bottom-width:2px;background:rgb(var(--wrong)/.45)}
.b3{border-bottom-width:4px;background:rgb(var(--wrong)/.7)}
.b4{border-bottom:4px double var(--text);background:rgb(var(--wrong));font-weight:700}
.bar{min-width:8rem}
.bar span{display:block;height:.8rem;background:rgb(var(--right))}
@media(max-width:30rem){th,td{padding:.25rem .35rem}.bar{min-width:4rem}}
@media print{.scroll{overflow:visible}img.curves{min-width:0}*{print-color-adjust:exact}}
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
