"""What a compiled graph contains as constants, and whether that has changed since it was compiled.

MindSpore reads attributes of Cells and variables of functions when it compiles, and never again. Outside graphs they
are read in every call, and that is what a program in the default mode may rely on.
"""

from __future__ import annotations

import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, is_
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from .. import _check
from .parameters import as_array
from .restoring import CELL_ATTRIBUTES

# Each graph keeps memory, and compiling takes seconds.
_MANY = 8
# Of the attributes that every Cell has, graphs depend on these; others are notes of MindSpore.
_HOOKS = tuple(sorted(name for name in CELL_ATTRIBUTES if "ward" in name and "hook" in name))
_OF_EVERY_CELL = ("training", "mixed_precision_type", "construct", *_HOOKS)
_requires_grad = attrgetter("requires_grad")
_PLAIN = (bool, int, float, complex, str, bytes, np.generic)
_ENTRIES = frozenset({"construct", "bprop", "__call__"})
_OF_CELLS = frozenset(nn.Cell.__mro__)
# Modules whose attributes programs do not change. Python 3.9 has no list of its own.
_LIBRARIES = frozenset({"mindspore", "ms_accum", "numpy", "builtins", *getattr(sys, "stdlib_module_names", ())})


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

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with: no graphs, whose states may contain modules, which can't be copied."""
        return {**vars(self), "_states": [], "_number": 0}

    def _warn(self, name: str) -> None:
        _check.warn(
            f"For '{self._owner}', the network is compiled for the {_MANY + 1}th time, because '{name}' has changed. "
            "Each time takes seconds and memory: use a Parameter and ops.assign instead, or compile=False."
        )


class _State:
    """The values that graphs of these parts would contain now, and their names.

    Attributes that no code in the graphs names, such as a user's notes, do not matter. Which code that is shows while
    it is read: from `construct` to the methods and functions that it names. So parts are read until no name is new.
    """

    def __init__(self, parts: Sequence[Any]):
        self._used = set(_ENTRIES)
        known = 0
        while known < len(self._used):
            known = len(self._used)
            self._names: list[str] = []
            self._values: list[Any] = []
            self._visited: set[int] = set()
            self._parameters: list[Parameter] = []
            self._sources: list[Callable[[], Iterable[Any]]] = []
            self._arrays: list[tuple[Any, bytes]] = []
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
        if len(now) != len(self._objects) or not all(map(is_, now, self._objects)):
            return False
        return all(_content_of(array) == content for array, content in self._arrays)

    def equals(self, other: _State) -> bool:
        """Return whether graphs would be the same."""
        return self._names == other._names and all(map(_same, self._values, other._values))

    def difference(self, other: _State) -> str:
        """Return the name of the first value that differs."""
        for name, its_name, value, its in zip(self._names, other._names, self._values, other._values):
            if name != its_name or not _same(value, its):
                return name
        return max(self._names, other._names, key=len)[-1]

    def _note(self, name: str, value: Any) -> None:
        self._names.append(name)
        self._values.append(value)

    def _read(self, name: str, value: Any) -> None:
        self._note(name, value)
        if value is None or isinstance(value, _PLAIN):
            return
        if isinstance(value, (list, tuple, dict, set)):
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
            self._note(f"{name}.requires_grad", value.requires_grad)
        elif isinstance(value, (Tensor, np.ndarray)):
            if isinstance(value, np.ndarray) or ms.get_context("device_target") == "CPU":  # elsewhere that is slow
                content = _content_of(value)
                self._arrays.append((value, content))
                self._note(name, content)
        elif isinstance(value, (list, set)):
            self._sources.append(functools.partial(list, value))
            for item in value:
                self._read(name, item)
        elif isinstance(value, dict):
            self._sources += [value.keys, value.values]
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
        elif isinstance(value, property):
            self._read(name, value.fget)
        elif isinstance(value, (staticmethod, classmethod)):
            self._read(name, value.__func__)
        elif isinstance(value, types.FunctionType):
            self._read_function(inspect.unwrap(value))
        elif isinstance(value, types.ModuleType):
            if not _is_library(value.__name__):
                self._read_attributes(vars(value), [name for name in vars(value) if name in self._used])
        elif not isinstance(value, type) and not _is_library(type(value).__module__):
            attributes, slots = getattr(value, "__dict__", {}), _slots_of(type(value))
            self._read_class(type(value))
            self._read_attributes(attributes, [name for name in attributes if name in self._used])
            self._read_slots(value, [name for name in slots if name in self._used])

    def _read_function(self, function: Any) -> None:
        """Read which attributes a function names, and, for one of the user's, its variables that are not local."""
        codes = list(_codes(function.__code__)) if isinstance(function, types.FunctionType) else []
        for code in codes:
            self._used.update(_names_in(code))
        if codes and not _is_library(function.__module__):
            names = (*function.__code__.co_freevars, *sorted({name for code in codes for name in _global_names(code)}))
            variables = functools.partial(_variables, function, names)
            self._sources.append(variables)
            for name, content in zip((*names, "defaults", "defaults"), variables()):
                self._read(name, content)

    def _read_cell(self, cell: nn.Cell) -> None:
        self._read_class(type(cell))
        attributes = vars(cell)
        named = self._used - CELL_ATTRIBUTES
        names = [name for name in attributes if name in _OF_EVERY_CELL or name in named]
        self._read_attributes(attributes, names, of_library=_is_library(type(cell).__module__))
        self._sources.append(attributes["_cells"].values)
        if attributes["_params"]:
            self._sources.append(attributes["_params"].values)
        for name, parameter in attributes["_params"].items():
            self._read(name, parameter)
        for name, child in attributes["_cells"].items():
            self._read(name, child)

    def _read_attributes(
        self, attributes: Mapping[str, Any], names: Sequence[str], *, of_library: bool = False
    ) -> None:
        """Read these attributes of an object. The tensors of MindSpore's own classes are never written into."""
        self._sources.append(functools.partial(_values_of, attributes, names))
        for name in names:
            value = attributes[name]
            if of_library and isinstance(value, Tensor) and not isinstance(value, Parameter):
                self._note(name, value)
            else:
                self._read(name, None if name in _HOOKS and not value else value)

    def _read_slots(self, value: Any, names: Sequence[str]) -> None:
        """Read these attributes of an object that has slots for them."""
        values = functools.partial(_values_in_slots, value, names)
        self._sources.append(values)
        for name, content in zip(names, values()):
            self._read(name, content)

    def _read_class(self, kind: type) -> None:
        """Read the methods of a class that are used, and other attributes; those of MindSpore's classes stay."""
        for base in kind.__mro__:
            if base in _OF_CELLS or id(base) in self._visited:
                continue
            self._visited.add(id(base))
            names = [name for name in vars(base) if name in self._used]
            if not _is_library(base.__module__):
                self._read_attributes(vars(base), names)
                continue
            for name in names:
                self._read(name, vars(base)[name])


def _same(mine: Any, its: Any) -> bool:
    if mine is its:
        return True
    both_plain = type(mine) is type(its) and isinstance(mine, _PLAIN)
    return both_plain and bool(mine == its or (mine != mine and its != its))  # also two NaN


def _values_of(attributes: Mapping[str, Any], names: Sequence[str]) -> tuple[Any, ...]:
    """Return the values of attributes, and how many there are, because `hasattr` may ask for a new one."""
    return (*map(attributes.get, names), len(attributes))


def _slots_of(kind: type) -> list[str]:
    return [
        name
        for base in kind.__mro__
        for name, member in vars(base).items()
        if isinstance(member, types.MemberDescriptorType)
    ]


def _values_in_slots(value: Any, names: Sequence[str]) -> list[Any]:
    return [getattr(value, name, None) for name in names]


def _content_of(array: Any) -> bytes:
    return (array if isinstance(array, np.ndarray) else as_array(array)).tobytes()


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function, and of the functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _names_in(code: types.CodeType) -> set[str]:
    """Return the names that code may use as attributes, also those of `getattr`."""
    return {*code.co_names, *(constant for constant in code.co_consts if isinstance(constant, str))}


@functools.cache
def _global_names(code: types.CodeType) -> frozenset[str]:
    """Return the global names that code reads. `co_names` also contains names of attributes."""
    return frozenset(item.argval for item in dis.get_instructions(code) if item.opname == "LOAD_GLOBAL")


def _variables(function: types.FunctionType, names: Sequence[str]) -> list[Any]:
    """Return the values of a function's free variables and globals, which have these names, and of its defaults."""
    free = function.__closure__ or ()
    values = [*map(_contents, free), *map(function.__globals__.get, names[len(free) :])]
    return [*values, function.__defaults__, function.__kwdefaults__]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_library(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _LIBRARIES
