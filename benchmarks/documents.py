"""The tables of docs/: `python -m benchmarks tables` makes them from the results, and writes them between their marks.

Everything else in a document is prose. A test compares the documents with the results.
"""

from __future__ import annotations

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import performance_tables, scaling_tables
from .process import ROOT

DOCUMENTS = ROOT / "docs"
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def run(arguments: Namespace) -> None:
    """Write the tables into the documents."""
    del arguments
    made = tables()
    for path in marked():
        path.write_text(filled(path.read_text(encoding="utf-8"), made), encoding="utf-8")
        print(f"tables: {path}")


def tables() -> dict[str, str]:
    """Return all tables by the names of their marks."""
    return {**scaling_tables.tables(), **performance_tables.tables()}


def marked() -> Iterator[Path]:
    """Yield the documents that have marks."""
    for path in sorted(DOCUMENTS.rglob("*.md")):
        if MARKED.search(path.read_text(encoding="utf-8")):
            yield path


def filled(text: str, made: Mapping[str, str]) -> str:
    """Return a document with its tables made anew."""
    # The empty lines are for the site: without them its Markdown sees no table.
    return MARKED.sub(lambda found: f"{found[1]}\n{made[found[2]]}\n{found[3]}", text)
