"""How are the metrics of runs drawn?"""

from __future__ import annotations

import io
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import Any, Callable, NamedTuple

import numpy as np

from .. import _check
from ..saving.files import write_bytes
from .series import Metrics, finite, running, thinned

_WIDTH, _HEIGHT, _ROWS, _COLUMNS = 12.0, 6.6, 2, 3
_POINTS = 1200  # of a curve, at most; a panel is about half as wide in pixels
_DOTS = 12  # curves with no more points than these have dots
_SMOOTH_FROM, _SMOOTH_PART, _MOST_SMOOTH = 40, 1 / 40, 1000  # updates on each side of a mean
_WIDE = 100.0  # the ratio of values from which an axis is logarithmic
_SHOWN = (0.5, 99.5)  # percent of the values of single updates between which the axis lies
# The colours of Okabe and Ito, which the colour-blind can distinguish, without the yellow, which is too light. With 7
# colours and 4 styles of lines, 28 runs differ.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_STYLES = ("-", (0, (5, 1.5)), (0, (5, 1.2, 1, 1.2)), (0, (1.5, 1)))
# Fonts with Chinese characters, for the names of folders; those that are installed are used.
_FONTS = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "SimHei")
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "ms_accum",  # the same metrics give the same file
    "text.parse_math": False,  # a folder's name may contain a $
    "font.size": 10,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.edgecolor": "#777777",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.formatter.useoffset": False,
    "lines.linewidth": 1.6,
    "path.simplify": True,
}


class Curve(NamedTuple):
    """A curve of a panel."""

    updates: np.ndarray
    values: np.ndarray
    middle: Callable | None = None
    """What is drawn over the values of a long run: their running ``np.mean`` or ``np.median``; None for nothing."""


class Panel(NamedTuple):
    """A panel of the figure."""

    label: str
    """What is drawn, as the name of the axis."""
    curve: Callable[[Metrics], Curve]
    finish: Callable[[Any], None] = lambda axes: None
    """Sets the axis up after the curves have been drawn."""
    steps: bool = False
    dots: bool = False


def _field(name: str, middle: Callable | None = None) -> Callable[[Metrics], Curve]:
    """Return what makes the curve of a field."""
    return lambda run: Curve(run.numbers("update"), run.numbers(name), middle)


def _accuracy(run: Metrics) -> Curve:
    found = [(finite(each.updates), finite(each.results.get("accuracy"))) for each in run.evaluations]
    table = np.array([each for each in found if math.isfinite(sum(each))]).reshape(-1, 2)
    return Curve(table[:, 0], table[:, 1])


def _skipped(run: Metrics) -> Curve:
    return Curve(run.numbers("update"), np.cumsum(np.nan_to_num(run.numbers("skipped"))))


def _speed(run: Metrics) -> Curve:
    """Return the rows a second. A window in which the run evaluates or saves takes seconds, hence the median."""
    seconds = run.numbers("seconds")
    seconds[~(seconds > 0)] = math.nan
    return Curve(run.numbers("update"), run.numbers("samples") / seconds, np.median)


def half_of(windows: int) -> int:
    """Return the number of values on each side in a running mean of so many windows; 0 for a short run."""
    return 0 if windows < _SMOOTH_FROM else min(_MOST_SMOOTH, math.ceil(windows * _SMOOTH_PART))


def _drawn(axes: Any, *, faint: bool = False) -> np.ndarray:
    """Return all finite values of the strong curves, or of the faint ones."""
    lines = [line for line in axes.get_lines() if (line.get_alpha() is not None) == faint]
    values = np.concatenate([np.empty(0), *(np.asarray(line.get_ydata(), np.float64) for line in lines)])
    return values[np.isfinite(values)]


def _noisy(axes: Any) -> None:
    """Make the axis logarithmic if the values differ much, and show all of the mean, but no outliers of the updates."""
    from matplotlib.ticker import LogLocator

    values, faint = _drawn(axes), _drawn(axes, faint=True)
    wide = values.min() > 0 and values.max() / values.min() > _WIDE
    faint = faint[faint > 0] if wide else faint
    shown = np.append(values, np.percentile(faint, _SHOWN) if len(faint) else values[:1])
    low, high = _around(shown.min(), shown.max(), wide)
    if wide:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 2000 else (1,)))
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter("")
    axes.set_ylim(low, high)


def _around(low: float, high: float, logarithmic: bool) -> tuple[float, float]:
    """Return the ends of an axis with some room around the values."""
    if logarithmic:
        room = (high / low) ** 0.05
        return low / room, high * room
    room = 0.05 * (high - low) or 1.0
    return low - room, high + room


def _from_zero(axes: Any) -> None:
    most = _drawn(axes).max()
    if most > 0:
        axes.set_ylim(-0.04 * most, 1.06 * most)


def _count(axes: Any) -> None:
    from matplotlib.ticker import MaxNLocator

    most = max(1.0, _drawn(axes).max())
    axes.set_ylim(-0.04 * most, 1.06 * most)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))


def _percent(axes: Any) -> None:
    axes.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.6g} %")


def _per_second(axes: Any) -> None:
    most = np.append(_drawn(axes), np.percentile(np.append(_drawn(axes, faint=True), 0.0), _SHOWN)).max()
    axes.set_ylim(-0.04 * most, 1.06 * most)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 10 else f"{value:g}")


PANELS = (
    Panel("loss", _field("loss", np.mean), _noisy),
    Panel("learning rate", _field("lr"), _from_zero),
    Panel("gradient norm", _field("grad_norm", np.mean), _noisy),
    Panel("test accuracy", _accuracy, _percent, dots=True),
    Panel("skipped windows", _skipped, _count, steps=True),
    Panel("images/s", _speed, _per_second),
)


def names_of(runs: Sequence[Metrics]) -> list[str]:
    """Return the names of the runs' folders; the complete path where two have the same name."""
    paths = [run.path.resolve().parent for run in runs]
    names = [path.name for path in paths]
    return [_check.one_line(name if names.count(name) == 1 else str(path)) for name, path in zip(names, paths)]


def check_installed() -> None:
    """Raise an ImportError of one line if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("matplotlib is not installed. Run: pip install matplotlib") from error


def draw(runs: Sequence[Metrics], paths: Mapping[str, str]) -> None:
    """Draw runs in one figure.

    Args:
        runs (Sequence[Metrics]): the runs.
        paths (Mapping): the paths to write to, by format: ``{"png": "a.png", "svg": "a.svg"}``.

    Raises:
        OSError: If a file can't be written; an earlier one is unchanged.
    """
    with style():
        figure = figure_of(runs)
        title = {"Title": "Metrics of " + ", ".join(names_of(runs))}
        for kind, path in paths.items():
            undated = {"Date": None} if kind == "svg" else {}
            picture = io.BytesIO()
            figure.savefig(picture, format=kind, dpi=150, metadata={**title, **undated})
            write_bytes(path, picture.getvalue())


@contextmanager
def style() -> Iterator[None]:
    """Let figures look alike inside the block, whatever the user's settings of matplotlib, which may be dark."""
    import matplotlib
    from matplotlib.font_manager import fontManager

    installed = {font.name for font in fontManager.ttflist}
    fonts = ["DejaVu Sans", *(name for name in _FONTS if name in installed), "sans-serif"]
    with matplotlib.rc_context(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph ", UserWarning)  # no font has it: the PNG shows a box
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**_STYLE, "font.sans-serif": fonts})
        yield


def figure_of(runs: Sequence[Metrics]) -> Any:
    """Return the figure of some runs."""
    from matplotlib.figure import Figure  # a Figure of its own needs no display

    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    _fill(figure, runs)
    return figure


def _fill(figure: Any, runs: Sequence[Metrics]) -> None:
    from matplotlib.ticker import MaxNLocator

    grid = figure.subplots(_ROWS, _COLUMNS, sharex=True)
    for axes, panel in zip(grid.flat, PANELS):
        _panel(axes, panel, runs)
    for axes in grid[-1]:
        axes.set_xlabel("updates")
        axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.margins(x=0.03)
    figure.align_ylabels(grid)
    if any(half_of(len(run.windows)) for run in runs):
        note = "faint: each update; strong: running mean (images/s: median)"
        figure.text(0.995, 0.995, note, ha="right", va="top", color="#555555", size="small")
    if len(runs) == 1:
        figure.suptitle(*names_of(runs), x=0.01, ha="left", size="large")
    else:
        figure.suptitle(" ", size="small")  # room for the note
        handles, labels = grid.flat[0].get_legend_handles_labels()
        how = {"loc": "outside lower center", "ncols": min(len(runs), 5), "frameon": False, "handlelength": 4}
        figure.legend(handles, labels, **how)


def _panel(axes: Any, panel: Panel, runs: Sequence[Metrics]) -> None:
    """Draw the curves of a panel."""
    known = False  # whether there are values; with few among many NaN, only faint ones may be drawn
    for run, name, look in zip(runs, names_of(runs), _looks()):
        curve = panel.curve(run)
        known = known or bool(np.isfinite(curve.values).any())
        _curve(axes, panel, curve, {**look, "label": f" {name}"})  # matplotlib hides labels that begin with _
    axes.set_ylabel(panel.label)
    if len(_drawn(axes)):
        panel.finish(axes)
    elif not known:
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", va="center", color="#555555")


def _looks() -> Iterator[dict[str, Any]]:
    for colour, style in zip(cycle(_COLOURS), cycle(_STYLES)):
        yield {"color": colour, "linestyle": style}


def _curve(axes: Any, panel: Panel, curve: Curve, look: dict[str, Any]) -> None:
    if panel.dots or len(curve.values) <= (1 if panel.steps else _DOTS):
        look.update(marker="o", markersize=4)
    if panel.steps:
        look["drawstyle"] = "steps-post"
    places, values = thinned(curve.values, _POINTS)
    half = half_of(len(curve.values))
    if curve.middle is None or not half:
        axes.plot(curve.updates[places], values, **look)
        return
    axes.plot(curve.updates[places], values, color=look["color"], alpha=0.25, linewidth=0.8, zorder=1.8)
    places = np.linspace(0, len(curve.values) - 1, min(_POINTS, len(curve.values))).astype(np.int64)
    axes.plot(curve.updates[places], running(curve.values, half, places, curve.middle), **look)


def pictures_in(folder: str | os.PathLike[str]) -> dict[str, str]:
    """Return the paths of the pictures in a folder by their formats."""
    return {kind: os.path.join(folder, f"metrics.{kind}") for kind in ("png", "svg")}
