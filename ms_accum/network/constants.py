"""What a compiled graph contains as constants, and whether that has changed since it was compiled.

MindSpore reads attributes of Cells and variables of functions when it compiles, and never again. Outside graphs they
are read in every call, and that is what a program in the default mode may rely on.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import operator
import pkgutil
import sys
import sysconfig
import textwrap
import types
from collections import UserDict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter, is_, itemgetter
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn

from .. import _check
from .parameters import as_array
from .restoring import CELL_ATTRIBUTES

# Each graph keeps memory, and compiling takes seconds.
_MANY = 8
# Bytes of a tensor or an array whose contents are compared in each call: 0.1 ms for one of this size.
_LARGEST_COMPARED = 2**20
# Of the attributes that every Cell has, graphs depend on these; others are notes of MindSpore.
_HOOKS = tuple(sorted(name for name in CELL_ATTRIBUTES if "ward" in name and "hook" in name))
_OF_EVERY_CELL = ("training", "mixed_precision_type", "construct", *_HOOKS)
_WITHOUT_DECORATOR = (
    "For '{}', MindSpore compiles '{}' without its decorator, which uses functools.wraps. If the decorator changes "
    "what is computed, call it in the function, or use compile=False."
)
_WRITTEN = (
    "For '{}', the network writes into the tensor '{}', which a graph may read as a constant: make it a Parameter with "
    "requires_grad=False, or use compile=False."
)
_requires_grad = attrgetter("requires_grad")
_HAS_HOOKS = hasattr(Tensor, "hooks")  # not in older versions of MindSpore
# A Cell keeps layers, Parameters and buffers in dicts, which some containers replace.
_MEMBERS = tuple(name for name in ("_cells", "_params", "_buffers") if name in CELL_ATTRIBUTES)
_members_of = itemgetter(*_MEMBERS)
_PLAIN = (bool, int, float, complex, str, bytes, np.generic)
_LISTS = (list, set, deque)
_DICTS = (dict, types.MappingProxyType, UserDict)
_ENTRIES = frozenset({"construct", "bprop", "__call__"})
# Methods that code calls without naming them.
_OPERATORS = [name for name in dir(operator) if name.startswith("__") and callable(getattr(operator, name))]
_BY_SYNTAX = ("bool", "enter", "exit", "float", "get", "getattr", "getattribute", "int", "iter", "len", "next")
_UNNAMED = frozenset({*_OPERATORS, *(f"__r{name[2:]}" for name in _OPERATORS), *(f"__{name}__" for name in _BY_SYNTAX)})
_OF_CELLS = frozenset(nn.Cell.__mro__)
# Modules whose attributes programs do not change. Python 3.9 has no list of the standard ones.
_FRAMEWORKS = frozenset({"mindspore", "ms_accum", "numpy", "builtins"})
_LIBRARIES = _FRAMEWORKS.union(
    getattr(sys, "stdlib_module_names", None)
    or (*sys.builtin_module_names, *(module.name for module in pkgutil.iter_modules([sysconfig.get_path("stdlib")])))
)


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
        self._is_new = False
        self._warned: set[str] = set()
        self._written: list[Any] = []

    def graph(self) -> int:
        """Return the number of the graph that contains what the parts are now; a new one must be compiled."""
        self._is_new = False
        if self._states and self._states[self._number].is_untouched():
            return self._number
        now = _State(self._parts, self._written)
        for number, state in enumerate(self._states):
            if now.equals(state):
                self._states[number] = now
                self._number = number
                return number
        for name in sorted(now.without_decorator - self._warned):
            self._warned.add(name)
            _check.warn(_WITHOUT_DECORATOR.format(self._owner, name))
        if len(self._states) == _MANY:
            self._warn(now.difference(self._states[self._number]))
        self._number = len(self._states)
        self._states.append(now)
        self._is_new = True
        return self._number

    def ran(self) -> None:
        """Note that the graph has run. Compiling a new one may have changed the parts, such as a `cached_property`."""
        if self._is_new:
            for name, array in self._states[self._number].changed_arrays():
                self._written.append(array)
                _check.warn(_WRITTEN.format(self._owner, name))
            self._states[self._number] = _State(self._parts, self._written)

    def __getstate__(self) -> dict[str, Any]:
        """Return what a copy begins with: no graphs, whose states may contain modules, which can't be copied."""
        return {**vars(self), "_states": [], "_number": 0, "_written": []}

    def _warn(self, name: str) -> None:
        _check.warn(
            f"For '{self._owner}', the network is compiled for the {_MANY + 1}th time, because '{name}' has changed. "
            "Each time takes seconds and memory: use a Parameter and ops.assign instead, or compile=False."
        )


class _State:
    """The values that graphs of these parts would contain now, and their names.

    Attributes that no code in the graphs names, such as a user's notes, do not matter. Which code that is shows while
    it is read: from `construct` to the methods and functions that it names. So parts are read until no name is new. If
    code computes a name, as `getattr(self, f"scale_{i}")` does, all attributes of Cells and objects matter.

    `without_decorator` has the names of functions whose decorator MindSpore leaves out: it compiles `__wrapped__`.

    Args:
        parts (Sequence): the Cells and functions.
        written (Sequence): tensors that graphs write into, whose contents are not compared.
    """

    def __init__(self, parts: Sequence[Any], written: Sequence[Any]):
        self._written = {id(array) for array in written}
        self._used = set(_ENTRIES)
        self._any_name = False
        self.without_decorator: set[str] = set()
        known: tuple = ()
        while known != (len(self._used), self._any_name):
            known = (len(self._used), self._any_name)
            self._names: list[str] = []
            self._values: list[Any] = []
            self._visited: dict[int, int] = {}
            self._classes: set[int] = set()
            self._parameters: list[Parameter] = []
            self._sources: list[Callable[[], Iterable[Any]]] = []
            self._arrays: list[tuple[str, Any, tuple]] = []
            self._empty: list[Mapping] = []
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
        if any(self._empty):
            return False
        now = self._current_objects()
        if len(now) != len(self._objects) or not all(map(is_, now, self._objects)):
            return False
        return not any(self.changed_arrays())

    def changed_arrays(self) -> Iterator[tuple[str, Any]]:
        """Yield the tensors and arrays whose contents have changed, with their names."""
        return ((name, array) for name, array, content in self._arrays if not _has_content(array, content))

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
        if isinstance(value, (tuple, *_LISTS, *_DICTS)):
            self._values[-1] = type(value)
            self._note(name, len(value))
        if isinstance(value, tuple):  # each time: whether two attributes are one tuple does not matter
            for item in value:
                self._read(name, item)
        elif id(value) in self._visited:
            self._note(name, self._visited[id(value)])  # which of the containers before it this is
        else:
            self._visited[id(value)] = len(self._visited)
            self._read_contents(name, value)

    def _read_contents(self, name: str, value: Any) -> None:
        """Read what an object contains, of those that MindSpore can compile."""
        if isinstance(value, Parameter):
            self._parameters.append(value)
            self._note(f"{name}.requires_grad", value.requires_grad)
            if _HAS_HOOKS:
                self._sources.append(value.hooks)
                for hook in value.hooks():
                    self._read(f"{name}.hook", hook)
        elif isinstance(value, (Tensor, np.ndarray)):
            in_memory = isinstance(value, np.ndarray) or ms.get_context("device_target") == "CPU"
            if in_memory and value.nbytes <= _LARGEST_COMPARED and id(value) not in self._written:
                content = _content_of(value)
                self._arrays.append((name, value, content))
                self._values += content
                self._names += [name] * len(content)
        elif isinstance(value, _LISTS):
            self._sources.append(functools.partial(list, value))
            for item in value:
                self._read(name, item)
        elif isinstance(value, _DICTS):
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
        elif isinstance(value, functools.cached_property):
            self._read(name, value.func)
        elif isinstance(value, (staticmethod, classmethod)):
            self._read(name, value.__func__)
        elif isinstance(value, (types.FunctionType, functools._lru_cache_wrapper)):
            if hasattr(value, "__wrapped__"):
                if not _is_library(getattr(value, "__globals__", {}).get("__name__", "functools")):
                    self.without_decorator.add(value.__qualname__)
                self._read(name, value.__wrapped__)
            else:
                self._read_function(value)
        elif isinstance(value, types.ModuleType):
            if not _is_library(value.__name__):
                self._read_attributes(vars(value), [name for name in vars(value) if name in self._used])
        elif isinstance(value, type):
            if not _is_library(value.__module__):
                self._read_class(value)
        elif not _is_library(type(value).__module__, _FRAMEWORKS):  # also a SimpleNamespace
            if not _is_library(type(value).__module__):
                self._read_class(type(value))
            attributes, slots = getattr(value, "__dict__", {}), _slots_of(type(value))
            self._read_attributes(attributes, [name for name in attributes if self._is_used(name)])
            self._read_slots(value, [name for name in slots if self._is_used(name)])

    def _is_used(self, name: str) -> bool:
        return self._any_name or name in self._used

    def _read_function(self, function: Any) -> None:
        """Read which attributes a function names, and, for one of the user's, its variables that are not local."""
        codes = list(_codes(function.__code__)) if isinstance(function, types.FunctionType) else []
        for code in codes:
            self._used.update(_names_in(code))
        if codes and not _is_library(function.__module__):
            self._any_name = self._any_name or _computes_names(function.__code__)
            names = (*function.__code__.co_freevars, *sorted({name for code in codes for name in _global_names(code)}))
            variables = functools.partial(_variables, function, names)
            self._sources.append(variables)
            for name, content in zip((*names, "defaults", "defaults"), variables()):
                self._read(name, content)

    def _read_cell(self, cell: nn.Cell) -> None:
        self._read_class(type(cell))
        attributes = vars(cell)
        of_library = _is_library(type(cell).__module__)
        any_name = self._any_name and not of_library
        named = attributes.keys() if any_name else self._used
        names = [name for name in attributes if name in _OF_EVERY_CELL or name in named and name not in CELL_ATTRIBUTES]
        self._read_attributes(attributes, names, of_library=of_library)
        self._sources.append(functools.partial(_members_of, attributes))
        for members in _members_of(attributes):
            if members:
                self._sources.append(members.values)
            else:
                self._empty.append(members)
            for name, member in members.items():
                self._read(name, member)

    def _read_attributes(
        self, attributes: Mapping[str, Any], names: Sequence[str], *, of_library: bool = False
    ) -> None:
        """Read these attributes of an object. The contents of tensors that MindSpore's own classes hold stay."""
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
            if base in _OF_CELLS or id(base) in self._classes:
                continue
            self._classes.add(id(base))
            if _is_library(base.__module__):
                for name in [name for name in vars(base) if name in self._used]:
                    self._read(name, vars(base)[name])
                continue
            members = vars(base).items()
            unnamed = {name for name, member in members if name in _UNNAMED and not _is_generated(member)}
            self._read_attributes(vars(base), [name for name, _ in members if name in self._used or name in unnamed])


def _same(mine: Any, its: Any) -> bool:
    if mine is its:
        return True
    both_plain = type(mine) is type(its) and isinstance(mine, _PLAIN)
    return both_plain and repr(mine) == repr(its)  # also two NaN, but not 0.0 and -0.0


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


def _content_of(array: Any) -> tuple:
    """Return what describes an array, of plain values: also its shape and type can be changed in place."""
    values = _array_of(array)
    return values.dtype.str, str(values.shape), values.tobytes()


def _has_content(array: Any, content: tuple) -> bool:
    """Return whether this is still the content of an array; a large one is not copied."""
    values = _array_of(array)
    if (values.dtype.str, str(values.shape)) != content[:2]:
        return False
    readable = values.flags.c_contiguous and values.dtype.kind in "biufc"
    return bool(content[2].startswith(values if readable else values.tobytes()))  # compares memory


def _array_of(array: Any) -> np.ndarray:
    return array if isinstance(array, np.ndarray) else as_array(array)


def _is_generated(method: Any) -> bool:
    """Return whether a method has no source, such as those that dataclasses compare all fields with."""
    return getattr(method, "__code__", _is_generated.__code__).co_filename.startswith("<")


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
def _computes_names(code: types.CodeType) -> bool:
    """Return whether code asks for attributes whose names it computes, or may do so."""
    if not any({"getattr", "hasattr"}.intersection(inner.co_names) for inner in _codes(code)):
        return False
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    except (OSError, SyntaxError):  # a part of an expression
        return True
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and len(node.args) > 1]
    asked = [node.args[1] for node in calls if getattr(node.func, "id", None) in ("getattr", "hasattr")]
    return not all(isinstance(name, ast.Constant) for name in asked)


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


def _is_library(module: str | None, libraries: frozenset[str] = _LIBRARIES) -> bool:
    return (module or "").partition(".")[0] in libraries
