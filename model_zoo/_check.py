"""Checks of arguments, and the wording of errors about them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np

_LONGEST = 300


class DataError(ValueError):
    """Raised when a file of a data set is damaged, or is not a file of that data set."""


def check_int(function: str, name: str, value: Any, *, low: int, high: int | None = None) -> int:
    """Return `value` as an int, or raise a TypeError (wrong type) or a ValueError (out of range)."""
    rule = f"an int >= {low}" if high is None else f"an int in [{low}, {high}]"
    # A bool is an int in Python, but here it is a mistake.
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise TypeError(_message(function, name, rule, f"type {type(value).__name__}"))
    if value < low or (high is not None and value > high):
        raise ValueError(_message(function, name, rule, f"{value}"))
    return int(value)


def check_bool(function: str, name: str, value: Any) -> bool:
    """Return `value` if it is a bool, or raise a TypeError."""
    if not isinstance(value, bool):
        raise TypeError(_message(function, name, "a bool", f"type {type(value).__name__}"))
    return value


def check_choice(function: str, name: str, value: Any, *, choices: tuple[str, ...]) -> None:
    """Raise an error unless `value` is one of the strings `choices`."""
    rule = f"one of {choices}"
    if not isinstance(value, str):
        raise TypeError(_message(function, name, rule, f"type {type(value).__name__}"))
    if value not in choices:
        raise ValueError(_message(function, name, rule, repr(value)))


def check_path(function: str, name: str, value: Any) -> Path:
    """Return `value` as a path with `~` expanded, or raise an error."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(_message(function, name, "a path", f"type {type(value).__name__}"))
    text = os.fspath(value)
    if not text or "\0" in text:
        raise ValueError(_message(function, name, "a path", repr(text)))
    return Path(os.path.expanduser(text))


def one_line(text: object) -> str:
    """Return text of a server or an archive as one line, cut, without characters that a terminal obeys."""
    words = " ".join(str(text)[:_LONGEST].split())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in words)


def _message(function: str, name: str, rule: str, got: str) -> str:
    return f"For '{function}', '{name}' must be {rule}, but got {got}."
