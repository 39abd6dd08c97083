"""Runs Cells as compiled graphs, whatever MindSpore's global mode is, and follows what is constant in them."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from operator import is_
from typing import Any, Callable

import mindspore as ms
from mindspore import Parameter, Tensor, nn

from .. import _check
from . import private, tree
from .parameters import attached, unique_name, untrained


def call(function: Callable, inputs: tuple, **named: Any) -> Any:
    """Return ``function(*inputs)``.

    In a method, ``self.network(*inputs)`` and ``self.window.operator()`` make MindSpore keep the object, its networks
    and all their graphs until the process ends. In a function that is no method, neither does.
    """
    return function(*inputs, **named)


# Each graph keeps memory, and compiling takes seconds.
_MANY = 8
_PLAIN = (bool, int, float, str, type(None))
_FOLLOWED = frozenset({"training", *private.HOOKS})  # all that is in graphs of what MindSpore notes in a Cell
_HAS_HOOKS = hasattr(Tensor, "hooks")  # not in older versions of MindSpore


class Constants:
    """What the graphs of one Cell contain as constants, and the number of the graph for each state of it.

    MindSpore reads attributes when it compiles, and never again; outside graphs it reads them in every call. Followed
    is what programs change between two epochs: training flags, `requires_grad`, hooks, replaced layers and Parameters,
    plain numbers, flags and strings, and those of an optimizer's `param_groups`. All else stays as it was, as with
    `ms.jit`.

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
        own = [private.parameters_of(cell) for cell in cells]
        self._members = [*map(private.cells_of, cells), *own, *hooks]
        self._parameters = [each for parameters in own for each in parameters.values() if each is not None]
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
    if name in private.OF_EVERY_CELL:
        return name in _FOLLOWED
    return isinstance(value, (*_PLAIN, Parameter)) and not name.startswith("__")


def _differ(new: Any, old: Any) -> bool:
    """Return whether a value has changed. Parameters would be compared element by element."""
    return new is not old and not (isinstance(new, _PLAIN) and new == old)


def _is_constant(item: tuple[str, Any]) -> bool:
    """Return whether graphs depend on the value of a name. MindSpore creates dicts of hooks, whose contents matter."""
    return item[0] not in _FOLLOWED or not (item[1] is None or isinstance(item[1], dict))


# In the call stack of errors that MindSpore's compiler raises. Those of kernels that run have other files, such as the
# error of a sum over ranks of which one is lost.
_COMPILER = re.compile(r"ccsrc/(frontend|pipeline)/")
_PARSER = re.compile(r"mindspore/(graph/_parse|_extends/parse)/")  # its part in Python, whose errors have no such stack
_UNKNOWN = "shape=[-2]"  # of what the compiler does not understand, such as NumPy's result; then an operator rejects it
_LINE = re.compile(r"In file (\S+?):(\d+)")
_REPORT = f"rank_{os.environ.get('RANK_ID', '0')}/om/analyze_fail.ir"
_OURS = os.path.dirname(os.path.dirname(__file__))
_MINDSPORE = os.path.dirname(ms.__file__)


class Compiled(nn.Cell):
    """A Cell whose `construct` runs as one graph in PyNative mode too, which is MindSpore's default.

    Args:
        owner (str): the name used in error messages.
        compiles (bool): whether it is compiled in PyNative mode. In graph mode it always is.
        *parts (Any): the Cells and functions of the user in it. If a Cell changes, it is compiled again.
    """

    def __init__(self, owner: str, compiles: bool, *parts: Any):
        super().__init__(auto_prefix=False)
        self.owner = owner
        self.compiles = compiles
        self.before_compiling: Callable[[], None] = _nothing
        """Callable, finds what the next graph has to contain, for Cells with a branch or a loop."""
        self.known_graphs: tuple[dict] = ({},)  # in a tuple, because a Cell follows what a dict contains
        self.contains(*parts)

    def contains(self, *parts: Any) -> None:
        """Set the parts."""
        self.constants = Constants(self.owner, parts)

    compile = private.compile_once

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        return _run(self.owner, self.compiles, self, self.constants, super().__call__, inputs, named)


def _nothing() -> None:
    """Do nothing."""


def _run(
    owner: str,
    compiles: bool,
    cell: nn.Cell,
    constants: Constants,
    call: Callable,
    inputs: tuple,
    named: dict[str, Any],
) -> Any:
    """Call a Cell, in PyNative mode as a graph if `compiles`; in graph mode this is what MindSpore does.

    Graphs are those of `Cell.compile_and_run`. A graph of `ms.jit` would silently keep the storage that Parameters had
    in its first run, and so would neither read nor update weights that are loaded later; it is slower, too.

    Args:
        owner (str): the name used in error messages.
        compiles (bool): whether it is compiled in PyNative mode.
        cell (Cell): the Cell.
        constants (Constants): the number of its graph.
        call (Callable): calls it operator by operator.
        inputs (tuple), named (dict): its inputs.
    """
    tree.check_not_traced(owner)
    if not in_graphs(compiles):
        return call(*inputs, **named)
    phase = cell.phase  # MindSpore has a graph for each
    number = constants.graph()
    if number:
        cell.phase = f"{phase}.{number}"
    try:
        if named:
            bound = inspect.signature(cell.construct).bind(*inputs, **named)
            bound.apply_defaults()
            inputs, named = bound.args, bound.kwargs
        if not getattr(cell, private.HOOKS_IN_GRAPH, False):
            setattr(cell, private.HOOKS_IN_GRAPH, True)
        with without_report():
            return cell.compile_and_run(*inputs, **named)
    except Exception as error:
        raise_if_not_compiled(owner, error)
        raise
    finally:
        if number:
            cell.phase = phase


def in_graphs(compiles: bool) -> bool:
    """Return whether Cells run as graphs: with `compiles`, or in graph mode, unless MS_JIT=0 prevents both."""
    return os.environ.get("MS_JIT") != "0" and (compiles or ms.get_context("mode") == ms.GRAPH_MODE)


def compiled(owner: str, network: nn.Cell, compiles: bool) -> Callable:
    """Return a function that calls a user's network, in PyNative mode as a graph if `compiles`.

    It is not a Cell around the network, which MindSpore would compile anew in each evaluation.
    """
    constants = attached(network, "_ms_accum_constants", lambda: Constants(owner, [network]))
    return lambda *columns: _run(owner, compiles, network, constants, network, columns, {})


def check_compile(owner: str, compile: bool) -> bool:
    """Return the argument `compile` of a public class, or raise an error if it is invalid."""
    _check.instance(owner, "compile", compile, bool, "a bool")
    if not compile and ms.get_context("mode") == ms.GRAPH_MODE:
        remedy = "Remove ms.set_context(mode=ms.GRAPH_MODE)."
        _check.raise_invalid(ValueError, owner, "compile", "True in graph mode", False, remedy)
    return compile


def raise_if_not_compiled(owner: str, error: Exception) -> None:
    """Raise a one-line error if MindSpore could not compile a network, or ours rejects what it got in a graph.

    What an operator rejects is left as it is.
    """
    text = str(error)
    if text.startswith("'For '") and _COMPILER.search(text):
        raise type(error)(words_of(error)) from cause_of(error)
    is_of_operator = text.lstrip("' \n").startswith("For '") and _UNKNOWN not in text
    if is_of_operator or not (_COMPILER.search(text) or _UNKNOWN in text or _is_of_parser(error)):
        return
    remedy = "Use compile=False to run it in PyNative mode, without ms.set_context(mode=ms.GRAPH_MODE)."
    if "set_recursion_limit" in text:  # MindSpore's own remedy
        remedy = "Call mindspore.set_recursion_limit(10000) before the run."
    raise RuntimeError(
        f"For '{owner}', MindSpore can't compile the network, its loss, the optimizer or a stage{place_of(error)}: "
        f"{words_of(error).rstrip('.')}. {remedy}"
    ) from cause_of(error)


def cause_of(error: BaseException) -> BaseException | None:
    """Return the cause of an error that is raised in one line in the place of MindSpore's: none, unless asked for.

    MindSpore's has a hundred lines of its compiler, in which ours is lost. With MS_ACCUM_DEBUG=1 it is the cause.
    """
    return error if debugs() else None


@contextmanager
def without_report() -> Iterator[None]:
    """Remove the report that MindSpore's compiler writes into the current folder if it fails inside the block.

    What was there before is kept, and with MS_ACCUM_DEBUG=1 the report, too.
    """
    had_report = os.path.exists(_REPORT)
    try:
        yield
    except Exception:
        if not (had_report or debugs()):
            with suppress(OSError):  # there is none, or there are other files
                os.remove(_REPORT)
                os.removedirs(os.path.dirname(_REPORT))
        raise


def debugs() -> bool:
    """Return whether MindSpore's errors are wanted: the environment variable MS_ACCUM_DEBUG is set, and not to 0."""
    return os.environ.get("MS_ACCUM_DEBUG", "0") not in ("", "0")


def words_of(error: BaseException) -> str:
    """Return MindSpore's message in one line. That of an error which a graph raised itself is in quotes there."""
    words = _check.one_line(_check.first_words(str(error)), _check.LINE)
    return words[1:].removesuffix("'") if words.startswith("'") else words


def place_of(error: BaseException) -> str:
    """Return the last line of the user's code in an error of MindSpore's, as " (file:line)"; or an empty text."""
    places = _LINE.findall(str(error)) or [(f.filename, f.lineno) for f in traceback.extract_tb(error.__traceback__)]
    lines = [f"{path}:{line}" for path, line in places if not path.startswith((_OURS, _MINDSPORE))]
    return f" ({lines[-1]})" if lines else ""


def _is_of_parser(error: Exception) -> bool:
    """Return whether the part of MindSpore's compiler that is written in Python raised an error."""
    frames = traceback.extract_tb(error.__traceback__)
    return bool(frames) and _PARSER.search(frames[-1].filename) is not None


# From this number of cores on MindSpore has several such threads, and measures which way is faster.
_CORES = 12


@ms.jit_class
class Branch:
    """Returns a number as it is, in a graph through a branch.

    Kernels of a graph without branches are run by the calling thread, which spins while others do their share, and so
    takes a core from them: on two cores LeNet5 took 2.5 or 4.5 ms, at random. With a branch the calling thread sleeps.
    """

    def __init__(self) -> None:
        self.taken = untrained(f"{unique_name('branch')}.taken", True, ms.bool_)

    def __call__(self, number: Tensor) -> Any:
        if self.taken:
            number = number * 1
        return number


def branch(compiles: bool) -> Branch | None:
    """Return a `Branch` where graphs with one are faster, else None.

    Args:
        compiles (bool): whether what uses it is compiled in PyNative mode, too.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    pays = ms.get_context("device_target") == "CPU" and cores < _CORES
    return Branch() if pays and in_graphs(compiles) else None
