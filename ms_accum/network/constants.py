"""What a compiled graph contains as constants, and whether that has changed since it was compiled.

MindSpore reads attributes of Cells and variables of functions when it compiles, and never again. Outside graphs they
are read in every call, and that is what a program in the default mode may rely on.
"""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
import types
from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, Callable

from mindspore import Parameter, nn

from .. import _check
from .restoring import CELL_ATTRIBUTES

# Each graph keeps memory, and compiling takes seconds.
_MANY = 8
# Of the attributes that every Cell has, graphs depend on these; others are notes of MindSpore.
_HOOKS = tuple(sorted(name for name in CELL_ATTRIBUTES if "ward" in name and "hook" in name))
_OF_EVERY_CELL = ("training", "mixed_precision_type", "construct", *_HOOKS)
_requires_grad = attrgetter("requires_grad")
_PLAIN = (bool, int, float, complex, str, bytes)


class Constants:
    """What the graphs of one Cell contain as constants, in each state for which there is a graph.

    Args:
        owner (str): the name used in error messages.
        parts (tuple): the Cells and functions of the user that the graphs contain.
    """

    def __init__(self, owner: str, parts: Iterable[Any]):
        self._owner = owner
        self._parts = tuple(parts)
        self._states: list[_State] = []
        self._number = 0

    def graph(self) -> int:
        """Return the number of the graph that contains what the parts are now; a new one must be compiled."""
        if self._states and self._states[self._number].is_untouched():
            return self._number
        now = _State(self._parts)
        for number, state in enumerate(self._states):
            if now.equals(state):
                self._states[number] = now
                self._number = number
                return number
        if len(self._states) == _MANY:
            self._warn(now.difference(self._states[self._number]))
        self._number = len(self._states)
        self._states.append(now)
        return self._number

    def _warn(self, name: str) -> None:
        _check.warn(
            f"For '{self._owner}', the network is compiled for the {_MANY + 1}th time, because '{name}' has changed. "
            "Each time takes seconds and memory: use a Parameter and ops.assign instead, or compile=False."
        )


class _State:
    """The values that graphs of these parts would contain now, and their names."""

    def __init__(self, parts: Iterable[Any]):
        self._names: list[str] = []
        self._values: list[Any] = []
        self._visited: set[int] = set()
        self._parameters: list[Parameter] = []
        self._sources: list[Callable[[], Iterable[Any]]] = []
        self._attributes = frozenset().union(*map(_attributes_read_by, _classes_in(parts)))
        for part in parts:
            self._read("", part)
        self._objects = self._current_objects()

    def _current_objects(self) -> list[Any]:
        """Return the objects that attributes, containers and variables refer to, without looking into them."""
        objects = [item for read in self._sources for item in read()]
        objects += map(_requires_grad, self._parameters)
        return objects

    def is_untouched(self) -> bool:
        """Return whether all that has been read refers to the same objects; fast, because each call asks."""
        now = self._current_objects()
        return len(now) == len(self._objects) and all(map(is_, now, self._objects))

    def equals(self, other: _State) -> bool:
        """Return whether graphs would be the same."""
        mine, others = self._values, other._values
        return len(mine) == len(others) and (all(map(is_, mine, others)) or all(map(_same, mine, others)))

    def difference(self, other: _State) -> str:
        """Return the name of the first value that differs."""
        for name, mine, its in zip(self._names, self._values, other._values):
            if not _same(mine, its):
                return name
        return (self._names if len(self._names) > len(other._names) else other._names)[-1]

    def _read(self, name: str, value: Any) -> None:
        self._names.append(name)
        self._values.append(value)
        if value is None or isinstance(value, _PLAIN):
            return
        if isinstance(value, (list, tuple, dict)):
            self._values[-1] = len(value)
        if isinstance(value, tuple):  # each time: whether two attributes are one tuple does not matter
            for item in value:
                self._read(name, item)
        elif id(value) not in self._visited:
            self._visited.add(id(value))
            self._read_contents(name, value)

    def _read_contents(self, name: str, value: Any) -> None:
        """Read what an object contains, of those that MindSpore can compile."""
        if isinstance(value, Parameter):
            self._parameters.append(value)
            self._read(f"{name}.requires_grad", value.requires_grad)
        elif isinstance(value, list):
            self._sources.append(value.copy)
            for item in value:
                self._read(name, item)
        elif isinstance(value, dict):
            self._sources.append(value.values)
            for key, item in value.items():
                self._read(f"{name}[{key!r}]", item)
        elif isinstance(value, nn.Cell):
            self._read_cell(value)
        elif isinstance(value, functools.partial):
            for item in (value.func, *value.args, *value.keywords.values()):
                self._read(name, item)
        elif isinstance(value, types.MethodType):
            self._read(name, value.__func__)
            self._read(name, value.__self__)
        elif isinstance(value, types.FunctionType):
            self._sources.append(functools.partial(_variables, value))
            for variable, content in zip(_names(value), _variables(value)):
                self._read(variable, content)
        elif hasattr(value, "__dict__") and not isinstance(value, type) and not _is_library(type(value).__module__):
            self._read_class(type(value))
            self._read_attributes(vars(value), [name for name in vars(value) if name in self._attributes])

    def _read_cell(self, cell: nn.Cell) -> None:
        attributes = vars(cell)
        names = [name for name in attributes if name in _OF_EVERY_CELL or name in self._attributes]
        self._read_attributes(attributes, names)
        self._sources.append(attributes["_cells"].values)
        if attributes["_params"]:
            self._sources.append(attributes["_params"].values)
        for name, parameter in attributes["_params"].items():
            self._read(name, parameter)
        for name, child in attributes["_cells"].items():
            self._read(name, child)
        self._read_class(type(cell))

    def _read_attributes(self, attributes: Mapping[str, Any], names: Sequence[str]) -> None:
        """Read these attributes of an object."""
        self._sources.append(functools.partial(_values_of, attributes, names))
        for name in names:
            value = attributes[name]
            self._read(name, None if name in _HOOKS and not value else value)

    def _read_class(self, kind: type) -> None:
        """Read the attributes of a user's class, and what its methods use from outside."""
        for each in kind.__mro__:
            if id(each) in self._visited or _is_library(each.__module__):
                continue
            self._visited.add(id(each))
            self._read_attributes(vars(each), [name for name in vars(each) if name in self._attributes])
            for method in _methods(each):
                self._read(method.__name__, method)


def _same(mine: Any, its: Any) -> bool:
    return mine is its or (type(mine) is type(its) and isinstance(mine, _PLAIN) and mine == its)


def _values_of(attributes: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """Return the values of attributes, and how many there are, because `hasattr` may ask for a new one."""
    return (*map(attributes.get, names), len(attributes))


def _classes_in(parts: Iterable[Any]) -> set[type]:
    """Return the classes of the Cells in these parts."""
    return {type(cell) for part in parts if isinstance(part, nn.Cell) for _, cell in part.cells_and_names()}


@functools.cache
def _attributes_read_by(kind: type) -> frozenset[str]:
    """Return the names that the methods of a class use as attributes; others, such as a user's notes, do not matter."""
    classes = itertools.takewhile(lambda each: each is not nn.Cell, kind.__mro__)
    names = {name for each in classes for method in _methods(each) for name in _names_in(method.__code__)}
    return frozenset(names - CELL_ATTRIBUTES)


def _methods(kind: type) -> list[types.FunctionType]:
    """Return the functions and properties that are written in a class."""
    functions = [getattr(value, "fget", value) for name, value in vars(kind).items() if not name.startswith("__")]
    return [function for function in map(inspect.unwrap, functions) if isinstance(function, types.FunctionType)]


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names in a function's code, also those of `getattr` and of functions inside it."""
    names = {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}
    return names.union(*(_names_in(inner) for inner in code.co_consts if isinstance(inner, types.CodeType)))


def _names(function: types.FunctionType) -> tuple[str, ...]:
    """Return the names of the variables of a user's function that are not local to it."""
    if _is_library(function.__module__):
        return ()
    return (*function.__code__.co_freevars, *_global_names(function.__code__))


def _variables(function: types.FunctionType) -> list[Any]:
    """Return the values of these variables."""
    names = _names(function)
    free = function.__closure__ or () if names else ()
    return [*map(_contents, free), *map(function.__globals__.get, names[len(free) :])]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


@functools.cache
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """Return the global names that a function reads. `co_names` also contains names of attributes."""
    names = {item.argval for item in dis.get_instructions(code) if item.opname == "LOAD_GLOBAL"}
    return tuple(sorted(names))


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in ("mindspore", "ms_accum", "numpy", "builtins")
