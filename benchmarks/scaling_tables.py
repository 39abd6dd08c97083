"""Which tables are in docs/scaling.md?

What was measured, from `results/ranks.json`, and what the model of `scaling` says of machines that nobody measured
here. `python -m benchmarks scaling` writes them between the document's marks; everything else in it is prose.
"""

from __future__ import annotations

import json
import re
import statistics
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from . import scaling
from .process import ROOT
from .results import RESULTS
from .scaling import COLLECTIVES, Link

DOCUMENT = ROOT / "docs" / "scaling.md"
WAYS = tuple(COLLECTIVES)
_MARKED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)
_KEPT = ("parameters", "accumulators", "optimizer")


class Assumed(NamedTuple):
    """A machine and a network that nobody measured here."""

    node: int = 8
    """Devices of a node."""
    inside: Link = Link(200e9, 5e-6)
    """From a device to the next in its node."""
    between: Mapping[str, Link] = {
        "8 adapters of 100 Gbit/s": Link(100e9, 20e-6),
        "one Ethernet of 25 Gbit/s": Link(3.125e9, 50e-6),
    }
    """From a node to the next, as a ring of all devices sees it."""
    parameters: float = 1.3e9
    """Of a Transformer, whose gradients are sent in float32."""
    tokens: int = 8192
    """Of a micro-batch."""
    computing: float = 125e12
    """What a device really computes, floating-point operations a second; a token takes 6 for each parameter."""
    critical: float = 2**22
    """Tokens of the critical batch."""
    share: float = 0.05
    """What may be lost to speaking."""

    @property
    def size(self) -> float:
        """float, the bytes of a parameter set."""
        return 4 * self.parameters

    @property
    def micro(self) -> float:
        """float, the seconds of a micro-batch."""
        return 6 * self.parameters * self.tokens / self.computing

    def link(self, ranks: int, between: Link) -> Link:
        """Return the slowest link of a ring of so many devices; hops inside of nodes count like those between."""
        if ranks <= self.node:
            return self.inside
        return Link(min(self.inside.bandwidth, between.bandwidth), between.latency)


ON_PAPER = Assumed()
_RANKS, _WINDOWS = (8, 64, 1024), (1, 4, 16)


def run(arguments: Namespace) -> None:
    """Write the tables into the document."""
    del arguments
    DOCUMENT.write_text(filled(DOCUMENT.read_text(encoding="utf-8"), measured()), encoding="utf-8")
    print(f"tables: {DOCUMENT}")


def measured() -> list[dict]:
    """Return the rows that `ranks` has written."""
    return json.loads((RESULTS / "ranks.json").read_text(encoding="utf-8"))["rows"]


def filled(text: str, rows: Sequence[dict]) -> str:
    """Return the document with its tables made of these rows."""
    made = {name: table(_of(rows, name)) for name, table in MEASURED.items()}
    made.update({name: table(ON_PAPER) for name, table in PAPER.items()})
    return _MARKED.sub(lambda found: found[1] + made[found[2]] + found[3], text)


def _of(rows: Sequence[dict], part: str) -> list[dict]:
    return [row for row in rows if row["part"] == ("time" if part == "error" else part)]


def _table(head: Sequence[str], lines: Iterable[Sequence[Any]]) -> str:
    cells = [head, ["---"] * len(head), *lines]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in cells)


def _keys(rows: Sequence[dict], *names: str) -> list[tuple]:
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def _time(rows: Sequence[dict]) -> str:
    """Ratios to one process, and in brackets what the model says they are."""
    found = {(row["network"], row["ranks"], row["window"], row["way"]): row for row in rows}
    lines = []
    for key in _keys(rows, "network", "ranks", "window"):
        one, apart = found[(*key, "one process")], found.get((*key, "apart"))
        line = [*key, f"{one['ms']:,.0f}", f"{apart['ratio']:.2f}" if apart else "-"]
        for way in WAYS:
            row = found[(*key, way)]
            line.append(f"{row['ratio']:.2f} ({row['predicted_ms'] / one['ms']:.2f})")
        lines.append(line)
    return _table(["network", "ranks", "N", "one process, ms", "apart", *WAYS], lines)


def _error(rows: Sequence[dict]) -> str:
    lines = []
    for ranks, way in _keys([row for row in rows if row["way"] in WAYS], "ranks", "way"):
        mine = [row["predicted_ms"] / row["ms"] for row in rows if (row["way"], row["ranks"]) == (way, ranks)]
        lines.append([ranks, way, f"{statistics.median(mine):.2f}", f"{min(mine):.2f} to {max(mine):.2f}"])
    return _table(["ranks", "", "predicted / measured, median", "all of them"], lines)


def _sent(rows: Sequence[dict]) -> str:
    """Of the largest network: in parameter sets, all networks are alike."""
    largest = max(rows, key=lambda row: row["set_mib"])["network"]
    lines = []
    for ranks, way in _keys(rows, "ranks", "way"):
        mine = [row for row in rows if (row["network"], row["ranks"], row["way"]) == (largest, ranks, way)]
        counts = [f"{row['AllReduce']} + {row['AllGather']}" for row in mine]
        sets = [[f"{row[name] / row['set_mib']:.2f}" for row in mine] for name in ("ring_mib", "loopback_mib")]
        lines.append([ranks, way, *(", ".join(each) for each in (counts, *sets))])
    windows = ", ".join(str(window) for (window,) in _keys(rows, "window"))
    names = ["AllReduce + AllGather", "sets sent in a ring", "sets seen on the loopback device"]
    return _table(["ranks", "", *(f"{name}, N = {windows}" for name in names)], lines)


def _alone(rows: Sequence[dict]) -> str:
    lines = []
    for ranks, operator in _keys(rows, "ranks", "operator"):
        mine = [row for row in rows if (row["ranks"], row["operator"]) == (ranks, operator)]
        link = f"{mine[0]['latency'] * 1e6:,.0f} µs, {mine[0]['bandwidth'] / 1e6:,.0f} MB/s"
        lines.append([ranks, operator, *(f"{row['ms']:,.2f} ({row['model_ms']:,.2f})" for row in mine), link])
    sizes = [f"{size:,} B, ms" for (size,) in _keys(rows, "bytes")]
    return _table(["ranks", "", *sizes, "a hop, a rank's sending"], lines)


def _memory(rows: Sequence[dict]) -> str:
    lines = []
    for row in rows:
        paper = scaling.kept_sets(row["way"], row["ranks"])
        kept = [f"{row[name]:.2f} ({paper[name]:.2f})" for name in _KEPT]
        lines.append([row["ranks"], row["way"], f"{row['peak_mib']:,.0f}", *kept])
    return _table(["ranks", "", "peak of the largest, MiB", *_KEPT], lines)


def _kept(assumed: Assumed) -> str:
    """What Adam keeps, and what is sent, in parameter sets."""
    lines = []
    for way in WAYS:
        kept = [f"{sum(scaling.kept_sets(way, ranks).values()):.2f}" for ranks in _RANKS]
        sent = [f"{scaling.sent_sets(way, window, _RANKS[1]):.1f}" for window in _WINDOWS]
        lines.append([way, *kept, *sent])
    head = [f"kept, W = {ranks:,}" for ranks in _RANKS]
    return _table(["", *head, *(f"sent, N = {window}" for window in _WINDOWS)], lines)


def _cases(assumed: Assumed) -> Iterable[tuple[int, str, Link]]:
    for ranks in _RANKS:
        links = {"inside a node": assumed.inside} if ranks <= assumed.node else assumed.between
        for name, between in links.items():
            yield ranks, name, assumed.link(ranks, between)


def _speaking(way: str, window: int, ranks: int, link: Link, assumed: Assumed) -> float:
    return scaling.speaking_seconds(way, window, assumed.size, ranks, lambda operator: link)


def _paper(assumed: Assumed) -> str:
    """Seconds of an update, and the share of it in which devices compute."""
    lines = []
    for ranks, name, link in _cases(assumed):
        for window in _WINDOWS:
            computing = window * assumed.micro
            line = [f"{ranks:,}", name, window, f"{computing:,.2f}"]
            for way in WAYS:
                seconds = computing + _speaking(way, window, ranks, link, assumed)
                line.append(f"{seconds:,.2f} ({computing / seconds:.0%})")
            lines.append(line)
    return _table(["devices", "network", "N", "computing, s", *WAYS], lines)


def _stops(assumed: Assumed) -> str:
    """From where accumulating more brings nothing."""
    lines = []
    for ranks, name, link in _cases(assumed):
        speaking = _speaking(WAYS[0], 1, ranks, link, assumed)
        hiding = scaling.hiding_window(assumed.share, assumed.micro, speaking)
        critical = scaling.critical_window(assumed.critical, ranks, assumed.tokens)
        best = scaling.best_window(assumed.critical, ranks, assumed.tokens, assumed.micro, speaking)
        lines.append([f"{ranks:,}", name, f"{speaking:.2f}", hiding, f"{critical:,.1f}", f"{max(1.0, best):,.1f}"])
    head = ["devices", "network", "one reduction, s", f"N that hides it to {assumed.share:.0%}"]
    return _table([*head, "N of the critical batch", "N that gets there first"], lines)


MEASURED = {"time": _time, "error": _error, "sent": _sent, "alone": _alone, "memory": _memory}
PAPER = {"kept": _kept, "paper": _paper, "stops": _stops}
