"""The tables of docs/scaling.md and benchmarks/SCALING.md: what was measured, and what the cost model predicts.

What was measured, from `results/avx512-amd/ranks.json`, and what the model of `scaling` predicts for machines that
were not measured here.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from . import scaling
from .results import rows as rows_of
from .scaling import KEPT, WAYS, Link
from .tables import Lines, groups, markdown, part


class Assumed(NamedTuple):
    """A machine and a network that were not measured here."""

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
    """What may be lost to communication."""

    @property
    def size(self) -> float:
        """float, the bytes of a parameter set."""
        return 4 * self.parameters

    @property
    def micro(self) -> float:
        """float, the seconds of a micro-batch."""
        return 6 * self.parameters * self.tokens / self.computing

    def link(self, ranks: int, between: Link) -> Link:
        """Return the slowest link of a ring of `ranks` devices; hops inside of nodes count like those between."""
        if ranks <= self.node:
            return self.inside
        return Link(min(self.inside.bandwidth, between.bandwidth), between.latency)


ON_PAPER = Assumed()
_RANKS, _WINDOWS = (8, 64, 1024), (1, 4, 16)


def tables() -> dict[str, str]:
    """Return the tables by the names of their marks."""
    rows = rows_of("avx512-amd", "ranks")
    made = {name: table(part(rows, source)) for name, (source, table) in MEASURED.items()}
    return {**made, **{name: table(ON_PAPER) for name, table in PAPER.items()}}


@markdown
def _time(rows: Sequence[dict]) -> Lines:
    """Ratios to one process."""
    yield ["network", "ranks", "N", "one process, ms", *WAYS]
    for key, mine in groups(rows, "network", "ranks", "window").items():
        by_way = {row["way"]: row for row in mine}
        yield [*key, f"{by_way['one process']['ms']:,.0f}", *(f"{by_way[way]['ratio']:.2f}" for way in WAYS)]


@markdown
def _predicted_time(rows: Sequence[dict]) -> Lines:
    """Ratios to one process, and in brackets those of the model."""
    yield ["network", "ranks", "N", "one process, ms", "apart", *WAYS]
    for key, mine in groups(rows, "network", "ranks", "window").items():
        by_way = {row["way"]: row for row in mine}
        single, apart = by_way["one process"]["ms"], by_way.get("apart")
        ways = [f"{by_way[way]['ratio']:.2f} ({by_way[way]['predicted_ms'] / single:.2f})" for way in WAYS]
        yield [*key, f"{single:,.0f}", f"{apart['ratio']:.2f}" if apart else "-", *ways]


@markdown
def _error(rows: Sequence[dict]) -> Lines:
    yield ["ranks", "", "predicted / measured, median", "all of them"]
    for key, mine in groups([row for row in rows if row["way"] in WAYS], "ranks", "way").items():
        errors = [row["predicted_ms"] / row["ms"] for row in mine]
        yield [*key, f"{statistics.median(errors):.2f}", f"{min(errors):.2f} to {max(errors):.2f}"]


@markdown
def _sent(rows: Sequence[dict]) -> Lines:
    """Of the largest network: in model sizes, all networks are alike."""
    windows = ", ".join(str(window) for (window,) in groups(rows, "window"))
    names = ["AllReduce + AllGather", "model sizes sent in a ring", "model sizes seen on the loopback device"]
    yield ["ranks", "", *(f"{name}, N = {windows}" for name in names)]
    largest = max(rows, key=lambda row: row["set_mib"])["network"]
    for key, mine in groups([row for row in rows if row["network"] == largest], "ranks", "way").items():
        counts = [f"{row['AllReduce']} + {row['AllGather']}" for row in mine]
        sets = [[f"{row[name] / row['set_mib']:.2f}" for row in mine] for name in ("ring_mib", "loopback_mib")]
        yield [*key, *(", ".join(values) for values in (counts, *sets))]


@markdown
def _alone(rows: Sequence[dict]) -> Lines:
    sizes = [f"{size:,} B, ms" for (size,) in groups(rows, "bytes")]
    yield ["ranks", "", *sizes, "a hop, a rank's sending"]
    for key, mine in groups(rows, "ranks", "operator").items():
        link = f"{mine[0]['latency'] * 1e6:,.0f} µs, {mine[0]['bandwidth'] / 1e6:,.0f} MB/s"
        yield [*key, *(f"{row['ms']:,.2f} ({row['model_ms']:,.2f})" for row in mine), link]


@markdown
def _memory(rows: Sequence[dict]) -> Lines:
    yield ["ranks", "", "peak of the largest, MiB", *KEPT]
    for row in rows:
        yield [row["ranks"], row["way"], f"{row['peak_mib']:,.0f}", *(f"{row[name]:.2f}" for name in KEPT)]


@markdown
def _predicted_memory(rows: Sequence[dict]) -> Lines:
    """Measured, and in brackets the formula."""
    yield ["ranks", "", "peak of the largest, MiB", *KEPT]
    for row in rows:
        paper = scaling.kept_sets(row["way"], row["ranks"])
        kept = [f"{row[name]:.2f} ({paper[name]:.2f})" for name in KEPT]
        yield [row["ranks"], row["way"], f"{row['peak_mib']:,.0f}", *kept]


@markdown
def _kept(assumed: Assumed) -> Lines:
    """What Adam keeps, and what is sent, in model sizes."""
    head = [f"kept, W = {ranks:,}" for ranks in _RANKS]
    yield ["", *head, *(f"sent, N = {window}" for window in _WINDOWS)]
    for way in WAYS:
        kept = [f"{sum(scaling.kept_sets(way, ranks).values()):.2f}" for ranks in _RANKS]
        yield [way, *kept, *(f"{scaling.sent_sets(way, window, _RANKS[1]):.1f}" for window in _WINDOWS)]


def _cases(assumed: Assumed) -> Iterator[tuple[int, str, Link]]:
    for ranks in _RANKS:
        links = {"inside a node": assumed.inside} if ranks <= assumed.node else assumed.between
        for name, between in links.items():
            yield ranks, name, assumed.link(ranks, between)


def _sending(way: str, window: int, ranks: int, link: Link, assumed: Assumed) -> float:
    return scaling.sending_seconds(way, window, assumed.size, ranks, lambda operator: link)


@markdown
def _paper(assumed: Assumed) -> Lines:
    """Seconds of an update, and the share of it in which devices compute."""
    yield ["devices", "network", "N", "computing, s", *WAYS]
    for (ranks, name, link), window in itertools.product(_cases(assumed), _WINDOWS):
        computing = window * assumed.micro
        seconds = [computing + _sending(way, window, ranks, link, assumed) for way in WAYS]
        ways = [f"{value:,.2f} ({computing / value:.0%})" for value in seconds]
        yield [f"{ranks:,}", name, window, f"{computing:,.2f}", *ways]


@markdown
def _stops(assumed: Assumed) -> Lines:
    """From where accumulating more brings nothing."""
    head = ["devices", "network", "one reduction, s", f"N that hides it to {assumed.share:.0%}"]
    yield [*head, "N of the critical batch", "N that gets there first"]
    for ranks, name, link in _cases(assumed):
        sending = _sending(WAYS[0], 1, ranks, link, assumed)
        hiding = scaling.hiding_window(assumed.share, assumed.micro, sending)
        critical = scaling.critical_window(assumed.critical, ranks, assumed.tokens)
        best = scaling.best_window(assumed.critical, ranks, assumed.tokens, assumed.micro, sending)
        yield [f"{ranks:,}", name, f"{sending:.2f}", hiding, f"{critical:,.1f}", f"{max(1.0, best):,.1f}"]


MEASURED = {
    "time": ("time", _time),
    "time/predicted": ("time", _predicted_time),
    "error": ("time", _error),
    "sent": ("sent", _sent),
    "alone": ("alone", _alone),
    "memory": ("memory", _memory),
    "memory/predicted": ("memory", _predicted_memory),
}
"""dict[str, tuple], the part of the results that a table is made of, and what makes it."""
PAPER = {"kept": _kept, "paper": _paper, "stops": _stops}
