"""Which Parameters does a network use, with its loss, also those that no Cell has as its own?"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import numpy as np
from mindspore import Parameter, Tensor, nn

from .parameters import excluding

# Longer lists and dicts are data, such as a vocabulary.
_LONG = 10_000


def reached(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the Cells and Parameters that something uses, each with the last name on the way to it.

    Cells are searched, also in lists, dicts and objects, where MindSpore does not look; and so are the variables of
    functions, and of functions that they call.
    """
    visited: set[int] = set()
    left = [("", value)]
    while left:
        name, value = left.pop()
        if id(value) in visited or _is_foreign(value):
            continue
        visited.add(id(value))
        if isinstance(value, (Parameter, nn.Cell)):
            yield name, value
        if not isinstance(value, Parameter):
            left += [(inner or name, each) for inner, each in reversed(_parts_of(value))]


def held(value: Any) -> list[tuple[str, Parameter]]:
    """Return the Parameters that something uses, by the last name on the way."""
    return [(name, each) for name, each in reached(value) if isinstance(each, Parameter)]


def changed_by(network: nn.Cell, trained: Collection[Any]) -> list[Parameter]:
    """Return the Parameters that a forward may change: what the network and its loss use, without the trained ones."""
    return excluding((parameter for _, parameter in held(network)), trained)


def _parts_of(value: Any) -> list[tuple[str, Any]]:
    """Return what something consists of, by name."""
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        each_of = value.values() if isinstance(value, Mapping) else value
        return [("", each) for each in each_of] if len(value) <= _LONG else []
    if isinstance(value, functools.partial):
        bound = [(f"argument {number}", each) for number, each in enumerate(value.args)]
        return [*bound, *value.keywords.items(), ("", value.func)]
    if inspect.isroutine(value):
        return [*_variables_of(value), *getattr(getattr(value, "__self__", None), "__dict__", {}).items()]
    parts = [*getattr(value, "__dict__", {}).items()]
    if isinstance(value, nn.Cell):
        own = [*value.get_parameters(expand=False), *value.name_cells().values()]
        return [*(("", each) for each in own), *parts]
    return [*parts, *(_variables_of(type(value).__call__) if callable(value) else ())]


def _variables_of(function: Any) -> list[tuple[str, Any]]:
    try:
        variables = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not written in Python; a variable that has no value yet
        return []
    return [*variables.globals.items(), *variables.nonlocals.items()]


def _is_foreign(value: Any) -> bool:
    """Return whether nothing in it is a part of a network: what is MindSpore's, ours, or an optimizer."""
    if isinstance(value, (Parameter, nn.Cell)):
        return isinstance(value, nn.Optimizer)
    if (
        isinstance(value, (str, bytes, int, float, Tensor, np.ndarray, type(None)))
        or inspect.ismodule(value)
        or inspect.isclass(value)
    ):
        return True
    module = getattr(value if inspect.isroutine(value) else type(value), "__module__", None) or ""
    return module.partition(".")[0] in ("mindspore", "ms_accum")
