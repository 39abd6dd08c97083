"""Runs Cells as compiled graphs, whatever MindSpore's global mode is."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from typing import Any, Callable

import mindspore as ms
from mindspore import Tensor, nn

from .. import _check
from . import tree
from .constants import Constants
from .state import attached

# In the call stack of errors that MindSpore's compiler raises. Those of kernels that run have other files, such as the
# error of a sum over ranks of which one is lost.
_COMPILER = re.compile(r"ccsrc/(frontend|pipeline)/")
_PARSER = re.compile(r"mindspore/(graph/_parse|_extends/parse)/")  # its part in Python, whose errors have no such stack
_UNKNOWN = "shape=[-2]"  # of what the compiler does not understand, such as NumPy's result; then an operator rejects it
_LINE = re.compile(r"In file (\S+?):(\d+)")
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
        self._known: tuple[dict] = ({},)  # in a tuple, because a Cell follows what a dict contains
        self.contains(*parts)

    def contains(self, *parts: Any) -> None:
        """Set the parts."""
        self.constants = Constants(self.owner, parts)

    def compile(self, *inputs: Any, **named: Any) -> None:
        """Compile a graph, unless it is known: to find out that there is one costs MindSpore as much as a small graph.

        It notes the graph's name in each Cell inside, where only its automatic parallelism reads it.
        """
        kinds = [(each.shape, each.dtype) if type(each) is Tensor else each for each in inputs]
        if named or not all(kind is None or type(kind) is tuple for kind in kinds):
            self.before_compiling()
            return super().compile(*inputs, **named)
        known, graph = self._known[0], (self.phase, *kinds)
        name, *noted = known.get(graph, (None,))
        if name in self.compile_cache:  # it is not after `ms_memory_recycle`
            self.arguments_key, self._has_mutable_args_list = noted
        else:
            self.before_compiling()
            super().compile(*inputs)
            known[graph] = self.current_phase, self.arguments_key, self._has_mutable_args_list
        return None

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
        if not getattr(cell, "__compile_cell_hook__", False):
            cell.__compile_cell_hook__ = True  # the Cell's own hooks are in the graph
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
        raise type(error)(words_of(error)) from error
    is_of_operator = text.lstrip("' \n").startswith("For '") and _UNKNOWN not in text
    if is_of_operator or not (_COMPILER.search(text) or _UNKNOWN in text or _is_of_parser(error)):
        return
    remedy = "Use compile=False to run it in PyNative mode, without ms.set_context(mode=ms.GRAPH_MODE)."
    if "set_recursion_limit" in text:  # MindSpore's own remedy
        remedy = "Call mindspore.set_recursion_limit(10000) before the run."
    raise RuntimeError(
        f"For '{owner}', MindSpore can't compile the network, its loss, the optimizer or a stage{place_of(error)}: "
        f"{words_of(error).rstrip('.')}. {remedy}"
    ) from error


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
