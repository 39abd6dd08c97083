"""The benchmark `speed`: milliseconds per micro-batch, beside the peers.

All contenders are alive, and stopped but one; ratios are taken within a round.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from . import plots
from .contenders import OURS, UNTUNED, WITH_UNTUNED, available, check_same_size
from .options import Settings, chosen
from .process import Contender
from .runner import Session, alternate, awake, check_loss, ratio, repeats, summary
from .tables import groups

BATCH = {"lenet5": 32, "mlp": 32, "transformer": 8, "mlp50m": 32}
TABLES = {"": ("", "network window:d contender ms:.3f ms_min:.3f ms_max:.3f ratio:.2f best_peer")}
NOTE = f"ms per micro-batch, update included; ratio: how many times as fast {OURS} is, median of rounds"
_BARS_AT = 4  # the size of the window that the bars show, where it was measured
FULL, SHORT = Settings(tuple(BATCH), (1, 2, 4, 16), rounds=7), Settings(("mlp",), (1, 2), rounds=2)


def run(arguments: Namespace) -> None:
    """Measure, print the table, write JSON and plot."""
    settings = chosen(FULL, SHORT, arguments, tuple(BATCH))
    burst = 0.05 if arguments.short else 0.5
    entries = available(WITH_UNTUNED, settings.contenders)
    record = {"networks": settings.networks, "windows": settings.windows, "rounds": settings.rounds}
    session = Session("speed", arguments, {**record, "seconds": burst, "batch": BATCH})
    for network in settings.networks:
        # Contenders start once, for all sizes of the window.
        with session.stopped(entries, network=network) as contenders:
            check_same_size(contenders)
            for window in settings.windows:
                print(f"{network}, windows of {window} ...", flush=True)
                times = _times(contenders, window, BATCH[network], settings.rounds, burst)
                key = {"network": network, "window": window, "batch": BATCH[network]}
                session.rows += [{**key, **figures} for figures in _figures(times)]
    session.finish(TABLES, draw, note=NOTE, size=(1 + 4.0 * len(settings.networks), 7.5))


def _times(contenders: Sequence[Contender], window: int, batch: int, rounds: int, burst: float) -> dict:
    """Return the milliseconds per micro-batch of each contender, one figure for each round; a burst lasts seconds."""
    bursts = {}
    for contender in contenders:
        seconds_of = partial(_seconds, contender, window, batch)
        windows = repeats(seconds_of, burst)
        bursts[contender.name] = lambda run=seconds_of, windows=windows: 1000 * run(windows) / (windows * window)
    return alternate(rounds, bursts)


def _seconds(contender: Contender, window: int, batch: int, windows: int) -> float:
    answer = awake(contender, window=window, batch=batch, windows=windows)
    check_loss(contender, answer)
    return answer["seconds"]


def _figures(times: Mapping[str, Sequence[float]]) -> list[dict[str, Any]]:
    """Return for each contender what its row says of its times, and of them beside ours."""
    ours = times.get(OURS)
    rows = [{"contender": name, **summary(each, "ms"), "ratio": ratio(each, ours)} for name, each in times.items()]
    peers = [row for row in rows if row["contender"] not in (OURS, UNTUNED)]
    best = min(peers, key=lambda row: row["ms"], default=None)
    return [{**row, "best_peer": row is best} for row in rows]


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw milliseconds as bars above, and the ratios to ours over the window's size below."""
    panels = plots.columns(figure, rows, 2)
    for (above, below), network, mine in panels:
        _bars(above, network, mine)
        of_one = groups([row for row in mine if row["ratio"]], "contender")
        for name, colour in plots.COLOURS.items():
            if (name,) in of_one:
                plots.line(below, of_one[name,], "ratio", color=colour, label=name)
        plots.ratios_over_windows(below, mine)
    (_, first), _, _ = panels[0]
    first.set_ylabel(f"time / time of {OURS}")
    plots.legend(figure, first, min(4, 2 * len(panels)))


def _bars(axes: Any, network: str, rows: Sequence[dict]) -> None:
    windows = [row["window"] for row in rows]
    window = _BARS_AT if _BARS_AT in windows else windows[-1]
    shown = [row for row in rows if row["window"] == window]
    colours = [plots.COLOURS[row["contender"]] for row in shown]
    plots.bars(axes, shown, "contender", "ms", "ms per micro-batch (median)", color=colours)
    axes.margins(x=0.2)
    axes.set_title(f"{network}, N = {window}")
    plots.bare(axes)
