"""The charts of the documents as SVG: the browser draws the text, in either language, and a test can compare the files.

A chart has panels side by side; a panel has lines, of points (x, y), or marked points.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

COLOURS = ("#0072b2", "#e69f00", "#009e73", "#d55e00")
"""tuple[str], Okabe and Ito's, which colour-blind people can tell apart."""
INK, _PAPER, _GRID = "#1f2933", "#ffffff", "#e4e7eb"
_FONT = "Helvetica, Arial, Noto Sans CJK SC, Microsoft YaHei, sans-serif"
_LEFT, _TOP, _BELOW, _GAP = 60, 42, 50, 10  # around the frame of a panel


class Line(NamedTuple):
    """Points of one kind."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: str
    width: float = 1.6
    dash: str = ""
    labels: Sequence[str] = ()
    """Sequence[str], words at the points; with them, the points are marked."""


class Axis(NamedTuple):
    """An axis: its words, its ends, and where it has marks."""

    words: str
    low: float
    high: float
    ticks: Sequence[float]
    form: str = "g"
    log: bool = False

    def place(self, value: float) -> float:
        """Return where a value is: 0 at the low end, 1 at the high one; values beyond an end are put at it."""
        value = min(max(value, self.low), self.high)
        if self.log:
            return math.log(value / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


class Panel(NamedTuple):
    """A coordinate system and what is in it."""

    title: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    has_legend: bool = True


def chart(title: str, panels: Sequence[Panel], *, width: float = 235, height: float = 230) -> str:
    """Return an SVG of panels with frames of this size; `title` is for people who do not see it."""
    step = _LEFT + width + _GAP
    full, high = step * len(panels) + 4, _TOP + height + _BELOW
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {full:g} {high:g}' role='img' fill='{INK}' "
    head += f"font-family='{_FONT}' font-size='13'>"
    parts = [head, f"<title>{escape(title)}</title>"]
    parts.append(f"<rect width='{full:g}' height='{high:g}' rx='6' fill='{_PAPER}'/>")
    for number, panel in enumerate(panels):
        parts.append(f"<g transform='translate({_LEFT + number * step:g} {_TOP})'>")
        parts += [*_frame(panel, width, height), *_lines(panel, width, height), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _frame(panel: Panel, width: float, height: float) -> Iterator[str]:
    yield f"<text x='0' y='-16' font-size='15' font-weight='bold'>{escape(panel.title)}</text>"
    for tick in panel.x.ticks:
        x = panel.x.place(tick) * width
        yield f"<path d='M{x:.1f} 0V{height:g}' stroke='{_GRID}'/>"
        yield f"<text x='{x:.1f}' y='{height + 18:g}' text-anchor='middle'>{tick:{panel.x.form}}</text>"
    for tick in panel.y.ticks:
        y = (1 - panel.y.place(tick)) * height
        yield f"<path d='M0 {y:.1f}H{width:g}' stroke='{_GRID}'/>"
        yield f"<text x='-6' y='{y + 4.5:.1f}' text-anchor='end'>{tick:{panel.y.form}}</text>"
    yield f"<path d='M0 0V{height:g}H{width:g}' fill='none' stroke='{INK}'/>"
    yield f"<text x='{width / 2:g}' y='{height + 40:g}' text-anchor='middle'>{escape(panel.x.words)}</text>"
    yield (
        f"<text transform='translate(-46 {height / 2:g}) rotate(-90)' text-anchor='middle'>"
        f"{escape(panel.y.words)}</text>"
    )


def _lines(panel: Panel, width: float, height: float) -> Iterator[str]:
    for number, line in enumerate(panel.lines):
        places = [(panel.x.place(x) * width, (1 - panel.y.place(y)) * height) for x, y in line.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dash = f" stroke-dasharray='{line.dash}'" if line.dash else ""
        style = f"stroke='{line.colour}' stroke-width='{line.width:g}'{dash}"
        yield f"<path d='M{path}' fill='none' stroke-linejoin='round' {style}/>"
        for count, ((x, y), words) in enumerate(zip(places, line.labels)):
            below = 20 * (count % 2)  # in turn, so that words of near points stay apart
            yield f"<circle cx='{x:.1f}' cy='{y:.1f}' r='3.5' fill='{line.colour}'/>"
            yield f"<text x='{x + 6:.1f}' y='{y - 6 + below:.1f}'>{escape(words)}</text>"
        if panel.has_legend:
            y = 10 + 18 * number
            yield f"<path d='M{width - 96:g} {y:g}h22' {style}/>"
            yield f"<text x='{width - 70:g}' y='{y + 4.5:g}'>{escape(line.name)}</text>"
