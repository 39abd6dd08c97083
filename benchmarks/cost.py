"""The benchmark `cost`: what accumulating costs compared with a plain forward-backward.

All pieces run in turn in one process, so that what slows the machine slows them all; ratios are taken within a round.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from .contenders import OURS, Entry
from .options import Settings, select_settings
from .process import Contender
from .runner import Session, alternate, ratios, repeats, summary
from .speed import BATCH

ENTRY = Entry(OURS, "mindspore", "cost_ours.py")
# What each piece is compared with: also windows with what users may add; last MindSpore's default mode, in which ours
# are compiled, graph mode, and a loop without `ms.jit`.
COMPARED_WITH = {
    "plain, without our branch": "plain",
    "accumulate": "plain",
    "update": "plain, optimizer",
    "update, without C++ operators": "plain, optimizer",
    "window, driver": "plain",
    "windows, skip_micro": "windows",
    "windows, dynamic loss scale": "windows",
    "windows, average": "windows",
    "windows, two terms": "windows, one number",
    "windows, default mode": "windows",
    "Model, default mode": "Model, graph mode",
    "loop, Accumulator": "loop, plain",
}
TABLES = {"": ("", "network piece ms:.3f ms_min:.3f beside ratio:.3f ratio_min:.3f ratio_max:.3f")}
NOTE = "ms: per micro-batch, median; ratio: to the piece beside it, median over the rounds"
_BURST = 0.25  # seconds of a piece in a round
# Of the windows the first one.
FULL, SHORT = Settings(tuple(BATCH), (4,), rounds=15), Settings(("mlp",), (4,), rounds=2)


def run(arguments: Namespace) -> None:
    """Measure, print the table and write JSON."""
    settings = select_settings(FULL, SHORT, arguments, tuple(BATCH))
    window, rounds = settings.windows[0], settings.rounds
    session = Session("cost", arguments, {"window": window, "rounds": rounds, "burst_s": _BURST})
    for network in settings.networks:
        print(f"{network} ...", flush=True)
        with session.start(ENTRY, network=network, window=window) as contender:
            measured = alternate(rounds, {piece: _burst(contender, piece) for piece in contender.about["pieces"]})
        session.rows += [{"network": network, **_row(piece, measured)} for piece in measured]
    session.finish(TABLES, note=NOTE)


def _burst(contender: Contender, piece: str) -> Any:
    """Compile a piece, and return the function that runs a burst of it and returns milliseconds per micro-batch."""
    ask = partial(contender.ask, what=piece)
    count = repeats(lambda count: ask(count=count)["seconds"], _BURST)

    def burst() -> float:
        answer = ask(count=count)
        return answer["seconds"] / answer["micro_batches"] * 1e3

    return burst


def _row(piece: str, measured: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    row = {"piece": piece, **summary(measured[piece], "ms")}
    del row["ms_max"]
    beside = COMPARED_WITH.get(piece)
    if beside is None:
        return row
    return {**row, "beside": beside, **summary(ratios(measured[piece], measured[beside]), "ratio")}
