"""The benchmark `memory`: peak memory, compared with the peers.

Each figure is the peak of a fresh process: a peak never falls, so one process cannot show the peaks of two windows.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, NamedTuple

from .contenders import ENTRIES, OURS, Entry, available
from .options import select_settings
from .process import Contender
from .runner import Session
from .speed import BATCH

_WINDOWS_RUN = 3
TABLES = {"": ("", "network contender window:d batch:d micro_batches:,d peak_mib:,.0f more_sets:.2f")}
NOTE = "peak_mib: of a fresh process; more_sets: beyond the window of 1, in sets of parameters"


class Settings(NamedTuple):
    """What is measured; `full` is the window whose whole batch is also run as one micro-batch.

    `activations` are networks of which they, and not the parameters, take the memory.
    """

    networks: Sequence[str] = ("mlp50m",)
    windows: Sequence[int] = (1, 2, 4, 16, 64)
    full: int = 16
    activations: Sequence[str] = ("transformer",)
    growth: Sequence[int] = (1_000, 10_000)


SHORT = Settings(networks=("mlp",), windows=(1, 2), full=2, activations=(), growth=(100, 200))


def run(arguments: Namespace) -> None:
    """Measure, print the table and write JSON."""
    settings = select_settings(Settings(), SHORT, arguments, tuple(BATCH))
    entries = available(ENTRIES, arguments.contenders)
    session = Session("memory", arguments, settings._asdict())
    for network in settings.networks:
        for entry in entries:
            print(f"{network}, {entry.name} ...", flush=True)
            session.rows += _peaks(session, entry, network, settings)
    for entry in entries:
        if entry.name == OURS:
            session.rows += _split(session, entry, settings)
            session.rows += _growth(session, entry, settings)
    session.finish(TABLES, note=NOTE)


def _peaks(session: Session, entry: Entry, network: str, settings: Settings) -> list[dict]:
    """Return a row for each size of the window, and for ours one with the full batch."""
    sizes = [(window, BATCH[network]) for window in settings.windows]
    if entry.name == OURS:
        sizes.append((1, BATCH[network] * settings.full))
    rows = []
    for window, batch in sizes:
        with session.start(entry, network=network) as contender:
            row = _row(contender, network, window, batch, _WINDOWS_RUN)
            rows.append({**row, "set_mib": contender.about["parameters"] * 4 / 2**20})
    baseline = dict(zip(sizes, rows)).get((1, BATCH[network]), {}).get("peak_mib")
    return [{**row, "more_sets": baseline and (row["peak_mib"] - baseline) / row["set_mib"]} for row in rows]


def _row(contender: Contender, network: str, window: int, batch: int, windows: int, done: int = 0) -> dict[str, Any]:
    """Have a contender train some windows after those it has done, and return its peak."""
    contender.ask(window=window, batch=batch, windows=windows)
    return {
        "network": network,
        "contender": contender.name,
        "window": window,
        "batch": batch,
        "micro_batches": done + windows * window,
        "peak_mib": contender.ask(peak=True)["peak_mib"],
    }


def _split(session: Session, entry: Entry, settings: Settings) -> list[dict]:
    """Return the peaks of one batch, whole and in micro-batches."""
    rows = []
    for network in settings.activations:
        size = BATCH[network]
        for window, batch in ((1, size * settings.full), (settings.full, size)):
            with session.start(entry, network=network) as contender:
                rows.append(_row(contender, network, window, batch, _WINDOWS_RUN))
    return rows


def _growth(session: Session, entry: Entry, settings: Settings) -> list[dict]:
    """Return the peaks of one long run on the MLP, after some micro-batches and after many."""
    rows, done, window = [], 0, 4
    with session.start(entry, network="mlp") as contender:
        for micro_batches in settings.growth:
            windows = round((micro_batches - done) / window)
            rows.append(_row(contender, "mlp", window, BATCH["mlp"], windows, done))
            done = micro_batches
    return rows
