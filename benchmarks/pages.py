"""The tables of the pages: `python -m benchmarks tables` writes their rows from the results.

A page says where a table is, and has its words: the head and all sentences, in its language. What is written here are
the rows, in which names and figures are the same in all languages. A test compares them with the results.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from . import curves, ranks
from .conformance import page
from .contenders import OURS, TUNED
from .process import ROOT
from .results import groups, part, records, rows

MACHINES = ("avx512-amd", "avx512-intel", "avx2-amd")
HERE = MACHINES[0]
"""str, the machine that the pages are about; the others are below, as history."""
_TORCH = ("torch", "torch-compile")
_PIECES = {
    "accumulating micro-batch / plain": "accumulate",
    "update / plain with optimizer": "update",
    "driver / its Cells": "window, driver",
    "skip_micro": "windows, skip_micro",
    "dynamic loss scale": "windows, dynamic loss scale",
    "EMA": "windows, average",
    "two terms / one number": "windows, two terms",
    "driver in default mode / graph mode": "windows, default mode",
    "`Model` in default mode / graph mode": "Model, default mode",
    "plain loop with `Accumulator` / without": "loop, Accumulator",
}
PROGRAMS = {
    "train": ("train.py",),
    "eval": ("eval.py",),
    "launch": ("-m", "ms_accum.launch"),
    "plot": ("-m", "ms_accum.plot"),
    "selftest": ("-m", "ms_accum.selftest"),
}
# Of a table, its head stays as it is.
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n\n)((?:\|[^\n]*\n){2})?.*?(\n<!-- end -->)", re.DOTALL)

Rows = Sequence[Mapping[str, Any]]
Lines = Iterator[Sequence[Any]]


def run(arguments: Namespace) -> None:
    """Write the tables into the pages, and draw the curves."""
    del arguments
    made = {**tables(), **helps()}
    for path in pages():
        path.write_text(filled(path.read_text(encoding="utf-8"), made), encoding="utf-8")
        print(f"tables: {path}")
    curves.draw(rows(HERE, "curves"), ROOT / "docs" / "images" / "equal_curves.svg")


def pages() -> list[Path]:
    """Return the pages that have marks."""
    paths = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
    return [path for path in paths if _MARKED.search(path.read_text(encoding="utf-8"))]


def filled(text: str, made: Mapping[str, str]) -> str:
    """Return a page with the rows of its tables made anew."""
    return _MARKED.sub(lambda match: f"{match[1]}{match[3] or ''}{made[match[2]]}{match[4]}", text)


def tables() -> dict[str, str]:
    """Return the rows of all tables by the names of their marks."""
    of_ranks, of_curves = rows(HERE, "ranks"), rows(HERE, "curves")
    lines = {
        "cost": _cost_of_all(),
        "ratios": _ratios(rows(HERE, "speed")),
        "curves": _curves(of_curves),
        "scaling/time": _times_of_ranks(part(of_ranks, "time")),
        "scaling/memory": _memory_of_ranks(part(of_ranks, "memory")),
        **page.tables(),
    }
    for machine in MACHINES:
        lines[f"{machine}/speed"] = _speed(rows(machine, "speed"))
        lines[f"{machine}/cost"] = _cost(rows(machine, "cost"))
        lines[f"{machine}/memory"] = _memory(rows(machine, "memory"))
        lines[f"{machine}/growth"] = _growth(rows(machine, "memory"))
        lines[f"{machine}/accuracy"] = _accuracy(rows(machine, "accuracy"))
        lines[f"{machine}/runs"] = _runs(machine)
    return {name: "".join(f"| {' | '.join(map(str, line))} |\n" for line in table) for name, table in lines.items()}


def helps() -> dict[str, str]:
    """Return what the programs print about their flags, in the width of a page."""
    environment = {**os.environ, "COLUMNS": "100", "PYTHONPATH": str(ROOT)}
    made = {}
    for name, command in PROGRAMS.items():
        done = subprocess.run(
            [sys.executable, *command, "--help"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
        )
        text = done.stdout.replace("\noptional arguments:\n", "\noptions:\n")  # Python 3.9
        made[f"help/{name}"] = f"```text\n{text}```\n"
    return made


def _speed(measured: Rows) -> Lines:
    """The best start, and in brackets the worst where there were several."""
    panels = [mine for (_, window), mine in groups(measured, "network", "window").items() if window in (4, 16)]
    for (name,) in groups(measured, "contender"):
        found = [next((row for row in mine if row["contender"] == name), None) for mine in panels]
        yield [name, *("-" if row is None else f"{row['ms']:,.1f}{_worst(row)}" for row in found)]


def _worst(row: Mapping[str, Any]) -> str:
    return f" ({row['ms_worst']:,.1f})" if "ms_worst" in row else ""


def _ratios(measured: Rows) -> Lines:
    """Ours, and by how much longer it takes than the fastest of MindSpore's own ways, equally set, and of PyTorch."""
    for (network, window), mine in groups(measured, "network", "window").items():
        times = {row["contender"]: row["ms"] for row in mine}
        fastest = [min(times[name] for name in names) for names in (TUNED, _TORCH)]
        yield [network, window, f"{times[OURS]:.1f}", *(f"{times[OURS] / other:.2f}" for other in fastest)]


def _cost(measured: Rows) -> Lines:
    columns = [{row["piece"]: row for row in mine} for mine in groups(measured, "network").values()]
    yield ["plain, ms", *(f"{pieces['plain']['ms']:.2f}" for pieces in columns)]
    for name, piece in _PIECES.items():
        if all(piece in pieces for pieces in columns):
            yield [name, *(f"{pieces[piece]['ratio']:.2f}" for pieces in columns)]


def _cost_of_all() -> Lines:
    """What accumulating costs, from the machine where it is the least to the one where it is the most."""
    measured = [row for machine in MACHINES for row in rows(machine, "cost")]
    for (network,), mine in groups(measured, "network").items():
        ratios = [[row["ratio"] for row in mine if row["piece"] == piece] for piece in ("accumulate", "update")]
        yield [network, *(f"{min(each):.2f}–{max(each):.2f}" for each in ratios)]


def _memory(measured: Rows) -> Lines:
    """Of the windows; in brackets model sizes beyond the same contender's window of 1."""
    shown = [row for row in measured if "more_sets" in row and row["batch"] == measured[0]["batch"]]
    for (name,), mine in groups(shown, "contender").items():
        yield [name, *(f"{row['peak_mib']:,.0f}" + _more(row) for row in mine)]


def _more(row: Mapping[str, Any]) -> str:
    return f" ({row['more_sets']:+.2f})" if row["window"] > 1 else ""


def _growth(measured: Rows) -> Lines:
    """Ours with the window's rows in one micro-batch, and after many micro-batches."""
    for row in measured:
        if "more_sets" not in row or row["batch"] != measured[0]["batch"]:
            yield [row["network"], row["batch"], f"{row['micro_batches']:,}", f"{row['peak_mib']:,.0f}"]


def _accuracy(measured: Rows) -> Lines:
    for row in part(measured, "summary"):
        yield [row["contender"], f"{row['goal_s']:,.0f}", f"{row['all_s']:,.0f}", f"{row['accuracy']:.2%}"]


def _runs(machine: str) -> Lines:
    """When, where and with what each benchmark ran."""
    for record in records(machine):
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if name != "ms_accum")
        about = record["machine"]
        yield [record["benchmark"], record["date"][:10], f"{about['cores']} x {about['cpu']}", versions]


def _curves(measured: Rows) -> Lines:
    for (way,), mine in groups(part(measured, "run"), "way").items():
        yield [way, *(f"{row['validation']:.4f}" for row in mine), f"{max(row['difference'] for row in mine):.1e}"]


def _times_of_ranks(measured: Rows) -> Lines:
    """Ratios to one process."""
    for key, mine in groups(measured, "network", "ranks", "window").items():
        by_way = {row["way"]: row for row in mine}
        ratios = (f"{by_way[way]['ratio']:.2f}" for way in ranks.WAYS)
        yield [*key, f"{by_way[ranks.ONE]['ms']:,.0f}", *ratios]


def _memory_of_ranks(measured: Rows) -> Lines:
    for row in measured:
        yield [row["ranks"], row["way"], f"{row['peak_mib']:,.0f}", *(f"{row[name]:.2f}" for name in ranks.KEPT)]
