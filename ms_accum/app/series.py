"""Reads the metrics of a run, and writes them as a table. Does not import MindSpore, which takes seconds."""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .._check import one_line

FILE = "metrics.jsonl"
_NUMBERS = ("loss", "lr", "grad_norm", "samples", "seconds", "skipped")
# float32 has no numbers above 3.4e38 or below 1e-45. With more extreme ones, the arithmetic of an axis overflows.
_MAX, _MIN = 1e100, 1e-100
_MAX_COLUMNS = 200  # of a table
_FORMULA_STARTS = tuple("=+-@\uff1d\uff0b\uff0d\uff20")  # the first characters of formulas; the last four are wide
_NOT_MEASURED = ("epoch", "updates", "correct", "total", "tokens")  # the place and the counts of an evaluation


class Evaluation(NamedTuple):
    """An evaluation."""

    windows_before: int
    """The number of windows before it."""
    updates: int
    """The number of updates before it."""
    results: Mapping[str, Any]
    """Its results by name, such as ``accuracy``."""


class Metrics(NamedTuple):
    """What a run has written about its updates."""

    path: Path
    """The file."""
    windows: Sequence[Mapping[str, Any]]
    """A dict for each window, those that were skipped included."""
    evaluations: Sequence[Evaluation]

    def numbers(self, name: str) -> np.ndarray:
        """Return a field of all windows as float64: NaN where it is absent or not finite."""
        return np.array([finite(window.get(name)) for window in self.windows], np.float64)


def read(folder: str | os.PathLike[str]) -> Metrics:
    """Read the metrics of a run's folder; a last line that was cut by a kill is left out.

    Raises:
        OSError: If there is no such file.
        ValueError: If it has no updates, or a line that is empty or damaged.
    """
    path = Path(folder, FILE)
    if not path.is_file():
        reason = f"has no {FILE}" if path.parent.is_dir() else "is not a folder"
        raise FileNotFoundError(f"'{folder}' {reason}; give the folder of a run")
    windows: list[Mapping[str, Any]] = []
    evaluations = []
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            fields = _parsed(line)
            if fields is None:
                if not line.endswith(b"\n"):
                    break
                raise ValueError(f"line {number} of '{path}' is {'damaged' if line.strip() else 'empty'}")
            if "update" in fields:
                windows.append(fields)
            else:
                evaluations.append(Evaluation(len(windows), fields["updates"], fields))
    if not windows:
        raise ValueError(f"'{path}' has no updates")
    return Metrics(path, windows, evaluations)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """Return the fields of a window or of an evaluation; None if the line is damaged."""
    try:
        fields = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    if not isinstance(fields, dict) or type(fields.get("update", fields.get("updates"))) is not int:
        return None
    numbers = _NUMBERS if "update" in fields else fields
    return fields if all(isinstance(fields.get(name), (int, float, type(None))) for name in numbers) else None


def finite(value: Any) -> float:
    """Return a number as a float: NaN if it is absent, not finite, or too large, and 0 if it is too small."""
    try:
        value = math.nan if value is None else float(value)
    except OverflowError:
        return math.nan
    if abs(value) < _MIN:
        return 0.0
    return value if abs(value) < _MAX else math.nan


def table_of(metrics: Metrics) -> str:
    """Return, as CSV, a row for each window, in which an evaluation is in the row of the window before it.

    Raises:
        ValueError: If it would have more columns than a run writes: its cells are lines times names.
    """
    results_by_window: dict[int, dict[str, Any]] = {}
    for evaluation in metrics.evaluations:
        results = {name: value for name, value in evaluation.results.items() if name not in _NOT_MEASURED}
        results_by_window.setdefault(evaluation.windows_before - 1, {}).update(results)
    rows = [{**window, **results_by_window.get(number, {})} for number, window in enumerate(metrics.windows)]
    names: dict[str, None] = {}  # in the order in which they appear first, those of windows before all others
    for row in (*metrics.windows, *results_by_window.values()):
        names.update(dict.fromkeys(row))
    if len(names) > _MAX_COLUMNS:
        raise ValueError(f"'{metrics.path}' has {len(names):,} names of values; a table has at most {_MAX_COLUMNS}")
    text = io.StringIO()
    table = csv.writer(text, lineterminator="\n")
    table.writerow(map(_text_cell, names))
    table.writerows([_cell(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def _cell(value: Any) -> Any:
    """Return a value for a table: as in JSON, but empty where there is no number."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, float) or type(value) is int:
        return value
    return _text_cell(value if isinstance(value, str) else json.dumps(value))


def _text_cell(text: str) -> str:
    """Return a text for a table: one visible line, which spreadsheets do not take for a formula."""
    shown = one_line(text)
    return f"'{shown}" if shown.lstrip()[:1] in _FORMULA_STARTS else shown
