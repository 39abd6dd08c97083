"""How are curves and images drawn as text, without a library?

Curves are SVG elements whose colours are classes of the page's style; images are PNG files in `data:` addresses.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np

WIDTH, HEIGHT = 480, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 44
# More points than these are drawn as the mean and the range of neighbours: a page stays small, whatever the run.
MOST_POINTS = 400
_DOTS = 40  # so few points are marked
_TICKS = 5


def line_chart(name: str, points: Sequence[tuple[float, float]], *, mark: float | None = None) -> str:
    """Return a curve over the updates as an SVG element.

    Args:
        name (str): what is drawn, for screen readers.
        points (Sequence): pairs of update and value, all finite, in the order of the updates; at least one.
        mark (Optional[float]): the update of the model, where a line is drawn. Default: ``None``.
    """
    table = np.array(points, np.float64)
    across = _Axis(*_padded(table[:, 0]), _LEFT, WIDTH - _RIGHT)
    up = _Axis(*_span(table[:, 1]), HEIGHT - _BOTTOM, _TOP)
    parts = [_grid(across, up), _curve(table, across, up)]
    if mark is not None and across.low <= mark <= across.high:
        x = across.at(mark)
        parts.append(f'<line class="mark" x1="{x}" y1="{_TOP}" x2="{x}" y2="{HEIGHT - _BOTTOM}"/>')
    label = escape(f"{name} {_in_words(table)}", quote=True)
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


class _Axis:
    """An axis of a chart, from values to places in pixels."""

    def __init__(self, low: float, high: float, first: int, last: int):
        self.low, self.high = low, high
        self._first, self._last = first, last

    def at(self, value: float) -> str:
        """Return the place of a value, as text."""
        part = (value - self.low) / (self.high - self.low)
        return f"{self._first + part * (self._last - self._first):.1f}"


def _span(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of an axis for these values: it begins with 0 unless that would flatten the curve."""
    low, high = float(values.min()), float(values.max())
    if low >= 0 and (low <= 0.6 * high or _is_flat(low, high)):
        return 0.0, (high * 1.05 or 1.0)
    return _padded(values)


def _padded(values: np.ndarray) -> tuple[float, float]:
    """Return the ends of an axis: those of the values, and around a single value some room."""
    low, high = float(values.min()), float(values.max())
    room = max(abs(high), 1.0) * 0.1
    return (low - room, high + room) if _is_flat(low, high) else (low, high)


def _is_flat(low: float, high: float) -> bool:
    return high - low <= 1e-6 * max(abs(low), abs(high))


def ticks(low: float, high: float, least: float = 0) -> list[float]:
    """Return at most six round numbers between two, `least` apart or more."""
    power = 10.0 ** math.floor(math.log10((high - low) / _TICKS))
    step = next(power * times for times in (1, 2, 5, 10, 20) if (high - low) / (power * times) <= _TICKS)
    step = max(step, least)
    return [number * step for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _grid(across: _Axis, up: _Axis) -> str:
    """Return the axes with their numbers, and lines across the chart."""
    bottom, parts = HEIGHT - _BOTTOM, []
    for value in ticks(up.low, up.high):
        y = up.at(value)
        parts.append(f'<line class="grid" x1="{_LEFT}" y1="{y}" x2="{WIDTH - _RIGHT}" y2="{y}"/>')
        parts.append(f'<text class="up" x="{_LEFT - 6}" y="{y}" dy="0.35em">{value:,.4g}</text>')
    for value in ticks(across.low, across.high, 1):
        parts.append(f'<text class="across" x="{across.at(value)}" y="{bottom + 18}">{_short(value)}</text>')
    middle = f"{(_LEFT + WIDTH - _RIGHT) / 2:.0f}"
    parts.append(f'<text class="across" x="{middle}" y="{HEIGHT - 6}">update</text>')
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{bottom}" x2="{WIDTH - _RIGHT}" y2="{bottom}"/>')
    return "".join(parts)


def _short(value: float) -> str:
    return f"{value / 1000:,.6g}k" if abs(value) >= 10_000 else f"{value:,.6g}"


def _curve(table: np.ndarray, across: _Axis, up: _Axis) -> str:
    """Return the line through the points, or through the means of neighbours with a band of their ranges."""
    parts = []
    if len(table) > MOST_POINTS:
        groups = np.array_split(table, MOST_POINTS)
        table = np.array([group.mean(axis=0) for group in groups])
        edge = [(x, group[:, 1].max()) for (x, _), group in zip(table, groups)]
        edge += [(x, group[:, 1].min()) for (x, _), group in zip(table[::-1], groups[::-1])]
        parts.append(f'<polygon class="band" points="{_places(edge, across, up)}"/>')
    parts.append(f'<polyline class="line" points="{_places(table, across, up)}"/>')
    if len(table) <= _DOTS:
        parts += [f'<circle class="dot" cx="{across.at(x)}" cy="{up.at(y)}" r="3"/>' for x, y in table]
    return "".join(parts)


def _places(points: Any, across: _Axis, up: _Axis) -> str:
    return " ".join(f"{across.at(x)},{up.at(y)}" for x, y in points)


def _in_words(table: np.ndarray) -> str:
    """Return the course of a curve in words."""
    (first, begin), (last, end) = table[0], table[-1]
    low, high = table[table[:, 1].argmin()], table[table[:, 1].argmax()]
    course = f"from {begin:.4g} at update {first:.0f} to {end:.4g} at update {last:.0f}"
    return f"{course}; lowest {low[1]:.4g} at {low[0]:.0f}, highest {high[1]:.4g} at {high[0]:.0f}"


def pixels(image: np.ndarray, mean: Any, std: Any) -> np.ndarray:
    """Return the bytes of a picture from the input of a network.

    Args:
        image (numpy.ndarray): normalized, of shape (channels, height, width); three channels are red, green and blue.
        mean (Union[float, Sequence]): what was subtracted from each value / 255, for all channels or for each.
        std (Union[float, Sequence]): what the difference was divided by.

    Returns:
        numpy.ndarray, uint8 of shape (height, width), in colour (height, width, 3).
    """
    mean, std = (np.reshape(np.asarray(each, np.float64), (-1, 1, 1)) for each in (mean, std))
    values = np.nan_to_num(np.asarray(image, np.float64) * std + mean) * 255
    found = np.clip(np.rint(values), 0, 255).astype(np.uint8)
    return found.transpose(1, 2, 0) if len(found) == 3 else found[0]


def png(picture: np.ndarray) -> bytes:
    """Return a picture of `pixels` as a PNG file."""
    height, width = picture.shape[:2]
    colour = 2 if picture.ndim == 3 else 0
    rows = picture.reshape(height, -1)
    # Each row begins with the number of its filter: 0, none.
    raw = np.hstack([np.zeros((height, 1), np.uint8), rows]).tobytes()
    header = struct.pack(">IIBBBBB", width, height, 8, colour, 0, 0, 0)
    chunks = ((b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind, data) for kind, data in chunks)


def data_address(picture: np.ndarray) -> str:
    """Return the `data:` address of a picture, which holds all of it."""
    return f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
