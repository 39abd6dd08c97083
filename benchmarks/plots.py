"""The plotter: figures, and the kinds of axes that the benchmarks draw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Callable

from .contenders import OURS, PLAIN, UNTUNED
from .tables import groups

COLOURS = {
    OURS: "#c0392b",
    UNTUNED: "#e6b0aa",
    PLAIN: "#f5cba7",
    "tutorial-functional": "#4d4d4d",
    "tutorial-cells": "#8c8c8c",
    "boost": "#bfbfbf",
    "tutorial-functional-tuned": "#7e5109",
    "tutorial-cells-tuned": "#ca6f1e",
    "boost-tuned": "#f0b27a",
    "torch": "#1f618d",
    "torch-compile": "#5dade2",
    "jax-multisteps": "#1e8449",
    "jax-scan": "#7dcea0",
}


def plot(path: str | Path, draw: Callable[[Any], None], size: tuple[float, float] = (9.0, 5.0)) -> None:
    """Write a PNG of what `draw` puts into a matplotlib Figure, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure  # a Figure of its own draws with Agg and needs no display
    except ImportError:
        print("no plot: matplotlib is missing (pip install -r benchmarks/requirements.txt)")
        return
    figure = Figure(figsize=size, layout="constrained")
    draw(figure)
    figure.savefig(path, dpi=150)
    print(f"plot: {path}")


def columns(figure: Any, rows: Sequence[dict], high: int = 1) -> list[tuple[Any, str, list[dict]]]:
    """Return for each network its column of axes (the only ones, or a list), its name and its rows."""
    networks = groups(rows, "network")
    grid = figure.subplots(high, len(networks), squeeze=False).T
    return [(axes if high > 1 else axes[0], name, mine) for axes, ((name,), mine) in zip(grid, networks.items())]


def panels(figure: Any, rows: Sequence[dict], *keys: str, wide: int) -> list[tuple[Any, tuple, list[dict]]]:
    """Return for each group of rows its axes, in a grid of `wide` columns, its values of the keys and its rows."""
    grouped = groups(rows, *keys)
    grid = figure.subplots(math.ceil(len(grouped) / wide), wide, squeeze=False)
    for axes in grid.flat[len(grouped) :]:
        axes.set_visible(False)
    return [(axes, values, mine) for axes, (values, mine) in zip(grid.flat, grouped.items())]


def bars(axes: Any, rows: Sequence[dict], name: str, value: str, label: str, fmt: str = "%.2f", **style: Any) -> None:
    """Draw a bar for each row, from above to below, with the number behind it."""
    drawn = axes.barh([row[name] for row in rows], [row[value] for row in rows], **style)
    axes.bar_label(drawn, fmt=fmt, padding=3)
    axes.margins(x=0.15)
    axes.invert_yaxis()
    axes.set_xlabel(label)


def bare(axes: Any) -> None:
    """Leave out the lines above and to the right."""
    axes.spines[["top", "right"]].set_visible(False)


def legend(figure: Any, axes: Any, columns: int) -> None:
    """Put the legend of axes below all of them."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)


def line(axes: Any, rows: Sequence[dict], value: str, style: str = "o-", **more: Any) -> None:
    """Draw a value of the rows over the window."""
    axes.plot([row["window"] for row in rows], [row[value] for row in rows], style, **more)


def over_windows(axes: Any, rows: Sequence[dict]) -> None:
    """Make axes over the window, in steps of doubling."""
    windows = sorted({row["window"] for row in rows})
    axes.set_xscale("log", base=2)
    axes.set_xticks(windows, [str(window) for window in windows])
    axes.set_xlabel("window N")
    axes.grid(alpha=0.3)
    bare(axes)


def ratios_over_windows(axes: Any, rows: Sequence[dict]) -> None:
    """Make axes of ratios over the window, both in steps of doubling."""
    from matplotlib.ticker import LogLocator  # here, because only a full run needs matplotlib

    axes.set_yscale("log")
    over_windows(axes, rows)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}×")
    axes.yaxis.set_minor_formatter("")
