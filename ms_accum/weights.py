"""What does a micro-batch count for?"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from . import _check
from .averages import average_of
from .parallel import Group, gather


class Weight:
    """The answer, asked on the host for each micro-batch.

    Args:
        owner (str): whose argument this is, for the wording of errors.
        weight (Union[None, float, Tensor, Callable]): ``None``, what the loss averages over; a number; or a
            function of the micro-batch's columns that returns one.
        reduction (str): ``"mean"``, the only one that weighs, or ``"sum"``.
        loss_fn (Union[Cell, Callable, None]): what averages.
        group (Optional[Group]): who weighs in one unit.
    """

    def __init__(self, owner: str, weight: Any, reduction: str, loss_fn: Any = None, group: Group | None = None):
        if weight is not None and reduction == "sum":
            raise ValueError(f"For '{owner}', 'weight' must come with reduction='mean', but got 'sum'.")
        self._owner, self._group, self._weighs = owner, group, reduction == "mean"
        self.unit: float | None = None
        """Optional[float], what weights are given to the graph in; None before the first."""
        self._tensors: dict[float, Tensor] = {}
        self._weight: Any
        self.is_guess = False
        """bool, whether nobody said what a micro-batch counts for: rows."""
        if weight is None:
            average = average_of(loss_fn)
            self._weight, self.is_guess = average.counted, not average.known
        elif callable(weight) and not isinstance(weight, Tensor):
            self._weight = weight
        else:
            self._weight = _check.positive_number(owner, "weight", _plain(weight))

    def of(self, micro_batch: tuple) -> float:
        """Return what a micro-batch of the run counts for, 0 or more; the first decides on the unit."""
        weight = self.counted(micro_batch)
        if self._weighs and self.unit is None:
            self.unit = unit_near(weight, self._group)
        return weight

    def counted(self, micro_batch: tuple) -> float:
        """Return what any micro-batch would count for."""
        if not callable(self._weight):
            return self._weight
        weight = _plain(self._weight(*micro_batch))
        if not (isinstance(weight, (int, float, np.number)) and math.isfinite(weight) and weight >= 0):
            rule = "a function that returns a finite number >= 0"
            _check.refuse(ValueError, self._owner, "weight", rule, weight)
        return float(weight)

    def in_units(self, amount: float) -> float:
        """Return a weight, or what has been multiplied by one, for arithmetic in float32."""
        return amount / (self.unit or 1.0)

    def as_tensor(self, weight: float) -> Tensor | None:
        """Return a weight > 0 for the graph, in its unit; None where gradients are summed as they are.

        Scaled by its rows, a gradient in float16 would overflow. The unit cancels out in sum(w g) / sum(w), and
        as a power of two it changes no digit.
        """
        if not self._weighs:
            return None
        scaled = self.in_units(weight)
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


def _plain(value: Any) -> Any:
    value = value.asnumpy() if isinstance(value, Tensor) else value
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
