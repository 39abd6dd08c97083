"""What of the things asked for is known, and can run here?"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any

from .contenders import Entry, say_what_is_missing
from .environments import python
from .process import Contender, ContenderError


def known(option: str, given: Iterable | None, possible: Sequence) -> None:
    """Refuse what an option names and nobody knows."""
    for one in given or ():
        if one not in possible:
            raise ValueError(f"argument {option}: must be of {', '.join(map(str, possible))}, but got {one}")


def unused(benchmark: str, **options: object) -> None:
    """Refuse options that would make no difference."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"argument --{name}: {benchmark} has no such choice")


def changed(settings: Any, arguments: Namespace) -> Any:
    """Return a record of settings with those that were given as arguments of the same name."""
    given = {name: getattr(arguments, name, None) for name in settings._fields}
    return settings._replace(**{name: value for name, value in given.items() if value is not None})


def available(entries: Sequence[Entry], names: Sequence[str] | None) -> list[Entry]:
    """Return the entries of these names (None: all) whose environments are there, and say which are not."""
    known("--contenders", names, [entry.name for entry in entries])
    wanted = [entry for entry in entries if names is None or entry.name in names]
    say_what_is_missing([entry.environment for entry in wanted])
    return [entry for entry in wanted if python(entry.environment)]


def start(entry: Entry, *flags: str) -> Contender:
    """Return the contender with these flags, to be entered."""
    interpreter = python(entry.environment)
    if interpreter is None:
        raise ContenderError(f"For '{entry.name}', the environment is missing. Run 'python -m benchmarks setup'.")
    return Contender(entry.name, interpreter, entry.program, (*flags, *entry.flags))
