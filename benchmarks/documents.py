"""The tables of README and docs/: `python -m benchmarks tables` makes them from the results.

It writes them between their marks; everything else in a document is prose. A test compares them with the results.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path

from . import curves, performance_tables, ranks, splits
from .conformance import page
from .process import ROOT

PROGRAMS = {
    "train": ("train.py",),
    "eval": ("eval.py",),
    "launch": ("-m", "ms_accum.launch"),
    "plot": ("-m", "ms_accum.plot"),
    "selftest": ("-m", "ms_accum.selftest"),
}
MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def run(arguments: Namespace) -> None:
    """Write the tables into the documents."""
    del arguments
    made = tables()
    for path in marked():
        path.write_text(filled(path.read_text(encoding="utf-8"), made), encoding="utf-8")
        print(f"tables: {path}")
    folder = ROOT / "docs" / "images"
    for name, picture in pictures().items():
        (folder / name).write_text(picture, encoding="utf-8")
        print(f"picture: {folder / name}")
    page.plot_curves(folder)


def pictures() -> dict[str, str]:
    """Return the pictures that are made of results, by the names of their files."""
    return {**page.pictures(), **curves.pictures(), **splits.pictures()}


def tables() -> dict[str, str]:
    """Return all tables, and the programs' help, by the names of their marks."""
    helps = {f"help/{name}": _help(*command) for name, command in PROGRAMS.items()}
    return {**performance_tables.tables(), **ranks.tables(), **curves.tables(), **page.tables(), **helps}


def _help(*command: str) -> str:
    """Return what a program prints about its flags, in the width of a page."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *command, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    text = done.stdout.replace("\noptional arguments:\n", "\noptions:\n")  # Python 3.9
    return f"```text\n{text}```\n"


def marked() -> Iterator[Path]:
    """Yield the documents that have marks."""
    for path in sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")]):
        if MARKED.search(path.read_text(encoding="utf-8")):
            yield path


def filled(text: str, made: Mapping[str, str]) -> str:
    """Return a document with its tables made anew."""
    # The empty lines are for the site: without them its Markdown sees no table.
    return MARKED.sub(lambda match: f"{match[1]}\n{made[match[2]]}\n{match[3]}", text)
