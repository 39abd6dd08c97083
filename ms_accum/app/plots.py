"""Draws the metrics of runs: `python -m ms_accum.plot`. Needs matplotlib, and does not import MindSpore."""

from __future__ import annotations

import argparse
import io
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

import numpy as np

from .. import _check
from ..saving.files import check_inside, write_bytes
from .flags import Parser
from .process import DATA, DISK, USAGE, Failure, exit_code, quiet
from .series import Metrics, finite, read, table_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The command


def flags() -> Parser:
    """Return the flags."""
    text = "Draw the metrics of runs into metrics.png and metrics.svg, and write metrics.csv beside each metrics.jsonl."
    parser = Parser(text, prog="python -m ms_accum.plot")
    text = "folder of a run of train.py; several are drawn into one picture"
    parser.add_argument("folders", nargs="+", type=os.path.expanduser, metavar="DIR", help=text)
    text = "folder of the pictures (default: that of the first run)"
    parser.add_argument("--output", type=os.path.expanduser, metavar="DIR", help=text)
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def main(args: argparse.Namespace) -> None:
    """Read the metrics, draw them, and write the tables."""
    with exit_code(USAGE, ImportError):
        check_installed()
    with exit_code(DATA, OSError, ValueError):
        folders = {os.path.realpath(folder): folder for folder in args.folders}
        runs = [read(folder) for folder in folders.values()]
        tables = {str(run.path.with_suffix(".csv")): table_of(run).encode() for run in runs}
    output = args.output or args.folders[0]
    pictures = {kind: os.path.join(output, f"metrics.{kind}") for kind in ("png", "svg")}
    try:
        os.makedirs(output, exist_ok=True)
        check_inside(output, *pictures.values())
        for path in tables:
            check_inside(os.path.dirname(path), path)
        pictures_by_kind = draw(runs, tuple(pictures))
        contents = {**{path: pictures_by_kind[kind] for kind, path in pictures.items()}, **tables}
        for path, content in contents.items():
            write_bytes(path, content)
    except OSError as error:
        reason = f"'{error.filename}' can't be written: {error.strerror}" if error.filename else str(error)
        raise Failure(reason, DISK) from error
    for path in contents:
        print(f"{'written':16} {_check.one_line(path, _check.LINE)}")


def check_installed() -> None:
    """Raise an ImportError of one line if matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError("matplotlib is not installed. Run: pip install matplotlib") from error


# The figure

_POINTS = 1200  # of a running mean, at most; a panel is about half as wide in pixels
_FEW_POINTS = 12  # curves with no more points than these have dots
_MOST_DOTS = 40  # of a curve of evaluations; with more it is a line, with some rings if it is drawn over another
_RINGS = 10
_SMOOTH_FROM, _SMOOTH_FRACTION, _SMOOTH_LIMIT = 40, 1 / 40, 1000  # updates on each side of a mean
_OUTLIERS = (0.5, 99.5)  # values of single updates outside of these percentiles may lie outside of the axis
_WIDE_RATIO = 100.0  # the ratio of values from which an axis is logarithmic
# The colours of Okabe and Ito, which the colour-blind can distinguish, without the yellow, which is too light. With 7
# colours and 4 styles of lines, 28 runs differ.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_STYLES = ("-", (0, (5, 1.5)), (0, (5, 1.2, 1, 1.2)), (0, (1.5, 1)))
# Fonts with Chinese characters, for the names of folders; those that are installed are used.
_FONTS = ("Noto Sans CJK SC", "Noto Sans SC", "Source Han Sans SC", "WenQuanYi Micro Hei", "SimHei")
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "ms_accum",  # the same metrics give the same file
    "text.parse_math": False,  # a folder's name may contain a $
    "font.sans-serif": ["DejaVu Sans", *_FONTS, "sans-serif"],
    "axes.grid": True,
    "grid.color": "#dddddd",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
}


class Panel(NamedTuple):
    """A panel of the figure."""

    label: str
    """What is drawn, as the name of the axis."""
    points: Callable[[Metrics], tuple[np.ndarray, np.ndarray]]
    """Returns the updates and the values."""
    average: Callable | None = None
    """Drawn over the values of a long run: a running ``np.mean`` or ``np.median``; None for nothing."""
    axis: str = "linear"
    """``"linear"``, ``"from zero"``, or ``"wide"``: logarithmic if the values differ much."""
    number: Callable[[float], str] = "{:g}".format
    """Formats a number of the axis."""
    dots: bool = False
    """Whether up to 40 values have dots; else only few values have."""
    steps: bool = False
    """Whether the values are counts, drawn as steps."""
    bounds: tuple[float, float] = (-math.inf, math.inf)
    """Ends of the axis that are never passed."""
    validation: Callable[[Metrics], tuple[np.ndarray, np.ndarray]] | None = None
    """Returns the updates and the values of evaluations, drawn with rings in the same axes."""


def _field(name: str) -> Callable[[Metrics], tuple[np.ndarray, np.ndarray]]:
    return lambda run: (run.numbers("update"), run.numbers(name))


def _evaluated(*names: str) -> Callable[[Metrics], tuple[np.ndarray, np.ndarray]]:
    """Return a function from a run to the results of its evaluations under the first of these names that each has."""

    def points(run: Metrics) -> tuple[np.ndarray, np.ndarray]:
        pairs = []
        for evaluation in run.evaluations:
            value = next((evaluation.results[name] for name in names if name in evaluation.results), None)
            pairs.append((finite(evaluation.updates), finite(value)))
        table = np.array(pairs, np.float64).reshape(-1, 2)
        table = table[np.isfinite(table).all(axis=1)]
        return table[:, 0], table[:, 1]

    return points


def _skipped(run: Metrics) -> tuple[np.ndarray, np.ndarray]:
    return run.numbers("update"), np.cumsum(np.nan_to_num(run.numbers("skipped")))


def _speed(run: Metrics) -> tuple[np.ndarray, np.ndarray]:
    seconds = run.numbers("seconds")
    seconds[~(seconds > 0)] = math.nan
    return run.numbers("update"), run.numbers("samples") / seconds


_LOSS = Panel("loss", _field("loss"), np.mean, "wide")
_VALIDATION = Panel("validation loss", _evaluated("eval_loss", "loss"), dots=True)
_ACCURACY = Panel(
    "test accuracy", _evaluated("accuracy"), number=lambda value: f"{100 * value:.6g} %", dots=True, bounds=(0.0, 1.0)
)
_BITS = Panel("bits per character", _evaluated("bits_per_character"), dots=True, bounds=(0.0, math.inf))


def panels_of(runs: Sequence[Metrics]) -> tuple[Panel, ...]:
    """Return the panels of a figure: what evaluations have measured differs between images and texts."""

    def has(panel: Panel) -> bool:
        return any(len(panel.points(run)[1]) for run in runs)

    measured = tuple(filter(has, (_ACCURACY, _BITS))) or ((_VALIDATION,) if has(_VALIDATION) else (_ACCURACY,))
    is_over_loss = has(_VALIDATION) and _VALIDATION not in measured
    return (
        _LOSS._replace(validation=_VALIDATION.points) if is_over_loss else _LOSS,
        Panel("learning rate", _field("lr"), None, "from zero"),
        Panel("gradient norm", _field("grad_norm"), np.mean, "wide"),
        *measured,
        Panel("skipped windows", _skipped, None, "from zero", steps=True),
        # A window in which the run evaluates or saves takes seconds, hence the median.
        Panel("rows/s", _speed, np.median, "from zero", "{:,.6g}".format),
    )


def curves_of(run: Metrics) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Yield the label, the updates and the values of each curve of a run."""
    for panel in panels_of([run]):
        yield panel.label, *panel.points(run)
        if panel.validation is not None:
            yield _VALIDATION.label, *panel.validation(run)


def draw(runs: Sequence[Metrics], kinds: Sequence[str], *, mark: float | None = None) -> dict[str, bytes]:
    """Draw runs in one figure.

    Args:
        runs (Sequence[Metrics]): the runs.
        kinds (Sequence[str]): formats, of ``"png"`` and ``"svg"``.
        mark (Optional[float]): an update at which a line is drawn. Default: ``None``.

    Returns:
        dict[str, bytes], the contents of a file of each format.
    """
    contents = {}
    with style():
        figure = figure_of(runs, mark)
        for kind in kinds:
            metadata: dict[str, Any] = {"Title": "Metrics of " + ", ".join(run_names(runs))}
            if kind == "svg":
                metadata["Date"] = None
            picture = io.BytesIO()
            figure.savefig(picture, format=kind, dpi=150, metadata=metadata)
            contents[kind] = picture.getvalue()
    return contents


@contextmanager
def style() -> Iterator[None]:
    """Let figures look alike inside the block, whatever the user's settings of matplotlib, which may be dark."""
    import matplotlib

    with quiet(), matplotlib.rc_context(), warnings.catch_warnings():  # the log is about fonts
        warnings.filterwarnings("ignore", "Glyph ", UserWarning)  # no font has it: the PNG shows a box
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def run_names(runs: Sequence[Metrics]) -> list[str]:
    """Return the names of the runs' folders; the complete path where two have the same name."""
    paths = [run.path.resolve().parent for run in runs]
    names = [path.name for path in paths]
    return [_check.one_line(name if names.count(name) == 1 else str(path)) for name, path in zip(names, paths)]


def figure_of(runs: Sequence[Metrics], mark: float | None = None) -> Figure:
    """Return the figure of some runs."""
    from matplotlib.figure import Figure  # a Figure of its own needs no display

    panels = panels_of(runs)
    columns = math.ceil(len(panels) / 2)
    figure = Figure(figsize=(4.0 * columns, 6.6), layout="constrained")
    grid = figure.subplots(2, columns, sharex=True, squeeze=False)
    for axes, panel in zip(grid.flat, panels):
        _draw_panel(axes, panel, runs)
        if mark is not None:
            axes.axvline(mark, color="#555555", linestyle="--", linewidth=1.2)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    grid[0, 0].set_xlim(*_updates_shown(runs))
    for axes in grid.flat[len(panels) - columns : len(panels)]:  # the lowest panel of each column
        axes.set_xlabel("updates")
        axes.tick_params(labelbottom=True)
        axes.locator_params(axis="x", nbins=4, integer=True, steps=[1, 2, 5, 10])
        axes.xaxis.set_major_formatter("{x:,.0f}")
    figure.align_ylabels(grid)
    if any(half_window(len(run.windows)) for run in runs):
        note = "faint: each update; strong: running mean (rows/s: median)"
        figure.text(0.995, 0.995, note, ha="right", va="top", color="#555555", size="small")
    if len(runs) == 1:
        figure.suptitle(*run_names(runs), x=0.01, ha="left", size="large")
    else:
        figure.suptitle(" ", size="small")  # room for the note
        figure.legend(
            *grid.flat[0].get_legend_handles_labels(),
            loc="outside lower center",
            ncols=min(len(runs), 5),
            frameon=False,
            handlelength=4,
        )
    return figure


def _updates_shown(runs: Sequence[Metrics]) -> tuple[float, float]:
    """Return the ends of the axis of updates: from 0, unless the metrics begin late, to the last one of all runs."""
    updates = [run.numbers("update") for run in runs]
    updates += [np.array([finite(evaluation.updates) for evaluation in run.evaluations]) for run in runs]
    known = np.concatenate([numbers[np.isfinite(numbers)] for numbers in updates])
    first, last = known.min(initial=math.inf), known.max(initial=0.0)
    first = first if 2 * first > last > first else 0.0
    margin = 0.02 * (last - first) or 1.0
    return first - margin, last + margin


def _draw_panel(axes: Axes, panel: Panel, runs: Sequence[Metrics]) -> None:
    """Draw the curves of a panel."""
    strong, faint = np.empty(0), np.empty(0)
    for run, name, colour, dashes in zip(runs, run_names(runs), cycle(COLOURS), cycle(_STYLES)):
        updates, values = panel.points(run)
        # matplotlib hides labels that begin with _
        line_style: dict[str, Any] = {"label": f" {name}", "color": colour, "linestyle": dashes, "linewidth": 1.6}
        if panel.steps:
            line_style["drawstyle"] = "steps-post"
        if panel.dots:
            line_style.update(clip_on=False, in_layout=False)  # a dot at 100 % is complete
        if len(values) <= (_MOST_DOTS if panel.dots else 1 if panel.steps else _FEW_POINTS):
            line_style.update(marker="o", markersize=4)
        half = half_window(len(values))
        if panel.average is not None and half:
            axes.plot(updates, values, color=colour, alpha=0.25, linewidth=0.8, zorder=1.8)
            faint = np.append(faint, values[np.isfinite(values)])
            indices = np.linspace(0, len(values) - 1, min(_POINTS, len(values))).astype(np.int64)
            updates = updates[indices]
            values = running_average(values, half, indices, panel.average)
        axes.plot(updates, values, **line_style)
        if panel.dots and len(values) == len(runs) == 1:
            text = panel.number(values[0])
            axes.annotate(text, (updates[0], values[0]), (-8, 0), textcoords="offset points", ha="right", va="center")
        strong = np.append(strong, values[np.isfinite(values)])
        if panel.validation is not None:
            strong = np.append(strong, _draw_validation(axes, panel.validation(run), colour, dashes))
    if panel.validation is not None:
        _explain_rings(axes)
    axes.set_ylabel(panel.label)
    axes.yaxis.set_major_formatter(lambda value, _: panel.number(value))
    if panel.steps:
        axes.locator_params(axis="y", integer=True)
    if len(strong):
        _set_limits(axes, panel, strong, faint)
    elif not len(faint):  # with few values among many NaN, only faint ones may be drawn
        axes.set_yticks([])
        axes.text(0.5, 0.5, "no values", transform=axes.transAxes, ha="center", va="center", color="#555555")


def _draw_validation(axes: Axes, points: tuple[np.ndarray, np.ndarray], colour: str, dashes: Any) -> np.ndarray:
    """Draw the results of evaluations as a thin line with rings, and return them."""
    updates, values = points
    rings: dict[str, Any] = {"marker": "o", "markersize": 4.5, "markerfacecolor": "white"}
    every = max(1, math.ceil(len(values) / _RINGS)) if len(values) > _MOST_DOTS else 1
    axes.plot(updates, values, color=colour, linestyle=dashes, linewidth=1, markevery=every, zorder=2.2, **rings)
    return values


def _explain_rings(axes: Axes) -> None:
    from matplotlib.lines import Line2D

    rings = Line2D([], [], color="#555555", linewidth=1, marker="o", markersize=4.5, markerfacecolor="white")
    training = Line2D([], [], color="#555555", linewidth=1.6)
    axes.legend([training, rings], ["training", "validation"], frameon=False, loc="upper right", fontsize="small")


def _set_limits(axes: Axes, panel: Panel, strong: np.ndarray, faint: np.ndarray) -> None:
    """Set the ends of the axis of values: it shows all strong ones, but no outliers of the faint ones."""
    wide = panel.axis == "wide" and strong.min() > 0 and strong.max() / strong.min() > _WIDE_RATIO
    if wide:
        faint = faint[faint > 0]
    shown = np.append(strong, np.percentile(faint, _OUTLIERS) if len(faint) else [])
    low, high = shown.min(), shown.max()
    if panel.axis == "from zero":
        low, high = min(low, 0.0), high or 1.0
    if wide:
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(lambda value, _: panel.number(value))
        axes.yaxis.set_minor_formatter("")
        margin = (high / low) ** 0.05
        axes.set_ylim(low / margin, high * margin)
    else:
        margin = 0.05 * (high - low) or 1.0
        axes.set_ylim(max(low - margin, panel.bounds[0]), min(high + margin, panel.bounds[1]))


def half_window(windows: int) -> int:
    """Return the number of values on each side in a running mean of so many windows; 0 for a short run."""
    return 0 if windows < _SMOOTH_FROM else min(_SMOOTH_LIMIT, math.ceil(windows * _SMOOTH_FRACTION))


def running_average(values: np.ndarray, half: int, indices: np.ndarray, average: Callable = np.mean) -> np.ndarray:
    """Return at some places the average of the values there, `half` values before and `half` after.

    NaN are left out, and stay NaN. Each mean has its own sum: differences of cumulative sums would lose small values
    after a large one.

    Args:
        values (ndarray): the values.
        half (int): the number of values on each side.
        indices (ndarray): the numbers of the values to replace by the average.
        average (Callable): ``np.mean`` or ``np.median``. Default: ``np.mean``.
    """
    averages = np.full(len(indices), math.nan)
    for position, index in enumerate(indices):
        if np.isfinite(values[index]):
            neighbours = values[max(0, index - half) : index + half + 1]
            averages[position] = average(neighbours[np.isfinite(neighbours)])
    return averages
