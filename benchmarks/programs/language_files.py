"""The files with which all programs of the benchmark `language` begin. NumPy is all that reading them takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Columns = tuple[np.ndarray, np.ndarray]


class Start(NamedTuple):
    """What a run begins with."""

    windows: Sequence[Columns]
    """The tokens and the targets of each update, -100 for padding."""
    test: Columns
    """All blocks of the test split."""
    weights: Mapping[str, np.ndarray]
    """By their names in MindSpore."""
    rates: Sequence[float]
    """The learning rate of each update."""
    recipe: Mapping[str, Any]
    """The other numbers of the recipe."""


def write(folder: str | Path, start: Start) -> None:
    """Write the files."""
    rows = [len(tokens) for tokens, _ in start.windows]  # an epoch's last window is shorter
    columns = [np.concatenate(column) for column in zip(*start.windows)]
    np.savez(Path(folder, "text.npz"), *columns, *start.test, rows=rows, rates=start.rates)
    np.savez(Path(folder, "weights.npz"), **start.weights)
    Path(folder, "recipe.json").write_text(json.dumps(start.recipe), encoding="utf-8")


def read(folder: str | Path) -> Start:
    """Return what was written."""
    text, weights = np.load(Path(folder, "text.npz")), np.load(Path(folder, "weights.npz"))
    tokens, targets, *test = (text[f"arr_{number}"] for number in range(4))
    ends = np.cumsum(text["rows"])[:-1]
    windows = list(zip(np.split(tokens, ends), np.split(targets, ends)))
    recipe = json.loads(Path(folder, "recipe.json").read_text(encoding="utf-8"))
    return Start(windows, (test[0], test[1]), dict(weights), text["rates"].tolist(), recipe)


def parts(columns: Columns, rows: int) -> list[Columns]:
    """Return the columns in pieces of so many rows."""
    tokens, targets = columns
    return [(tokens[first : first + rows], targets[first : first + rows]) for first in range(0, len(tokens), rows)]


def predicted(targets: np.ndarray) -> int:
    """Return the number of targets that are not padding."""
    return int((targets >= 0).sum())
