"""The cost model of several ranks."""

from __future__ import annotations

import pytest

from benchmarks import scaling, scaling_tables
from benchmarks.scaling import COLLECTIVES, Link

LINK = Link(bandwidth=100.0, latency=0.5)


@pytest.mark.parametrize(
    ("operator", "seconds"),
    [
        # 3 hops with a latency of 0.5 and a quarter of 800 bytes each; an AllReduce goes round twice.
        ("AllGather", 3 * (0.5 + 2)),
        ("ReduceScatter", 3 * (0.5 + 2)),
        ("AllReduce", 6 * (0.5 + 2)),
    ],
)
def test_ring_collective_seconds(operator, seconds):
    assert scaling.collective_seconds(operator, 800, 4, LINK) == pytest.approx(seconds)


@pytest.mark.parametrize("operator", ["AllReduce", "AllGather"])
def test_fit_recovers_link(operator):
    seconds = {size: scaling.collective_seconds(operator, size, 4, LINK) for size in (16, 500, 2000)}
    assert scaling.fitted(operator, 4, seconds) == pytest.approx(LINK)


def test_sent_parameter_sets():
    """In parameter sets, of two ranks, as docs/scaling.md says."""
    sets = {way: [scaling.sent_sets(way, window, 2) for window in (1, 4)] for way in COLLECTIVES}
    assert sets == {"window's end": [1, 1], "every micro-batch": [1, 4], "ZeRO-1": [1, 1], "ZeRO-2": [1, 2.5]}
    assert scaling.sent_sets("ZeRO-1", 4, 2, scatters=False) == 1.5
    assert scaling.sent_sets("ZeRO-2", 4, 2, scatters=False) == 4.5


def test_window_where_accumulation_stops_paying():
    assert scaling.hiding_window(0.05, micro=1.0, sending=0.5) == 10
    assert scaling.hiding_window(0.05, micro=1.0, sending=0.0) == 1
    assert scaling.critical_window(1000, ranks=10, rows=20) == 5
    windows = [number / 100 for number in range(1, 2000)]
    time = {n: (1 + 1000 / (n * 10 * 20)) * (n * 1.0 + 0.8) for n in windows}
    assert scaling.best_window(1000, 10, 20, micro=1.0, sending=0.8) == pytest.approx(min(time, key=time.get), abs=0.02)


def test_ring_uses_slowest_link():
    assumed = scaling_tables.ON_PAPER
    slow, fast = Link(1.0, 2.0), Link(1e15, 2.0)
    assert assumed.link(assumed.node, slow) == assumed.inside
    assert assumed.link(assumed.node + 1, slow) == slow
    assert assumed.link(assumed.node + 1, fast) == Link(assumed.inside.bandwidth, 2.0)


def test_changed_assumption_changes_table():
    """The check can fail."""
    slower = scaling_tables.ON_PAPER._replace(computing=1e12)
    for name in ("paper", "stops"):
        assert scaling_tables.PAPER[name](slower) != scaling_tables.PAPER[name](scaling_tables.ON_PAPER)
