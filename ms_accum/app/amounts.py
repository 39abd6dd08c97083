"""Reads and writes amounts of memory, such as "2GiB"."""

from __future__ import annotations

import math
import re
from numbers import Integral
from typing import Any

from .. import _check

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_UNITS.update({"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40})
_TEXT = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", re.IGNORECASE | re.ASCII)
RULE = "an amount of memory above 0, such as '2GiB', '512 MB' or a number of bytes"


def from_text(text: str) -> int | None:
    """Convert a text such as "1.5 GiB" to bytes; None if it is not an amount above 0."""
    match = _TEXT.fullmatch(text)
    if not match or match[2].lower() not in _UNITS:
        return None
    size = float(match[1]) * _UNITS[match[2].lower()]
    return int(size) if 1 <= size < math.inf else None  # float makes 400 digits infinity


def amount(owner: str, name: str, value: Any) -> int:
    """Convert an int or a text to bytes; raise an error if it is not an amount of memory."""
    if isinstance(value, bool) or not isinstance(value, (Integral, str)):
        _check.raise_invalid(TypeError, owner, name, RULE, f"{value!r} ({type(value).__name__})")
    size = from_text(value) if isinstance(value, str) else int(value)
    if size is None or size < 1:
        _check.raise_invalid(ValueError, owner, name, RULE, repr(value))
    return size


def short(size: int) -> str:
    """Format bytes in GiB or MiB."""
    if size < 2**20:
        return f"{size:,} bytes"
    unit, name = (2**30, "GiB") if size >= 2**30 else (2**20, "MiB")
    return f"{size / unit:.4g} {name}"
