"""What is the weight of a micro-batch, computed inside a graph?"""

from __future__ import annotations

from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Tensor, ops

from .. import _check
from .averages import COUNTS, kind_and_options, of_elements, of_labels
from .weights import plain


class GraphWeight(NamedTuple):
    """The weight of a micro-batch."""

    of: Any
    """From the columns to the weight: a number known when the graph is compiled, or a Tensor."""
    varies: bool
    """bool, whether it depends on the values of the columns, so that it may be 0."""


def weight_in_graph(owner: str, weight: Any, loss_fn: Any) -> GraphWeight:
    """Return the weight of micro-batches, as `Weight` does on the host.

    Args:
        owner (str): the name used in error messages.
        weight (Union[None, float, Tensor, Callable]): as for `Weight`; a function is compiled.
        loss_fn (Union[Cell, Callable, None]): the loss.
    """
    if weight is not None and (not callable(weight) or isinstance(weight, Tensor)):
        return GraphWeight(_Fixed(_check.positive_number(owner, "weight", plain(weight))), varies=False)
    if weight is not None:
        return GraphWeight(weight, varies=True)
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
    """The rows of a column, or of the last one if there are fewer."""

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
    """The labels that are not ignored, or the sum of their class weights."""

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
