"""What is the weight of a micro-batch, on the host and inside a graph?"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from .. import _check
from ..ranks.group import Group, gather
from .averages import COUNTS, average_of, kind_and_options, of_elements, of_labels
from .forms import runnable


class Weight:
    """Computes the weight of each micro-batch, on the host.

    Args:
        owner (str): the name used in error messages.
        weight (Union[None, float, Tensor, Callable]): ``None``, the number that the loss divides by; a number; or a
            function of the micro-batch's columns that returns one.
        reduction (str): ``"mean"``, which uses weights, or ``"sum"``, which does not.
        loss_fn (Union[Cell, Callable, None]): the loss.
        group (Optional[Group]): the ranks, which use the same unit.
    """

    def __init__(self, owner: str, weight: Any, reduction: str, loss_fn: Any = None, group: Group | None = None):
        if weight is not None and reduction == "sum":
            raise ValueError(f"For '{owner}', 'weight' must come with reduction='mean', but got 'sum'.")
        self._owner, self._group, self.weighs = owner, group, reduction == "mean"
        self.unit: float | None = None
        """Optional[float], the unit in which the graph gets the open window's weights; None before the first one."""
        self._share = 0
        self._tensors: dict[float, Tensor] = {}
        self._weight: Any
        self.is_guess = False
        """bool, whether the weight is a guess (the rows), because neither the user nor the loss defines it."""
        if weight is None:
            average = average_of(loss_fn)
            self._weight, self.is_guess = average.counted, not average.known
        elif callable(weight) and not isinstance(weight, Tensor):
            self._weight = weight
        else:
            self._weight = _check.positive_number(owner, "weight", plain(weight))

    def share(self, micro_batches: int) -> None:
        """Define how the first weight of a window sets its unit, in a single process.

        Args:
            micro_batches (int): the number of micro-batches of equal weight that add up to 1. 0: the unit is a power of
                two near the weight of the first micro-batch.
        """
        self._share = micro_batches

    def begin(self) -> None:
        """Begin a window, with a unit of its own, because weights may differ by orders of magnitude.

        Ranks keep the unit that they agreed on at the first weight: there weights multiply gradients in float32, whose
        range is large enough for all windows.
        """
        if self._group is None:
            self.unit = None

    def of(self, micro_batch: tuple) -> float:
        """Return the weight, >= 0, of a micro-batch of the run; the first one of a window defines the unit."""
        weight = self.counted(micro_batch)
        if self.weighs and self.unit is None:
            self.unit = self._share * weight or None if self._share else unit_near(weight, self._group)
        return weight

    def counted(self, micro_batch: tuple) -> float:
        """Return the weight of any micro-batch."""
        if not callable(self._weight):
            return self._weight
        weight = plain(self._weight(*micro_batch))
        if not (isinstance(weight, (int, float, np.number)) and math.isfinite(weight) and weight >= 0):
            rule = "a function that returns a finite number >= 0"
            _check.refuse(ValueError, self._owner, "weight", rule, weight)
        return float(weight)

    def in_units(self, amount: float) -> float:
        """Return a weight, or a sum multiplied by weights, in the unit, for float32 arithmetic."""
        return amount / (self.unit or 1.0)

    def as_tensor(self, weight: float) -> Tensor | None:
        """Return a weight > 0 for the graph, in its unit; None if gradients are summed without weights.

        Without the unit a loss in float16, multiplied by the number of rows, would overflow. The unit cancels out in
        sum(w g) / sum(w). Unless `share` defines it, it is a power of two, which causes no rounding.
        """
        if not self.weighs:
            return None
        scaled = self.in_units(weight)
        if scaled not in self._tensors:
            if len(self._tensors) >= 1024:
                self._tensors.clear()
            self._tensors[scaled] = Tensor(scaled, ms.float32)
        return self._tensors[scaled]


def unit_near(weight: float, group: Group | None) -> float | None:
    """Return a power of two near a weight; with several ranks, near the largest of their weights.

    Ranks sum their weighted gradients, so they need the same unit. None in a single process if the weight is 0.
    """
    own = math.floor(math.log2(weight)) if weight else -math.inf
    largest = float(gather(np.array([own], np.float32), group).max())
    if largest == -math.inf:
        return 1.0 if group else None
    return 2.0**largest


def plain(value: Any) -> Any:
    """Return a Tensor or array with one element as a number, and everything else unchanged."""
    value = value.asnumpy() if isinstance(value, Tensor) else value
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value


class GraphWeight(NamedTuple):
    """The weight of a micro-batch, in a graph."""

    of: Any
    """Returns the weight from the columns: a Tensor, or a number that is constant in the graph."""
    varies: bool
    """bool, whether it depends on the values of the columns, so that it may be 0."""


def weight_in_graph(owner: str, weight: Any, loss_fn: Any) -> GraphWeight:
    """Return what computes the weight of micro-batches in a graph, as `Weight` does on the host.

    Args:
        owner (str): the name used in error messages.
        weight (Union[None, float, Tensor, Callable]): as for `Weight`; a function is compiled.
        loss_fn (Union[Cell, Callable, None]): the loss.
    """
    if weight is not None and (not callable(weight) or isinstance(weight, Tensor)):
        return GraphWeight(_Fixed(_check.positive_number(owner, "weight", plain(weight))), varies=False)
    if weight is not None:
        return GraphWeight(runnable(weight), varies=True)
    kind, options = kind_and_options(loss_fn)
    count = COUNTS.get(kind or "")
    if count is of_labels:
        return GraphWeight(_Labels(options("ignore_index"), options("weight")), varies=True)
    if count is of_elements and options("reduction") != "batchmean":
        return GraphWeight(_Elements(), varies=False)
    return GraphWeight(_Rows(0 if count is None else 1), varies=False)


@ms.jit_class
class _Fixed:
    def __init__(self, weight: float):
        self.weight = weight

    def __call__(self, *columns: Any) -> Any:
        return self.weight


@ms.jit_class
class _Rows:
    """The number of rows of a column, or of the last one if there are fewer columns."""

    def __init__(self, column: int):
        self.column = column

    def __call__(self, *columns: Any) -> Any:
        return columns[min(self.column, len(columns) - 1)].shape[0]


@ms.jit_class
class _Elements:
    def __call__(self, *columns: Any) -> Any:
        return columns[1].size if len(columns) > 1 else columns[0].shape[0]


@ms.jit_class
class _Labels:
    """The number of labels that are not ignored, or the sum of their class weights."""

    def __init__(self, ignored: int | None, of_class: Tensor | None):
        self.ignored, self.of_class = -100 if ignored is None else ignored, of_class

    def __call__(self, *columns: Any) -> Any:
        if len(columns) == 1:
            return columns[0].shape[0]
        labels = columns[1]
        if labels.dtype in (ms.float16, ms.bfloat16, ms.float32, ms.float64):
            return labels.size / labels.shape[1]  # one distribution over the classes per label
        counts = ops.cast(labels != self.ignored, ms.float32)
        if self.of_class is not None:
            known = ops.where(labels != self.ignored, labels, ops.zeros_like(labels))
            counts = counts * ops.reshape(ops.gather(self.of_class, ops.reshape(known, (-1,)), 0), labels.shape)
        return ops.sum(counts)
