"""How much memory does a window take, beside the peers?

Each figure is the peak of a fresh process: a peak never falls, so that one process could not tell of two windows.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from .choosing import available, changed, known, start
from .contenders import ENTRIES, OURS, Entry
from .results import plot, save, show
from .speed import BATCH
from .speed_plot import COLOURS

_WINDOWS_RUN = 3
COLUMNS = {
    "network": "",
    "contender": "",
    "window": "d",
    "batch": "d",
    "micro_batches": ",d",
    "peak_mib": ",.0f",
    "more_sets": ".2f",
}


class Settings(NamedTuple):
    """What is measured; `full` is the window whose whole batch is also run as one micro-batch."""

    networks: Sequence[str] = ("mlp50m",)
    windows: Sequence[int] = (1, 2, 4, 16, 64)
    full: int = 16
    growth: Sequence[int] = (1_000, 10_000)


SHORT = Settings(networks=("mlp",), windows=(1, 2), full=2, growth=(100, 200))


def run(arguments: Namespace) -> None:
    """Measure, print the table, write JSON and plot."""
    known("--networks", arguments.networks, tuple(BATCH))
    settings = changed(SHORT if arguments.short else Settings(), arguments)
    entries = available(ENTRIES, arguments.contenders)
    rows: list[dict] = []
    versions: dict[str, str] = {}
    for network in settings.networks:
        rows += _peaks(network, entries, settings, versions)
    ours = [entry for entry in entries if entry.name == OURS]
    rows += [row for entry in ours for row in _growth(entry, settings)]
    show(rows, COLUMNS)
    print("peak_mib: of a fresh process; more_sets: beyond the window of 1, in sets of parameters")
    path = save("memory", arguments.output, rows, settings._asdict(), versions)
    if not arguments.short:
        plot(Path(path).with_suffix(".png"), lambda figure: _draw(figure, rows, settings.networks))


def _peaks(network: str, entries: Sequence[Entry], settings: Settings, versions: dict) -> list[dict]:
    """Return a row for each contender and size of the window, and for ours one with the full batch."""
    rows = []
    batch = BATCH[network]
    for entry in entries:
        print(f"{network}, {entry.name} ...", flush=True)
        sizes = [(window, batch) for window in settings.windows]
        if entry.name == OURS:
            sizes.append((1, batch * settings.full))
        mine = [_peak(entry, network, *size, versions) for size in sizes]
        rows += [_beside_window_of_one(row, mine) for row in mine]
    return rows


def _peak(entry: Entry, network: str, window: int, batch: int, versions: dict) -> dict[str, Any]:
    with start(entry, "--network", network) as contender:
        contender.ask(window=window, batch=batch, windows=_WINDOWS_RUN)
        peak = contender.ask(peak=True)["peak_mib"]
        versions.update(contender.about["versions"])
        row = _row(entry, network, window, batch, micro_batches=_WINDOWS_RUN * window, peak=peak)
        return {**row, "set_mib": contender.about["parameters"] * 4 / 2**20}


def _row(entry: Entry, network: str, window: int, batch: int, *, micro_batches: int, peak: float) -> dict[str, Any]:
    return {
        "network": network,
        "contender": entry.name,
        "window": window,
        "batch": batch,
        "micro_batches": micro_batches,
        "peak_mib": peak,
    }


def _beside_window_of_one(row: dict[str, Any], rows: Sequence[dict]) -> dict[str, Any]:
    """Return the row with its distance from the window of 1 with the same micro-batch, in parameter sets."""
    one = next((other for other in rows if other["window"] == 1 and other["batch"] == BATCH[row["network"]]), None)
    more = None if one is None else (row["peak_mib"] - one["peak_mib"]) / row["set_mib"]
    return {**row, "more_sets": more}


def _growth(entry: Entry, settings: Settings) -> list[dict]:
    """Return the peaks of one long run on the MLP, after some micro-batches and after many."""
    rows, done, window = [], 0, 4
    with start(entry, "--network", "mlp") as contender:
        for micro_batches in settings.growth:
            contender.ask(window=window, batch=BATCH["mlp"], windows=round((micro_batches - done) / window))
            peak = contender.ask(peak=True)["peak_mib"]
            rows.append(_row(entry, "mlp", window, BATCH["mlp"], micro_batches=micro_batches, peak=peak))
            done = micro_batches
    return rows


def _draw(figure: Any, rows: Sequence[dict], networks: Sequence[str]) -> None:
    """Draw the peaks over the window's size, for each network."""
    for axes, network in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks):
        peaks = [row for row in rows if row["network"] == network and "more_sets" in row]
        for entry in ENTRIES:
            mine = [row for row in peaks if row["contender"] == entry.name and row["batch"] == BATCH[network]]
            if mine:
                points = [(row["window"], row["peak_mib"]) for row in mine]
                axes.plot(*zip(*points), "o-", color=COLOURS[entry.name], label=entry.name)
        for row in [row for row in peaks if row["batch"] != BATCH[network]]:
            label = f"{OURS}, batch {row['batch']} at once"
            axes.axhline(row["peak_mib"], color=COLOURS[OURS], linestyle=":", label=label)
        windows = sorted({row["window"] for row in peaks})
        axes.set_xscale("log", base=2)
        axes.set_xticks(windows, [str(window) for window in windows])
        axes.set_ylim(bottom=0)
        axes.set(title=network, xlabel="window N", ylabel="peak MiB of the process")
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
