"""How long does a micro-batch take, beside the peers?

All contenders are alive, and stopped but one. In each round every one of them runs a burst, A B C A B C: what slows the
machine for a while slows them all, and ratios are taken within a round.
"""

from __future__ import annotations

import math
import statistics
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from . import speed_plot
from .choosing import available, changed, known, start
from .contenders import OURS, UNTUNED, WITH_UNTUNED, Entry, check_same_size
from .process import Contender, ContenderError
from .results import plot, save, show

BATCH = {"lenet5": 32, "mlp": 32, "transformer": 8, "mlp50m": 32}
COLUMNS = {
    "network": "",
    "window": "d",
    "contender": "",
    "ms": ".3f",
    "ms_min": ".3f",
    "ms_max": ".3f",
    "ratio": ".2f",
    "best_peer": "",
}


class Settings(NamedTuple):
    """What is measured; `seconds` is the length of a burst."""

    networks: Sequence[str] = tuple(BATCH)
    windows: Sequence[int] = (1, 2, 4, 16)
    rounds: int = 7
    seconds: float = 0.5


SHORT = Settings(networks=("mlp",), windows=(1, 2), rounds=2, seconds=0.05)


def run(arguments: Namespace) -> None:
    """Measure, print the table, write JSON and plot."""
    known("--networks", arguments.networks, tuple(BATCH))
    settings = changed(SHORT if arguments.short else Settings(), arguments)
    entries = available(WITH_UNTUNED, arguments.contenders)
    rows: list[dict] = []
    versions: dict[str, str] = {}
    for network in settings.networks:
        rows += _measure(network, entries, settings, versions)
    show([{**row, "best_peer": "best peer" if row["best_peer"] else ""} for row in rows], COLUMNS)
    print(f"ms per micro-batch, update included; ratio: how many times as fast {OURS} is, median of rounds")
    path = save("speed", arguments.output, rows, {**settings._asdict(), "batch": BATCH}, versions)
    if not arguments.short:
        plot(Path(path).with_suffix(".png"), lambda figure: speed_plot.draw(figure, rows), speed_plot.size(rows))


def _measure(network: str, entries: Sequence[Entry], settings: Settings, versions: dict) -> list[dict]:
    """Return the rows of one network; its contenders start once, for all sizes of the window."""
    rows: list[dict] = []
    with ExitStack() as stack:
        contenders = []
        for entry in entries:
            contenders.append(stack.enter_context(start(entry, "--network", network)))
            contenders[-1].stop()
            versions.update(contenders[-1].about["versions"])
        check_same_size(contenders)
        for window in settings.windows:
            print(f"{network}, windows of {window} ...", flush=True)
            request = {"window": window, "batch": BATCH[network]}
            times = _rounds(contenders, request, settings)
            rows += [{"network": network, **request, **figures} for figures in _figures(times)]
    return rows


def _rounds(contenders: Sequence[Contender], request: dict[str, int], settings: Settings) -> dict[str, list[float]]:
    """Return the milliseconds per micro-batch of each contender, one figure for each round."""
    windows = {c.name: _warm_up(c, request, settings.seconds) for c in contenders}
    times: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(settings.rounds):
        for c in contenders:
            seconds = burst(c, {**request, "windows": windows[c.name]})
            times[c.name].append(1000 * seconds / (windows[c.name] * request["window"]))
    return times


def _warm_up(contender: Contender, request: dict[str, int], seconds: float) -> int:
    """Let a contender compile, and return how many windows it runs in so many seconds."""
    burst(contender, {**request, "windows": 1})
    windows = 1
    while True:
        took = burst(contender, {**request, "windows": windows})
        if took > seconds / 4:
            return max(1, round(windows * seconds / took))
        windows *= 4


def burst(contender: Contender, request: dict[str, Any]) -> float:
    """Wake a contender for one request, and return the seconds that it measured."""
    contender.go()
    answer = contender.ask(**request)
    contender.stop()
    if not math.isfinite(answer["loss"]):
        raise ContenderError(f"The contender '{contender.name}' must have a finite loss, but got {answer['loss']}.")
    return answer["seconds"]


def _figures(times: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Return for each contender what its row says of its times, and of them beside ours."""
    medians = {name: statistics.median(each) for name, each in times.items()}
    best_peer = min((name for name in times if name not in (OURS, UNTUNED)), key=medians.__getitem__, default=None)
    return [
        {
            "contender": name,
            "ms": medians[name],
            "ms_min": min(each),
            "ms_max": max(each),
            "ratio": _ratio(each, times[OURS]) if OURS in times else None,
            "best_peer": name == best_peer,
        }
        for name, each in times.items()
    ]


def _ratio(theirs: Sequence[float], ours: Sequence[float]) -> float:
    return statistics.median(their_ms / our_ms for their_ms, our_ms in zip(theirs, ours))
