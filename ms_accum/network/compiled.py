"""Runs Cells as compiled graphs, whatever MindSpore's global mode is."""

from __future__ import annotations

import os
import re
from typing import Any, Callable

import mindspore as ms
from mindspore import nn

from .. import _check

# MindSpore adds this to errors that it finds while it compiles, with the lines that it was compiling.
_WHILE_COMPILING = "The Traceback of Net Construct Code:"
_LINE = re.compile(r"In file (\S+?):(\d+)")
_OURS = os.path.dirname(os.path.dirname(__file__))
_MINDSPORE = os.path.dirname(ms.__file__)


class Compiled(nn.Cell):
    """A Cell whose `construct` runs as one graph in PyNative mode too, which is MindSpore's default.

    Args:
        owner (str): the name used in error messages.
        compiles (bool): whether it is compiled in PyNative mode. In graph mode it always is.
    """

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.run_graph = ms.jit(cls.construct)

    def __init__(self, owner: str, compiles: bool):
        super().__init__(auto_prefix=False)
        self.owner = owner
        self.compiles = compiles

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        in_pynative = ms.get_context("mode") == ms.PYNATIVE_MODE
        if in_pynative and not self.compiles:
            return super().__call__(*inputs, **named)
        try:
            return self.run_graph(*inputs, **named) if in_pynative else super().__call__(*inputs, **named)
        except Exception as error:
            raise_if_not_compiled(self.owner, error)
            raise


def in_graphs(compiles: bool) -> bool:
    """Return whether Cells run as graphs: with `compiles`, or in graph mode, unless MS_JIT=0 prevents both."""
    return os.environ.get("MS_JIT") != "0" and (compiles or ms.get_context("mode") == ms.GRAPH_MODE)


def compiled(owner: str, network: nn.Cell, compiles: bool) -> Callable:
    """Return a function that runs a user's network, in PyNative mode as a graph if `compiles`.

    It is not a Cell around the network, which MindSpore would compile anew in each evaluation.
    """
    is_compiled_already = hasattr(network.construct, "__wrapped_by_jit__")
    graph = ms.jit(network) if compiles and not is_compiled_already else network

    def run(*columns: Any) -> Any:
        try:
            return network(*columns) if ms.get_context("mode") == ms.GRAPH_MODE else graph(*columns)
        except Exception as error:
            raise_if_not_compiled(owner, error)
            raise

    return run


def check_compile(owner: str, compile: bool) -> bool:
    """Return the argument `compile` of a public class, or raise an error if it is invalid."""
    _check.instance(owner, "compile", compile, bool, "a bool")
    if not compile and ms.get_context("mode") == ms.GRAPH_MODE:
        remedy = "Remove ms.set_context(mode=ms.GRAPH_MODE)."
        _check.raise_invalid(ValueError, owner, "compile", "True in graph mode", False, remedy)
    return compile


def raise_if_not_compiled(owner: str, error: Exception) -> None:
    """Raise a one-line error if MindSpore could not compile a network; not for what an operator, or ours, rejects."""
    text = str(error)
    if _WHILE_COMPILING not in text or text.lstrip().startswith("For '"):
        return
    lines = [f"{path}:{line}" for path, line in _LINE.findall(text) if not path.startswith((_OURS, _MINDSPORE))]
    where = f" ({lines[-1]})" if lines else ""
    reason = _check.one_line(_check.first_words(text))
    raise RuntimeError(
        f"For '{owner}', MindSpore can't compile the network{where}: {reason} "
        "Use compile=False to run it in PyNative mode, without ms.set_context(mode=ms.GRAPH_MODE)."
    ) from error
