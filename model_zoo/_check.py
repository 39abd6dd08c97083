"""Checks of arguments, and the wording of errors about them."""

from __future__ import annotations

import math
import os
from itertools import islice
from pathlib import Path
from typing import Any, Callable

import numpy as np

_LONGEST = 300
_SUBFOLDERS = 100  # in which data are looked for: a home folder may have thousands


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


def check_seconds(function: str, name: str, value: Any) -> None:
    """Raise an error unless `value` is a positive, finite number."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(_message(function, name, "a number > 0", f"type {type(value).__name__}"))
    if not 0 < value < math.inf:
        raise ValueError(_message(function, name, "a number > 0", f"{value}"))


def check_path(function: str, name: str, value: Any) -> Path:
    """Return `value` as a path with `~` expanded, or raise an error."""
    if not isinstance(value, (str, os.PathLike)) or not isinstance(os.fspath(value), str):
        raise TypeError(_message(function, name, "a path", f"type {type(value).__name__}"))
    text = os.fspath(value)
    if not text or "\0" in text:
        raise ValueError(_message(function, name, "a path", repr(text)))
    return Path(os.path.expanduser(text))


def check_folder(function: str, root: Path, *, fetch: str) -> None:
    """Raise an error if a data path is not a folder; for an archive the message contains what to do."""
    if root.is_dir():
        return
    if not root.exists():
        raise FileNotFoundError(
            f"For '{function}', 'data_path' must be an existing folder, but got {quote(root)}. "
            f"Correct the path, or {fetch}."
        )
    remedy = "Give the folder that contains it."
    if root.suffix.lower() in (".zip", ".gz", ".tar", ".tgz"):
        remedy = "Unpack it (unzip, gunzip, tar) and give the folder."
    raise DataError(f"For '{function}', 'data_path' must be a folder, but got the file {quote(root)}. {remedy}")


def folder_nearby(root: Path, holds: Callable[[Path], object]) -> Path | None:
    """Return the parent folder or a subfolder, if one of them holds what a folder lacks: a usual mistake in a path."""
    parent = Path(os.path.normpath(root / ".."))  # also of '.', whose own `parent` is itself
    try:
        with os.scandir(root) as entries:
            subfolders = sorted(Path(root, entry.name) for entry in islice(entries, _SUBFOLDERS) if entry.is_dir())
        return next((folder for folder in (parent, *subfolders) if holds(folder)), None)
    except OSError:
        return None


def locate(
    root: Path,
    usage: str | None,
    find: Callable[[Path, str], tuple[Path, ...] | None],
    *,
    missing: Callable[[Path, tuple[str, ...]], str],
) -> tuple[tuple[Path, ...], str]:
    """Return the files of a split and its name; without `usage`, of the first split found. Raise an error if none."""
    splits = ("train", "test") if usage is None else (usage,)
    for split in splits:
        paths = find(root, split)
        if paths:
            return paths, split
    raise FileNotFoundError(missing(root, splits))


def quote(path: Path) -> str:
    """Return a path as one line of text, whatever characters it contains."""
    return repr(str(path))


def one_line(text: object) -> str:
    """Return text of a server or an archive as one line, cut, without characters that a terminal obeys."""
    words = " ".join(str(text)[:_LONGEST].split())
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in words)


def _message(function: str, name: str, rule: str, got: str) -> str:
    return f"For '{function}', '{name}' must be {rule}, but got {got}."
