"""Which attributes of the user's Cells have changed since a graph was compiled, in which they are constants.

MindSpore reads attributes when it compiles, and never again; outside graphs it reads them in every call. Followed is
what programs change between two epochs: training flags, `requires_grad`, hooks, replaced layers and Parameters, plain
numbers, flags and strings, and those of an optimizer's `param_groups`. All else stays as it was, as with `ms.jit`.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import is_
from typing import Any

from mindspore import Parameter, Tensor, nn

from .. import _check

# Each graph keeps memory, and compiling takes seconds.
_MANY = 8
_PLAIN = (bool, int, float, str, type(None))
# What MindSpore notes in a Cell; of these only the next ones are in graphs.
_OF_EVERY_CELL = frozenset({*vars(nn.Cell()), "current_phase"})
_FOLLOWED = frozenset({"training", *(name for name in _OF_EVERY_CELL if "ward" in name and "hook" in name)})
_HAS_HOOKS = hasattr(Tensor, "hooks")  # not in older versions of MindSpore


class Constants:
    """What the graphs of one Cell contain as constants, and the number of the graph for each state of it.

    Args:
        owner (str): the name used in error messages.
        parts (Iterable): the Cells and functions of the user that the graphs contain. Functions are not followed.
    """

    def __init__(self, owner: str, parts: Iterable[Any]):
        self._owner = owner
        self._parts = [part for part in parts if isinstance(part, nn.Cell)]
        self._attributes: list[tuple[dict[str, Any], list[str]]] = []
        self._members: list[dict[str, Any]] = []
        self._parameters: list[Parameter] = []
        self._sizes: list[int] = []
        self._values: list[Any] = []
        self._graphs: dict[tuple, int] = {}
        self._state: tuple = ()

    def graph(self) -> int:
        """Return the number of the graph that contains what the parts are now; a new one must be compiled."""
        sizes, values = self._read()
        if not self._graphs or sizes != self._sizes or not all(map(is_, values, self._values)):
            self._find()
        return self._graphs[self._state]

    def _read(self) -> tuple[list[int], list[Any]]:
        """Return the number of all attributes, and the values of those that are followed."""
        values: list[Any] = []
        for attributes, names in self._attributes:
            values += map(attributes.get, names)
        for members in self._members:
            values += members.values()
        for parameter in self._parameters:
            values.append(parameter.requires_grad)
            if _HAS_HOOKS:
                values += parameter.hooks()
        return [len(values), *(len(attributes) for attributes, _ in self._attributes)], values

    def _find(self) -> None:
        """Find what is to be followed, and the number of the graph for its state."""
        cells = [cell for part in self._parts for _, cell in part.cells_and_names()]
        groups = [group for part in self._parts for group in getattr(part, "param_groups", ())]
        dicts = [*map(vars, cells), *groups]
        self._attributes = [(each, [name for name in each if _is_followed(name, each[name])]) for each in dicts]
        hooks = [each[name] for each in dicts for name in _FOLLOWED if isinstance(each.get(name), dict)]
        self._members = [members for cell in cells for members in (cell._cells, cell._params)] + hooks
        self._parameters = [parameter for cell in cells for parameter in cell._params.values() if parameter is not None]
        self._sizes, self._values = self._read()
        names = [name for _, names in self._attributes for name in names]
        names += [name if isinstance(name, str) else "a hook" for members in self._members for name in members]
        names += ["requires_grad or a hook"] * (len(self._values) - len(names))
        before, self._state = self._state, tuple(filter(_is_constant, zip(names, self._values)))
        if self._state not in self._graphs:
            if len(self._graphs) == _MANY:
                changed = (new[0] for new, old in zip(self._state, before) if _differ(new[1], old[1]))
                self._warn(next(changed, "a layer"))
            self._graphs[self._state] = len(self._graphs)

    def _warn(self, name: str) -> None:
        _check.warn(
            f"For '{self._owner}', the network is compiled for the {_MANY + 1}th time, because '{name}' has changed. "
            "Each time takes seconds and memory: use a Parameter and ops.assign instead, or compile=False."
        )


def _is_followed(name: str, value: Any) -> bool:
    if name in _OF_EVERY_CELL:
        return name in _FOLLOWED
    return isinstance(value, (*_PLAIN, Parameter)) and not name.startswith("__")


def _differ(new: Any, old: Any) -> bool:
    """Return whether a value has changed. Parameters would be compared element by element."""
    return new is not old and not (isinstance(new, _PLAIN) and new == old)


def _is_constant(item: tuple[str, Any]) -> bool:
    """Return whether graphs depend on the value of a name. MindSpore creates dicts of hooks, whose contents matter."""
    return item[0] not in _FOLLOWED or not (item[1] is None or isinstance(item[1], dict))
