"""What does a micro-batch count for?"""

from __future__ import annotations

import math
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from . import _check
from .parallel import Group, gather


class Weight:
    """The answer, asked on the host for each micro-batch.

    Args:
        owner (str): whose argument this is, for the wording of errors.
        weight (Union[None, float, Tensor, Callable]): ``None``, what the loss averages over; a number; or a
            function of the micro-batch's columns that returns one.
        reduction (str): ``"mean"``, the only one that weighs, or ``"sum"``.
        loss_fn (Union[Cell, Callable, None]): what averages.
    """

    def __init__(self, owner: str, weight: Any, reduction: str, loss_fn: Any = None):
        if weight is not None and reduction == "sum":
            raise ValueError(f"For '{owner}', 'weight' must come with reduction='mean', but got 'sum'.")
        self._owner = owner
        self.unit: float | None = None
        """Optional[float], what weights are given to the graph in; None before the first."""
        self._tensors: dict[float, Tensor] = {}
        self._weight: Any
        if weight is None:
            self._weight = averaged_over(loss_fn)
        elif callable(weight) and not isinstance(weight, Tensor):
            self._weight = weight
        else:
            self._weight = _check.positive_number(owner, "weight", _plain(weight))

    def of(self, micro_batch: tuple) -> float:
        """Return what a micro-batch counts for, 0 or more."""
        if not callable(self._weight):
            return self._weight
        weight = _plain(self._weight(*micro_batch))
        if not (isinstance(weight, (int, float, np.number)) and math.isfinite(weight) and weight >= 0):
            rule = "a function that returns a finite number >= 0"
            _check.refuse(ValueError, self._owner, "weight", rule, weight)
        return float(weight)

    def as_tensor(self, weight: float) -> Tensor:
        """Return a weight > 0 for the graph, in its unit.

        Scaled by its rows, a gradient in float16 would overflow. The unit cancels out in sum(w g) / sum(w), and
        as a power of two it changes no digit.
        """
        scaled = weight / (self.unit or 1.0)
        if scaled not in self._tensors:
            if len(self._tensors) >= 1024:
                self._tensors.clear()
            self._tensors[scaled] = Tensor(scaled, ms.float32)
        return self._tensors[scaled]


def unit_near(weight: float, group: Group | None) -> float | None:
    """Return a power of two near a weight, or near the largest of the weights that all ranks call this with.

    Ranks sum what they weigh, so they weigh in one unit. None for a process alone whose weight is 0.
    """
    own = math.floor(math.log2(weight)) if weight else -math.inf
    largest = float(gather(np.array([own], np.float32), group).max())
    if largest == -math.inf:
        return 1.0 if group else None
    return 2.0**largest


def averaged_over(loss_fn: Any) -> Callable:
    """Return the function of a micro-batch's columns that counts what its mean loss was divided by."""
    if not isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)):
        return _rows
    ignored, of_class = loss_fn.ignore_index, loss_fn.weight

    def labels_that_count(data: Any, label: Any) -> float:
        labels = label.asnumpy()
        if not np.issubdtype(labels.dtype, np.integer):
            return _rows(data)  # a distribution over the classes for each row
        kept = labels[labels != ignored]
        return kept.size if of_class is None else float(of_class.asnumpy()[kept].sum())

    return labels_that_count


def _rows(*columns: Any) -> int:
    return columns[0].shape[0]


def _plain(value: Any) -> Any:
    value = value.asnumpy() if isinstance(value, Tensor) else value
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
