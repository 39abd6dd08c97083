"""The benchmark `forms`: ways to write a block of a network that compute the same, and what each takes on CPU."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import Any, Callable

from . import plots
from .contenders import OURS, Entry
from .options import reject_options
from .process import Contender
from .runner import Session, alternate, ratio, repeats, summary

ENTRY = Entry(OURS, "mindspore", "forms_ours.py")
TABLES = {"": ("", "block form ms:.3f ratio:.2f difference:.0e")}
NOTE = "ms: forward and backward, median; ratio: to the first form; difference: of the outputs, relative to the first's"
BLOCKS = (
    "attention",
    "norm",
    "feed-forward",
    "cross-entropy",
    "division",
    "product",
    "narrow-product",
    "standardized",
    "pooling",
)
_BURST, _ROUNDS = 0.2, 11  # seconds of a form in a round


def run(arguments: Namespace) -> None:
    """Measure, print the table, write JSON and plot."""
    reject_options("forms", networks=arguments.networks, windows=arguments.windows, contenders=arguments.contenders)
    rounds = 2 if arguments.short else arguments.rounds or _ROUNDS
    session = Session("forms", arguments, {"rounds": rounds, "burst_s": _BURST})
    for block in BLOCKS:
        print(f"{block} ...", flush=True)
        # A process for each: what makes convolutions fast must be set before the first kernel runs.
        with session.start(ENTRY, block=block, rows=64 if arguments.short else 512) as contender:
            forms = contender.about["forms"]
            measured = alternate(rounds, {form: _burst(contender, form, arguments.short) for form in forms})
            session.rows += [_row(block, form, measured, contender.ask(form=form)) for form in forms]
    session.finish(TABLES, draw, note=NOTE, size=(13.0, 6.5))


def _burst(contender: Contender, form: str, short: bool) -> Callable[[], float]:
    """Compile a form, and return the function that runs a burst of it and returns its milliseconds."""

    def seconds(count: int) -> float:
        return contender.ask(form=form, count=count)["seconds"]

    count = repeats(seconds, _BURST / (10 if short else 1))
    return lambda: 1000 * seconds(count) / count


def _row(block: str, form: str, measured: Any, checked: Any) -> dict[str, Any]:
    """Return a form's row, with the largest difference of its output from the first form's, in parts of that."""
    first = next(iter(measured))
    return {
        "block": block,
        "form": form,
        **summary(measured[form], "ms"),
        "ratio": ratio(measured[form], measured[first]),
        "difference": checked["difference"],
    }


def draw(figure: Any, rows: Sequence[dict]) -> None:
    """Draw each block's forms as bars."""
    for axes, (block,), mine in plots.panels(figure, rows, "block", wide=3):
        plots.bars(axes, mine, "form", "ms", "ms", color=plots.COLOURS[OURS])
        axes.set_title(block)
        plots.bare(axes)
