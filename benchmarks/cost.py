"""What does accumulating cost beside a plain forward-backward?

All pieces run in turn in one process, so that they share the machine's moods; each ratio is taken within a round.
"""

from __future__ import annotations

import statistics
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from .choosing import known, start
from .contenders import OURS, Entry
from .results import plot, save, show
from .speed import BATCH

ENTRY = Entry(OURS, "mindspore", "cost_ours.py")
# What each piece is compared with; the windows that follow ours are ways not taken.
BESIDE = {
    "accumulate": "plain",
    "update": "plain, optimizer",
    "window, driver": "window, ours",
    "window, one by one": "window, ours",
    "window, gradients returned": "window, ours",
    "window, one graph": "window, ours",
}
COLUMNS = {
    "network": "",
    "piece": "",
    "ms": ".3f",
    "ms_min": ".3f",
    "beside": "",
    "ratio": ".3f",
    "ratio_min": ".3f",
    "ratio_max": ".3f",
}
_WINDOW = 4
_ROUNDS = 15
_BURST = 0.25  # seconds of a piece in a round


def run(arguments: Namespace) -> None:
    """Measure, print the table, write JSON and plot."""
    known("--networks", arguments.networks, tuple(BATCH))
    networks = arguments.networks or (("mlp",) if arguments.short else tuple(BATCH))
    window = arguments.windows[0] if arguments.windows else _WINDOW
    rounds = 2 if arguments.short else arguments.rounds or _ROUNDS
    rows: list[dict] = []
    versions: dict[str, str] = {}
    for network in networks:
        print(f"{network} ...", flush=True)
        rows += _rows(network, _measure(network, window, rounds, versions))
    show(rows, COLUMNS)
    print("ms: per micro-batch, median; ratio: to the piece beside it, median over the rounds")
    path = save("cost", arguments.output, rows, {"window": window, "rounds": rounds, "burst_s": _BURST}, versions)
    if not arguments.short:
        plot(path.with_suffix(".png"), lambda figure: _draw(figure, rows, networks))


def _measure(network: str, window: int, rounds: int, versions: dict) -> dict[str, list[float]]:
    """Return each piece's milliseconds per micro-batch, one figure a round."""
    with start(ENTRY, "--network", network, "--window", str(window)) as contender:
        versions.update(contender.about["versions"])
        pieces = contender.about["pieces"]
        counts = {piece: _count(contender, piece) for piece in pieces}
        measured: dict[str, list[float]] = {piece: [] for piece in pieces}
        for _ in range(rounds):
            for piece in pieces:
                answer = contender.ask(what=piece, count=counts[piece])
                measured[piece].append(answer["seconds"] / answer["micro_batches"] * 1e3)
    return measured


def _count(contender: Any, piece: str) -> int:
    """Compile a piece, and return how often it runs in a burst."""
    contender.ask(what=piece, count=2)
    return max(1, round(_BURST / (contender.ask(what=piece, count=2)["seconds"] / 2)))


def _rows(network: str, measured: dict[str, list[float]]) -> list[dict]:
    return [{"network": network, **_row(piece, figures, measured)} for piece, figures in measured.items()]


def _row(piece: str, figures: Sequence[float], measured: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"piece": piece, "ms": statistics.median(figures), "ms_min": min(figures)}
    beside = BESIDE.get(piece)
    if beside is None:
        return row
    ratios = [mine / other for mine, other in zip(figures, measured[beside])]
    spread = {"ratio": statistics.median(ratios), "ratio_min": min(ratios), "ratio_max": max(ratios)}
    return {**row, "beside": beside, **spread}


def _draw(figure: Any, rows: Sequence[dict], networks: Sequence[str]) -> None:
    """Draw each network's pieces as bars, side by side."""
    for axes, network in zip(figure.subplots(1, len(networks), squeeze=False)[0], networks):
        mine = [row for row in rows if row["network"] == network]
        axes.barh([row["piece"] for row in mine], [row["ms"] for row in mine], color="tab:blue")
        axes.invert_yaxis()
        axes.set(title=network, xlabel="ms per micro-batch")
        axes.spines[["top", "right"]].set_visible(False)
        if axes.get_subplotspec().colspan.start:
            axes.set_yticks([])
