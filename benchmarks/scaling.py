"""The cost model of an update of several ranks: what is sent, kept, and how long it takes.

Ranks in a ring: what has `size` bytes goes round in `ranks` pieces, once for each sum or copy that has to arrive
everywhere. A hop takes a latency, and the piece's bytes at a bandwidth. Nothing here overlaps: as in `ms_accum`, the
ranks communicate when they have computed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Callable, NamedTuple

# What ranks send, a parameter set each time: with each micro-batch, and with each update.
COLLECTIVES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "window's end": ((), ("AllReduce",)),
    "every micro-batch": (("AllReduce",), ()),
    "ZeRO-1": ((), ("ReduceScatter", "AllGather")),
    "ZeRO-2": (("ReduceScatter",), ("AllGather",)),
}
WAYS = tuple(COLLECTIVES)
# What a rank keeps of a parameter set.
KEPT = ("parameters", "accumulators", "optimizer")
# MindSpore's CPU has no ReduceScatter: ranks make all sums, and keep their own.
WITHOUT_SCATTER = {"ReduceScatter": "AllReduce"}
_ADAM = 2  # moments of a parameter


class Link(NamedTuple):
    """What leads from a rank to the next; the slowest in the ring counts."""

    bandwidth: float
    """float, bytes a second."""
    latency: float
    """float, seconds of a hop."""


LinkOf = Callable[[str], Link]


def hops(operator: str, ranks: int) -> int:
    """Return how often pieces go from rank to rank: once round to be summed, once to be copied."""
    return (2 if operator == "AllReduce" else 1) * (ranks - 1)


def sent(operator: str, size: float, ranks: int) -> float:
    """Return the bytes that a rank sends."""
    return hops(operator, ranks) * size / ranks


def collective_seconds(operator: str, size: float, ranks: int, link: Link) -> float:
    """Return the seconds that it takes."""
    return hops(operator, ranks) * link.latency + sent(operator, size, ranks) / link.bandwidth


def fitted(operator: str, ranks: int, seconds: Mapping[float, float]) -> Link:
    """Return the link that explains the smallest and the largest of the sizes that were measured, in bytes."""
    small, large = min(seconds), max(seconds)
    more = seconds[large] - seconds[small]
    bandwidth = sent(operator, large - small, ranks) / more if more > 0 else math.inf
    return Link(bandwidth, (seconds[small] - sent(operator, small, ranks) / bandwidth) / hops(operator, ranks))


def collectives(way: str, window: int, scatters: bool = True) -> list[str]:
    """Return what ranks send in a window of this number of micro-batches."""
    often, once = COLLECTIVES[way]
    names = [*often * window, *once]
    return names if scatters else [WITHOUT_SCATTER.get(name, name) for name in names]


def sent_sets(way: str, window: int, ranks: int, scatters: bool = True) -> float:
    """Return the parameter sets that a rank sends for an update."""
    return sum(sent(operator, 1, ranks) for operator in collectives(way, window, scatters))


def sending_seconds(way: str, window: int, size: float, ranks: int, link_of: LinkOf, scatters: bool = True) -> float:
    """Return the seconds of an update in which ranks communicate."""
    names = collectives(way, window, scatters)
    return sum(collective_seconds(operator, size, ranks, link_of(operator)) for operator in names)


def kept_sets(way: str, ranks: int) -> dict[str, float]:
    """Return the parameter sets that a rank keeps with Adam; gradients and temporaries come on top."""
    part = 1 / ranks
    sharded = way.startswith("ZeRO")
    return {
        "parameters": 1.0,
        "accumulators": part if way == "ZeRO-2" else 1.0,
        # Sharded: the part of the parameters is kept a second time, as what the optimizer updates.
        "optimizer": part * (_ADAM + 1) if sharded else float(_ADAM),
    }


def hiding_window(share: float, micro: float, sending: float) -> int:
    """Return the window from which one reduction takes no more than this share of the micro-batches' time."""
    return max(1, math.ceil(sending / (share * micro)))


def critical_window(critical: float, ranks: int, rows: float) -> float:
    """Return the window whose global batch is the critical one; below 1, the ranks alone are beyond it."""
    return critical / (ranks * rows)


def best_window(critical: float, ranks: int, rows: float, micro: float, sending: float) -> float:
    """Return the window with which a target is reached soonest.

    With a batch of B a target takes updates in proportion to 1 + B_crit / B (McCandlish et al., 2018). An update takes
    N t_micro + t_sending, and B = N W b: the product is least where N**2 = B_crit t_sending / (W b t_micro).
    """
    return math.sqrt(critical_window(critical, ranks, rows) * sending / micro)
