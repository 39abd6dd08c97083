"""The options of all benchmarks: which are rejected, and how they change the settings."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple


class Settings(NamedTuple):
    """What a benchmark measures; fields that are options can be given on the command line."""

    networks: Sequence[str]
    windows: Sequence[int]
    rounds: int
    """How often each is measured."""
    contenders: Sequence[str] | None = None
    """Names; None: all."""


def check_names(option: str, names: Iterable | None, possible: Iterable) -> None:
    """Reject a name that an option does not have."""
    for name in names or ():
        if name not in possible:
            raise ValueError(f"argument {option}: must be of {', '.join(map(str, possible))}, but got {name}")


def reject_options(benchmark: str, **options: object) -> None:
    """Reject options that would make no difference."""
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"argument --{name}: {benchmark} has no such choice")


def select_settings(full: Any, short: Any, arguments: Namespace, networks: Sequence[str]) -> Any:
    """Return the settings, or those of `--short`, with the fields that were given as arguments of the same name."""
    check_names("--networks", arguments.networks, networks)
    settings = short if arguments.short else full
    overrides = {name: getattr(arguments, name, None) for name in settings._fields}
    return settings._replace(**{name: value for name, value in overrides.items() if value is not None})
