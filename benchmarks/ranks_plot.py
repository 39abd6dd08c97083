"""What does the benchmark of several ranks look like?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .speed_plot import ratio_axes

SIZE = (12.0, 7.0)
COLOURS = {
    "one process": "#4d4d4d",
    "apart": "#bfbfbf",
    "window's end": "#c0392b",
    "every micro-batch": "#e67e22",
    "ZeRO-1": "#1f618d",
    "ZeRO-2": "#5dade2",
}
_STYLES = ("-", "--", ":")


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw the ratio to one process over the window, a column for each network, and below it the peaks of memory."""
    times = [row for row in rows if row["part"] == "time"]
    networks = list(dict.fromkeys(row["network"] for row in times))
    above, below = figure.subfigures(2, 1, height_ratios=(3, 2))
    panels = above.subplots(1, len(networks), squeeze=False)[0]
    for axes, network in zip(panels, networks):
        _ratios(axes, network, [row for row in times if row["network"] == network])
    panels[0].set_ylabel("time of an update / time of one process")
    handles, labels = panels[0].get_legend_handles_labels()
    above.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    _peaks(below.subplots(), [row for row in rows if row["part"] == "memory"])


def _ratios(axes: Any, network: str, rows: Sequence[dict]) -> None:
    ranks = sorted({row["ranks"] for row in rows})
    for way in [way for way in COLOURS if way not in ("one process", "apart")]:
        for count, style in zip(ranks, _STYLES):
            points = [(row["window"], row["ratio"]) for row in rows if row["way"] == way and row["ranks"] == count]
            axes.plot(*zip(*points), "o", linestyle=style, color=COLOURS[way], label=f"{way}, {count} ranks")
    ratio_axes(axes, rows)
    axes.axhline(1, color=COLOURS["one process"], linewidth=0.8)
    axes.set_title(network)


def _peaks(axes: Any, rows: Sequence[dict]) -> None:
    names = [f"{row['way']}, {row['ranks']}" for row in rows]
    bars = axes.barh(names, [row["peak_mib"] for row in rows], color=[COLOURS[row["way"]] for row in rows])
    axes.bar_label(bars, fmt="{:,.0f}", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("peak MiB of the largest rank")
    axes.spines[["top", "right"]].set_visible(False)
