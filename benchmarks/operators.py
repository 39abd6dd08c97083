"""The benchmark `operators`: the kernels in which a forward-backward spends its time, ours and PyTorch's.

Each framework's own profiler; the shares are of the time in all kernels, and profiling takes time of its own.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from . import plots
from .contenders import OURS, Entry, available
from .options import Settings, reject_options, select_settings
from .runner import Session
from .speed import BATCH

ENTRIES = (Entry(OURS, "mindspore", "operators_ours.py"), Entry("torch", "torch", "operators_torch.py"))
TABLES = {"": ("", "network contender kernel calls:d ms:.3f share:.3f")}
NOTE = "ms and calls: of one forward-backward, without an update; the dearest kernels, by their own time"
_SHOWN = 10
FULL, SHORT = Settings(tuple(BATCH), (1,), rounds=10), Settings(("mlp",), (1,), rounds=2)


def run(arguments: Namespace) -> None:
    """Profile, print the table, write JSON and plot."""
    reject_options("operators", windows=arguments.windows)
    settings = select_settings(FULL, SHORT, arguments, tuple(BATCH))
    session = Session("operators", arguments, {"rounds": settings.rounds, "batch": BATCH})
    entries = available(ENTRIES, settings.contenders)
    for network in settings.networks:
        for entry in entries:
            print(f"{network}, {entry.name} ...", flush=True)
            with session.start(entry, network=network, batch=BATCH[network]) as contender:
                session.rows += _rows(network, entry.name, contender.ask(count=settings.rounds)["kernels"])
    session.finish(TABLES, draw, note=NOTE, size=(13.0, 13.0))


def _rows(network: str, contender: str, kernels: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    """Return a row for each of the dearest kernels, given with their calls and milliseconds."""
    total = sum(ms for _, _, ms in kernels)
    dearest = sorted(kernels, key=lambda kernel: kernel[2], reverse=True)[:_SHOWN]
    key = {"network": network, "contender": contender}
    return [
        {**key, "kernel": name, "calls": round(calls), "ms": ms, "share": ms / total} for name, calls, ms in dearest
    ]


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw for each network and contender its kernels as bars."""
    for axes, (network, contender), mine in plots.panels(figure, rows, "network", "contender", wide=2):
        short = [{**row, "kernel": row["kernel"].rpartition("::")[2]} for row in mine]
        plots.bars(axes, short, "kernel", "ms", "ms", color=plots.COLOURS[contender])
        axes.set_title(f"{network}, {contender}")
        plots.bare(axes)
