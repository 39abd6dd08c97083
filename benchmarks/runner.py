"""The runner: it starts contenders, has them take turns, and collects the rows of a benchmark."""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Callable, TypeVar

from .contenders import Entry, start
from .process import Contender, ContenderError
from .results import part, save

T = TypeVar("T")
# By the part of the rows, or "" for all: the title, and the columns.
Tables = Mapping[str, "tuple[str, str]"]


class Session:
    """One run of a benchmark: what it has measured so far, and what becomes of it.

    Args:
        name (str): of the benchmark, and of the files with its results.
        arguments (Namespace): with `output` and `short`.
        settings (Mapping[str, Any]): to be recorded.
    """

    def __init__(self, name: str, arguments: Namespace, settings: Mapping[str, Any]):
        self.rows: list[dict[str, Any]] = []
        self.versions: dict[str, str] = {}
        self._name, self._arguments, self._settings = name, arguments, settings

    @contextmanager
    def start(self, entry: Entry, **flags: object) -> Iterator[Contender]:
        """Start a contender with these flags and record its versions; it ends with the context."""
        options = [f"--{name}={value}" for name, value in flags.items() if value is not None]
        with start(entry, *options) as contender:
            self.versions.update(contender.about.get("versions", {}))
            yield contender

    def save(self) -> Path:
        """Write the rows so far, and return the file's path."""
        return save(self._name, self._arguments.output, self.rows, self._settings, self.versions)

    def finish(self, tables: Tables, *, note: str = "") -> None:
        """Print the tables and a note below them, and write JSON."""
        for name, (title, columns) in tables.items():
            if title:
                print(f"\n{title}")
            show(part(self.rows, name) if name else self.rows, columns)
        if note:
            print(note)
        self.save()


def show(rows: Sequence[Mapping[str, Any]], columns: str) -> None:
    """Print an aligned table: "network ms:.2f" are two keys of the rows, the second one's values formatted as .2f."""
    specs = [column.partition(":")[::2] for column in columns.split()]
    lines = [[key for key, _ in specs], *([_cell(key, row.get(key), spec) for key, spec in specs] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        padded = [cell.rjust(w) if spec else cell.ljust(w) for cell, w, (_, spec) in zip(line, widths, specs)]
        print("  ".join(padded).rstrip())


def _cell(key: str, value: Any, spec: str) -> str:
    """Return the text of a value; of True it is what its column is called."""
    if isinstance(value, bool):
        return key.replace("_", " ") if value else ""
    return "-" if value is None else format(value, spec) if spec else str(value)


def alternate(rounds: int, bursts: Mapping[str, Callable[[], T]]) -> dict[str, list[T]]:
    """Run each burst once a round, A B C A B C, and return what each gave in the rounds.

    What slows the machine for a while slows them all: compare them within a round.
    """
    results: dict[str, list[T]] = {name: [] for name in bursts}
    for _ in range(rounds):
        for name, burst in bursts.items():
            results[name].append(burst())
    return results


def check_loss(contender: Contender, answer: Mapping[str, Any]) -> None:
    """Raise unless the loss of an answer is finite: NaN is faster or slower than numbers."""
    if not math.isfinite(answer["loss"]):
        raise ContenderError(f"The contender '{contender.name}' must have a finite loss, but got {answer['loss']}.")


def repeats(run: Callable[[int], float], seconds: float) -> int:
    """Compile, and return how often `run` fits into `seconds`; `run(count)` returns the seconds of `count` runs."""
    run(1)
    count = 1
    while True:
        elapsed = run(count)
        if elapsed > seconds / 4:
            return max(1, round(count * seconds / elapsed))
        count *= 4


def summary(measured: Sequence[float], name: str) -> dict[str, float]:
    """Return columns of a row: the median under this name, the least and the largest with `_min` and `_max`."""
    return {name: statistics.median(measured), f"{name}_min": min(measured), f"{name}_max": max(measured)}


def ratios(measured: Sequence[float], other: Sequence[float]) -> list[float]:
    """Return the ratio of each round."""
    return [mine / theirs for mine, theirs in zip(measured, other)]


def ratio(measured: Sequence[float], other: Sequence[float]) -> float:
    """Return the median of the rounds' ratios."""
    return statistics.median(ratios(measured, other))
