"""What does the speed benchmark look like?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .contenders import OURS, UNTUNED

COLOURS = {
    OURS: "#c0392b",
    UNTUNED: "#e6b0aa",
    "tutorial-functional": "#4d4d4d",
    "tutorial-cells": "#8c8c8c",
    "boost": "#bfbfbf",
    "torch": "#1f618d",
    "torch-compile": "#5dade2",
    "jax-multisteps": "#1e8449",
    "jax-scan": "#7dcea0",
}
_BARS_AT = 4  # the size of the window that the bars show, where it was measured


def size(rows: Sequence[dict]) -> tuple[float, float]:
    """Return the inches: a column for each network."""
    return 1 + 4.0 * len(_networks(rows)), 7.5


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw milliseconds as bars above, and the ratios to ours over the window's size below."""
    networks = _networks(rows)
    axes = figure.subplots(2, len(networks), squeeze=False)
    for column, network in enumerate(networks):
        mine = [row for row in rows if row["network"] == network]
        _bars(axes[0][column], network, mine)
        _lines(axes[1][column], mine)
    axes[1][0].set_ylabel(f"time / time of {OURS}")
    handles, labels = axes[1][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(4, 2 * len(networks)), frameon=False)


def _networks(rows: Sequence[dict]) -> list[str]:
    return list(dict.fromkeys(row["network"] for row in rows))


def _bars(axes: Any, network: str, rows: Sequence[dict]) -> None:
    windows = [row["window"] for row in rows]
    window = _BARS_AT if _BARS_AT in windows else windows[-1]
    shown = [row for row in rows if row["window"] == window]
    names = [row["contender"] for row in shown]
    bars = axes.barh(names, [row["ms"] for row in shown], color=[COLOURS[name] for name in names])
    axes.bar_label(bars, fmt="%.2f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.2)
    axes.set_title(f"{network}, N = {window}")
    axes.set_xlabel("ms per micro-batch (median)")
    axes.spines[["top", "right"]].set_visible(False)


def _lines(axes: Any, rows: Sequence[dict]) -> None:
    for name, colour in COLOURS.items():
        points = [(row["window"], row["ratio"]) for row in rows if row["contender"] == name and row["ratio"]]
        if points:
            axes.plot(*zip(*points), "o-", color=colour, label=name)
    ratio_axes(axes, rows)


def ratio_axes(axes: Any, rows: Sequence[dict]) -> None:
    """Make axes of ratios over the window, both in steps of doubling."""
    from matplotlib.ticker import LogLocator  # here, because only a full run needs matplotlib

    windows = sorted({row["window"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(windows, [str(window) for window in windows])
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.yaxis.set_minor_formatter("")
    axes.set_xlabel("window N")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
