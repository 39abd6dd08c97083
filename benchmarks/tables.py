"""The table writer: a benchmark's rows as printed tables, and lines as tables of Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import wraps
from typing import Any, Callable

Lines = Iterator[Sequence[Any]]


def part(rows: Iterable[Mapping[str, Any]], name: str) -> list:
    """Return the rows of a part."""
    return [row for row in rows if row["part"] == name]


def groups(rows: Iterable[Mapping[str, Any]], *keys: str) -> dict[tuple, list]:
    """Return the rows that have the same values of these keys, by the values, in the order of the rows."""
    grouped: dict[tuple, list] = {}
    for row in rows:
        grouped.setdefault(tuple(row[key] for key in keys), []).append(row)
    return grouped


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


def markdown(lines_of: Callable[[Any], Lines]) -> Callable[[Any], str]:
    """Make a function that yields a table's head and lines one that returns the table as Markdown."""

    @wraps(lines_of)
    def table(source: Any) -> str:
        head, *lines = lines_of(source)
        cells = [head, ["---"] * len(head), *lines]
        return "".join(f"| {' | '.join(map(str, line))} |\n" for line in cells)

    return table
