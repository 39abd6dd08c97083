"""How are errors about arguments worded and strangers' texts shown, and which line does a warning name?"""

from __future__ import annotations

import logging
import math
import re
import sys
import unicodedata
import warnings
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn

_log = logging.getLogger("ms_accum")
_logged: set[str] = set()
_INSIDE = ("ms_accum", "contextlib", "importlib")
_MAX_LENGTH = 200
_HEADING = re.compile(r"- .*:$|- C\+\+ Call Stack|- The ")
LINE = 2000
"""int, the most characters of a complete line; paths are at most this long, or are cut."""


def one_line(value: object, most: int = _MAX_LENGTH) -> str:
    """Return a value as one line of visible text, which is cut after `most` characters.

    No terminal obeys it: ESC becomes the text ``\\x1b``. Control and format characters, marks of direction, separators
    of lines, and halves of surrogate pairs are written as in a Python string. Names and values of files, servers and
    archives are anybody's text.

    Args:
        value (object): a stranger's name or value, or a line that contains some.
        most (int): the most characters. Default: 200, for one value.
    """
    text = str(value)
    shown = (character if _is_visible(character) else _escaped(character) for character in text[:most])
    return "".join(shown) + ("..." if len(text) > most else "")


def quantity(number: int, noun: str) -> str:
    """Return a number of things as text: "1 micro-batch", "2,000 micro-batches"."""
    ending = "" if number == 1 else "es" if noun.endswith(("tch", "ss")) else "s"
    return f"{number:,} {noun}{ending}"


def first_words(text: str) -> str:
    """Return the first line of an error message that has content.

    Messages of MindSpore's kernels begin with an empty line, rules of dashes and headings.
    """
    lines = [line.strip() for line in text.splitlines()]
    return next((line for line in lines if line.strip("- ") and not _HEADING.match(line)), "")


def _is_visible(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"  # blanks of other widths


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()


def warn(text: str, kind: type[Warning] = RuntimeWarning) -> None:
    """Warn, and name the line outside the package that led to the warning."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, kind, stacklevel=level)


def log_once(text: str, *values: object) -> None:
    """Log a warning, once in this process: what a test that makes errors of warnings should not end."""
    if text not in _logged:
        _logged.add(text)
        _log.warning(text, *values)


def raise_invalid(error: type[Exception], owner: str, name: str, rule: str, value: Any, remedy: str = "") -> NoReturn:
    """Raise `error` with a message in the form that all errors of this package have."""
    message = f"For '{owner}', '{name}' must be {rule}, but got {value}."
    raise error(f"{message} {remedy}".rstrip())


class Argument(NamedTuple):
    """The name of an argument in messages."""

    owner: str
    name: str

    def raise_invalid(self, error: type[Exception], rule: str, value: Any, remedy: str = "") -> NoReturn:
        """Raise an error about this argument."""
        raise_invalid(error, *self, rule, value, remedy)


TRAIN = Argument("train_process", "train_dataset")
VALID = Argument("train_process", "valid_dataset")


def positive_int(owner: str, name: str, value: Any) -> int:
    """Return `value` as an int, or raise an error if it is not an int >= 1."""
    return _int_from(1, owner, name, value)


def count(owner: str, name: str, value: Any) -> int:
    """Return `value` as an int, or raise an error if it is not an int >= 0."""
    return _int_from(0, owner, name, value)


def _int_from(low: int, owner: str, name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise_invalid(TypeError, owner, name, f"an int >= {low}", f"{value!r} ({type(value).__name__})")
    if value < low:
        raise_invalid(ValueError, owner, name, f"an int >= {low}", value)
    return int(value)


def positive_number(owner: str, name: str, value: Any) -> float:
    """Return `value` as a float, or raise an error if it is not a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise_invalid(TypeError, owner, name, "a number > 0", f"{value!r} ({type(value).__name__})")
    value = float(value)
    if not (math.isfinite(value) and value > 0):
        raise_invalid(ValueError, owner, name, "a finite number > 0", value)
    return value


def one_of(owner: str, name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return `value`, or raise an error if it is not one of `choices`."""
    if value not in choices:
        raise_invalid(ValueError, owner, name, "one of " + ", ".join(map(repr, choices)), repr(value))
    return value


def instance(owner: str, name: str, value: Any, kind: type | tuple[type, ...], rule: str, remedy: str = "") -> Any:
    """Return `value`, or raise an error if it is not a `kind`; `rule` describes the kind in words."""
    if isinstance(value, type):
        raise_class(owner, name, rule, value)
    if not isinstance(value, kind):
        raise_invalid(TypeError, owner, name, rule, type(value).__name__, remedy)
    return value


def raise_class(owner: str, name: str, rule: str, value: type) -> NoReturn:
    """Raise an error about a class that was given instead of an object of it."""
    raise_invalid(TypeError, owner, name, rule, f"the class {value.__name__}", f"Write {value.__name__}(...).")
