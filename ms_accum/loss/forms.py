"""In which form can MindSpore run a loss function?"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import mindspore as ms
from mindspore import nn, ops

from .. import _check
from .averages import kind_and_options
from .reductions import loss_reduction

_STALE = "BCEWithLogitsLoss"


def runnable(function: Any) -> Any:
    """Return a loss function in a form that MindSpore runs right, in graphs and in PyNative mode.

    The parameters of the returned Cell have the same names as those of the function.
    """
    if _has_stale_mean(function):
        options = kind_and_options(function)[1]
        return _MeanWithLogits(options("weight"), options("pos_weight"))
    return _Partial(function) if isinstance(function, functools.partial) else function


def _has_stale_mean(function: Any) -> bool:
    """Return whether PyNative mode computes a wrong gradient of this loss.

    The backward of MindSpore's BCEWithLogitsLoss divides by the number of elements of the first shape that was
    differentiated in the process. With other reductions it is right.
    """
    return kind_and_options(function)[0] == _STALE and loss_reduction(function) == "mean"


def check_gradient(owner: str, network: nn.Cell, name: str = "network") -> None:
    """Raise an error if PyNative mode computes a wrong gradient of this network, because of a loss in it."""
    if ms.get_context("mode") == ms.PYNATIVE_MODE and any(map(_has_stale_mean, _outside_graphs(network))):
        rule = "one without the mean of nn.BCEWithLogitsLoss in PyNative mode, whose gradient MindSpore divides wrongly"
        remedy = "Use graph mode, or reduction='none' and ops.mean."
        _check.refuse(ValueError, owner, name, rule, "one with it", remedy)


def _outside_graphs(cell: Any) -> Iterator[nn.Cell]:
    """Yield a Cell and its Cells, without those inside a `construct` that ms.jit compiles."""
    yield cell
    if not hasattr(cell.construct, "__wrapped__"):
        for child in cell.cells():
            yield from _outside_graphs(child)


class _Partial(nn.Cell):
    """Calls a `functools.partial`, which a graph can't call."""

    def __init__(self, function: functools.partial):
        super().__init__(auto_prefix=False)
        self.function = function.func
        self.first, self.keywords = function.args, dict(function.keywords)

    def construct(self, *columns: Any) -> Any:
        return self.function(*self.first, *columns, **self.keywords)


class _MeanWithLogits(nn.Cell):
    """The binary cross entropy of logits, averaged by another operator."""

    def __init__(self, weight: Any, pos_weight: Any):
        super().__init__(auto_prefix=False)
        self.weight, self.pos_weight = weight, pos_weight

    def construct(self, logits: Any, labels: Any) -> Any:
        losses = ops.binary_cross_entropy_with_logits(logits, labels, self.weight, self.pos_weight, "none")
        return ops.mean(losses)
