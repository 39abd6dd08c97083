"""How are errors about arguments worded, which line does a warning name, and what does `help` show of a record?"""

from __future__ import annotations

import ast
import contextlib
import math
import sys
import warnings
from numbers import Integral, Real
from typing import Any, NamedTuple, NoReturn, TypeVar

Record = TypeVar("Record", bound=type)
_INSIDE = ("ms_accum", "contextlib")


def warn(text: str, kind: type[Warning] = RuntimeWarning) -> None:
    """Warn, and name the line outside the package that led to the warning."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, kind, stacklevel=level)


def refuse(error: type[Exception], owner: str, name: str, rule: str, value: Any, remedy: str = "") -> NoReturn:
    """Raise `error` with a message in the form that all errors of this package have."""
    message = f"For '{owner}', '{name}' must be {rule}, but got {value}."
    raise error(f"{message} {remedy}".rstrip())


class Argument(NamedTuple):
    """The name of an argument in messages."""

    owner: str
    name: str

    def refuse(self, error: type[Exception], rule: str, value: Any, remedy: str = "") -> NoReturn:
        """Raise an error about this argument."""
        refuse(error, *self, rule, value, remedy)


TRAIN = Argument("train_process", "train_dataset")
VALID = Argument("train_process", "valid_dataset")


def positive_int(owner: str, name: str, value: Any) -> int:
    """Return `value` as an int, or raise an error if it is not an int >= 1."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        refuse(TypeError, owner, name, "an int >= 1", f"{value!r} ({type(value).__name__})")
    if value < 1:
        refuse(ValueError, owner, name, "an int >= 1", value)
    return int(value)


def count(owner: str, name: str, value: Any) -> int:
    """Return `value` as an int, or raise an error if it is not an int >= 0."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        refuse(TypeError, owner, name, "an int >= 0", f"{value!r} ({type(value).__name__})")
    if value < 0:
        refuse(ValueError, owner, name, "an int >= 0", value)
    return int(value)


def positive_number(owner: str, name: str, value: Any) -> float:
    """Return `value` as a float, or raise an error if it is not a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        refuse(TypeError, owner, name, "a number > 0", f"{value!r} ({type(value).__name__})")
    value = float(value)
    if not (math.isfinite(value) and value > 0):
        refuse(ValueError, owner, name, "a finite number > 0", value)
    return value


def one_of(owner: str, name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return `value`, or raise an error if it is not one of `choices`."""
    if value not in choices:
        refuse(ValueError, owner, name, "one of " + ", ".join(map(repr, choices)), repr(value))
    return value


def instance(owner: str, name: str, value: Any, kind: type | tuple[type, ...], rule: str) -> Any:
    """Return `value`, or raise an error if it is not a `kind`; `rule` describes the kind in words."""
    if not isinstance(value, kind):
        refuse(TypeError, owner, name, rule, type(value).__name__)
    return value


def documented(record: Record) -> Record:
    """Make `help` show the text below each field of a NamedTuple, instead of the field's number."""
    import inspect  # takes as long as all other imports together

    with contextlib.suppress(OSError, SyntaxError):  # its source is missing
        (found,) = ast.parse(inspect.getsource(record)).body
        lines: list[Any] = getattr(found, "body", [])
        for field, text in zip(lines, lines[1:]):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
                getattr(record, ast.unparse(field.target)).__doc__ = ast.literal_eval(text.value)
    return record
