"""The benchmark `lengths`: what padding costs, in micro-batches of one shape and of several.

Samples of different lengths, the zoo's GPT, the driver. With one shape all rows are padded to the longest sample.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from .contenders import OURS, Entry
from .options import reject_options, select_settings
from .process import Contender
from .runner import Session, alternate, check_loss, ratios, summary

ENTRY = Entry(OURS, "mindspore", "lengths_ours.py")
TABLES = {"": ("", "distribution shapes:d padding:.3f graphs:d us:.1f us_min:.1f us_max:.1f ratio:.2f load:.1f")}
NOTE = "us: per token that is no padding, median; ratio: of one shape to this, median over the rounds"
_EPOCHS = 3  # of the first run, which compiles


class Settings(NamedTuple):
    """What is measured; `shapes` begins with 1, with which the others are compared."""

    distributions: Sequence[str] = ("uniform", "lognormal", "two peaks")
    shapes: Sequence[int] = (1, 4, 8)
    samples: int = 1000
    tokens: int = 2048
    window: int = 4
    rounds: int = 7


SHORT = Settings(("lognormal",), (1, 2), samples=24, tokens=512, window=2, rounds=1)


def run(arguments: Namespace) -> None:
    """Measure, print the table and write JSON."""
    reject_options("lengths", networks=arguments.networks, windows=arguments.windows, contenders=arguments.contenders)
    settings = select_settings(Settings(), SHORT, arguments, ())
    session = Session("lengths", arguments, settings._asdict())
    sizes = {"samples": settings.samples, "tokens": settings.tokens, "window": settings.window}
    for distribution in settings.distributions:
        print(f"{distribution} ...", flush=True)
        with session.start(ENTRY, distribution=distribution, **sizes) as contender:
            first = {shapes: contender.ask(shapes=shapes, epochs=_EPOCHS) for shapes in settings.shapes}
            loads = [os.getloadavg()[0]]
            bursts = {shapes: partial(_burst, contender, shapes) for shapes in settings.shapes}
            measured = alternate(settings.rounds, bursts)
            loads.append(os.getloadavg()[0])
        for shapes, answer in first.items():
            row = {"distribution": distribution, **_row(shapes, answer, measured)}
            session.rows.append({**row, "load": sum(loads) / len(loads)})
    session.finish(TABLES, note=NOTE)


def _burst(contender: Contender, shapes: int) -> float:
    """Train an epoch, and return microseconds per token."""
    answer = contender.ask(shapes=shapes, epochs=1)
    check_loss(contender, answer)
    return answer["seconds"] / answer["tokens"] * 1e6


def _row(shapes: int, first: Mapping[str, Any], measured: Mapping[int, Sequence[float]]) -> dict[str, Any]:
    """Return the row of this number of shapes; its ratio says how many times faster it is than one shape."""
    about = {name: first[name] for name in ("padding", "graphs")}
    times = summary(measured[shapes], "us")
    return {
        "shapes": shapes,
        **about,
        "of": first["shapes"],
        **times,
        **summary(ratios(measured[1], measured[shapes]), "ratio"),
    }
