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

from . import ranks
from .conformance import page
from .contenders import OURS, TUTORIALS
from .process import ROOT
from .results import code, groups, part, records, rows

# With what our time is compared: the faster contender of each kind.
_OTHERS = {
    "tutorials": (*TUTORIALS, "tutorial-2.x"),
    "torch": ("torch", "torch-compile"),
    "jax": ("jax-multisteps", "jax-scan"),
}
_NAMES = {"lenet5": "LeNet5", "mlp": "MLP", "transformer": "Transformer", "mlp50m": "MLP of 50 million"}
_PIECES = {
    "plain without the branch / with it": "plain, without our branch",
    "accumulating micro-batch / plain": "accumulate",
    "update / plain with optimizer": "update",
    "the same without C++ operators": "update, without C++ operators",
    "driver with its updates / plain": "window, driver",
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
    "plot": ("-m", "programs.plot"),
    "selftest": ("-m", "ms_accum.selftest"),
}
# Of a table, its head stays as it is.
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n\n)((?:\|[^\n]*\n){2})?.*?(\n<!-- end -->)", re.DOTALL)

Rows = Sequence[Mapping[str, Any]]
Lines = Iterator[Sequence[Any]]


def run(arguments: Namespace) -> None:
    """Write the tables into the pages."""
    del arguments
    made = {**tables(), **helps()}
    for path in pages():
        path.write_text(filled(path.read_text(encoding="utf-8"), made), encoding="utf-8")
        print(f"tables: {path}")


def pages() -> list[Path]:
    """Return the pages that have marks."""
    paths = sorted([*ROOT.glob("README*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md")])
    return [path for path in paths if _MARKED.search(path.read_text(encoding="utf-8"))]


def filled(text: str, made: Mapping[str, str]) -> str:
    """Return a page with the rows of its tables made anew."""
    return _MARKED.sub(lambda match: f"{match[1]}{match[3] or ''}{made[match[2]]}{match[4]}", text)


def tables() -> dict[str, str]:
    """Return the rows of all tables by the names of their marks."""
    of_memory, of_ranks, of_speed = (rows(name) for name in ("memory", "ranks", "speed"))
    lines = {
        "cost": _cost(rows("cost")),
        "costs": _costs(of_speed),
        "growth": _growth(of_memory),
        "lengths": _lengths(rows("lengths")),
        "memory": _memory(of_memory),
        "ratios": _ratios(of_speed),
        "runs": _runs(),
        "ranks/memory": _memory_of_ranks(part(of_ranks, "memory")),
        "ranks/time": _times_of_ranks(part(of_ranks, "time")),
        "speed": _speed(of_speed),
        **page.tables(),
    }
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


def _compared(measured: Rows) -> list[dict[str, Any]]:
    """Return for each network and window our time, and its ratio to that of the fastest contender of each kind."""
    compared = []
    for (network, window), mine in groups(measured, "network", "window").items():
        times = {row["contender"]: row["ms"] for row in mine}
        others = {kind: times[OURS] / min(times[name] for name in names) for kind, names in _OTHERS.items()}
        compared.append({"network": network, "window": window, "ours": times[OURS], **others})
    return compared


def _speed(measured: Rows) -> Lines:
    """The median start, and in brackets the fastest and the slowest."""
    panels = [mine for (_, window), mine in groups(measured, "network", "window").items() if window in (1, 4, 16)]
    for (name,) in groups(measured, "contender"):
        found = [next(row for row in mine if row["contender"] == name) for mine in panels]
        yield [name, *(f"{row['ms']:,.1f} ({row['ms_min']:,.1f}–{row['ms_max']:,.1f})" for row in found)]


def _ratios(measured: Rows) -> Lines:
    """Ours, and by how much longer it takes than the others."""
    for row in _compared(measured):
        yield [row["network"], row["window"], f"{row['ours']:.1f}", *(f"{row[kind]:.2f}" for kind in _OTHERS)]


def _costs(measured: Rows) -> Lines:
    """The same ratios for README, with the windows that accumulate in one cell."""
    accumulating = [row for row in _compared(measured) if row["window"] > 1]
    for (network,), mine in groups(accumulating, "network").items():
        yield [_NAMES[network], *(", ".join(f"{row[kind]:.1f}" for row in mine) for kind in _OTHERS)]


def _cost(measured: Rows) -> Lines:
    columns = [{row["piece"]: row for row in mine} for mine in groups(measured, "network").values()]
    yield ["plain, ms", *(f"{pieces['plain']['ms']:.2f}" for pieces in columns)]
    for name, piece in _PIECES.items():
        yield [name, *(f"{pieces[piece]['ratio']:.2f}" for pieces in columns)]


def _memory(measured: Rows) -> Lines:
    """Of the windows; in brackets model sizes beyond the same contender's window of 1."""
    shown = [row for row in measured if "more_sets" in row and row["batch"] == measured[0]["batch"]]
    for (name,), mine in groups(shown, "contender").items():
        yield [name, *(f"{row['peak_mib']:,.0f}" + _more(row) for row in mine)]


def _more(row: Mapping[str, Any]) -> str:
    return f" ({row['more_sets']:+.2f})" if row["window"] > 1 else ""


def _growth(measured: Rows) -> Lines:
    """Ours with the window's rows in one micro-batch or in several, and after many micro-batches."""
    for row in measured:
        if "more_sets" not in row or row["batch"] != measured[0]["batch"]:
            yield [row["network"], row["batch"], f"{row['micro_batches']:,}", f"{row['peak_mib']:,.0f}"]


def _lengths(measured: Rows) -> Lines:
    """Of a token that is no padding, and how many times as fast it is as with one shape; in brackets the spread."""
    for row in measured:
        time = f"{row['us']:.0f} ({row['us_min']:.0f}–{row['us_max']:.0f})"
        ratio = f"{row['ratio']:.2f} ({row['ratio_min']:.2f}–{row['ratio_max']:.2f})" if row["shapes"] > 1 else ""
        shown = row["distribution"], row["shapes"], f"{row['padding']:.0%}", row["graphs"]
        yield [*shown, time, ratio, f"{row['load']:.1f}"]


def _runs() -> Lines:
    """When, where and with what each benchmark ran, and whether the code that it is about is still the same."""
    now = code()["digest"]
    for record in records():
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items() if name != "ms_accum")
        about, measured = record["machine"], record["code"]
        same = "✓" if measured["digest"] == now else "–"
        cpu = f"{about['cpu']}, {about['cores']}, {about['instructions']}"
        yield [record["benchmark"], record["date"][:10], measured["commit"], same, cpu, versions]


def _times_of_ranks(measured: Rows) -> Lines:
    """Ratios to one process."""
    for key, mine in groups(measured, "network", "ranks", "window").items():
        by_way = {row["way"]: row for row in mine}
        # Windows of 1 have no ranks that never communicate.
        ratios = (f"{by_way[way]['ratio']:.2f}" if way in by_way else "-" for way in (ranks.APART, *ranks.WAYS))
        yield [*key, f"{by_way[ranks.ONE]['ms']:,.0f}", *ratios]


def _memory_of_ranks(measured: Rows) -> Lines:
    for row in measured:
        yield [row["ranks"], row["way"], f"{row['peak_mib']:,.0f}", *(f"{row[name]:.2f}" for name in ranks.KEPT)]
