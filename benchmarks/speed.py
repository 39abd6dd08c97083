"""The benchmark `speed`: milliseconds per micro-batch, compared with the peers.

Each contender is started several times, in turn and alone on the machine: how fast a process runs is also decided by
chance when it starts. The median of the starts counts, and the fastest and the slowest are shown.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import product
from typing import Any

from .contenders import ENTRIES, OURS, Entry, available, check_same_size
from .options import Settings, select_settings
from .process import Contender
from .runner import Session, check_loss, repeats, summary

BATCH = {"lenet5": 32, "mlp": 32, "transformer": 8, "mlp50m": 32}
TABLES = {"": ("", "network window:d contender ms:.3f ms_min:.3f ms_max:.3f ratio:.2f")}
NOTE = "ms: per micro-batch, update included, median of the starts; ratio: of the medians, to ours"
_BURSTS = 3  # in a start, of which the median counts
FULL, SHORT = Settings(tuple(BATCH), (1, 2, 4, 16), rounds=5), Settings(("mlp",), (1, 2), rounds=1)

# By window and contender: the milliseconds of each start.
Times = dict[int, dict[str, list[float]]]


def run(arguments: Namespace) -> None:
    """Measure, print the table and write JSON."""
    settings = select_settings(FULL, SHORT, arguments, tuple(BATCH))
    burst = 0.05 if arguments.short else 0.3
    entries = available(ENTRIES, settings.contenders)
    record = {"networks": settings.networks, "windows": settings.windows, "starts": settings.rounds}
    session = Session("speed", arguments, {**record, "bursts": _BURSTS, "seconds": burst, "batch": BATCH})
    for network in settings.networks:
        times = _times(session, entries, network, settings, burst)
        for window in settings.windows:
            key = {"network": network, "window": window, "batch": BATCH[network]}
            session.rows += [{**key, **figures} for figures in _figures(times[window])]
        session.save()
    session.finish(TABLES, note=NOTE)


def _times(session: Session, entries: Sequence[Entry], network: str, settings: Settings, seconds: float) -> Times:
    """Start each contender in its turn, several times over, and measure all sizes of the window in each start."""
    times: Any = {window: {entry.name: [] for entry in entries} for window in settings.windows}
    sizes = {}
    for number, entry in product(range(settings.rounds), entries):
        print(f"{network}, start {number + 1} of {settings.rounds}: {entry.name} ...", flush=True)
        with session.start(entry, network=network) as contender:
            sizes[entry.name] = contender.about["parameters"]
            check_same_size(sizes)
            for window in settings.windows:
                times[window][entry.name].append(_milliseconds(contender, window, BATCH[network], seconds))
    return times


def _milliseconds(contender: Contender, window: int, batch: int, seconds: float) -> float:
    """Return the milliseconds of a micro-batch, the median of some bursts of about `seconds`."""
    seconds_of = partial(_seconds, contender, window, batch)
    windows = repeats(seconds_of, seconds)
    return statistics.median(1000 * seconds_of(windows) / (windows * window) for _ in range(_BURSTS))


def _seconds(contender: Contender, window: int, batch: int, windows: int) -> float:
    answer = contender.ask(window=window, batch=batch, windows=windows)
    check_loss(contender, answer)
    return answer["seconds"]


def _figures(times: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return the figures of each contender's row: its times, and the ratio of its median to ours."""
    ours = statistics.median(times[OURS]) if OURS in times else None
    made = ({"contender": name, **summary(starts, "ms"), "starts": starts} for name, starts in times.items())
    return [{**row, "ratio": row["ms"] / ours if ours else None} for row in made]
