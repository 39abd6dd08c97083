"""What is the weight of a micro-batch?"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor

from .. import _check
from ..ranks.parallel import Group, gather
from .averages import average_of


class Weight:
    """Computes the weight of each micro-batch, on the host.

    Args:
        owner (str): the name used in error messages.
        weight (Union[None, float, Tensor, Callable]): ``None``, the number that the loss divides by; a number; or a
            function of the micro-batch's columns that returns one.
        reduction (str): ``"mean"``, which uses weights, or ``"sum"``, which does not.
        loss_fn (Union[Cell, Callable, None]): the loss.
        group (Optional[Group]): the ranks, which share one unit.
    """

    def __init__(self, owner: str, weight: Any, reduction: str, loss_fn: Any = None, group: Group | None = None):
        if weight is not None and reduction == "sum":
            raise ValueError(f"For '{owner}', 'weight' must come with reduction='mean', but got 'sum'.")
        self._owner, self._group, self._weighs = owner, group, reduction == "mean"
        self.unit: float | None = None
        """Optional[float], the unit of the weights that the graph gets; None before the first weight."""
        self._tensors: dict[float, Tensor] = {}
        self._weight: Any
        self.is_guess = False
        """bool, whether the weight is only a guess (the rows): neither the user nor the loss defines it."""
        if weight is None:
            average = average_of(loss_fn)
            self._weight, self.is_guess = average.counted, not average.known
        elif callable(weight) and not isinstance(weight, Tensor):
            self._weight = weight
        else:
            self._weight = _check.positive_number(owner, "weight", plain(weight))

    def of(self, micro_batch: tuple) -> float:
        """Return the weight, >= 0, of a micro-batch of the run; the first one sets the unit."""
        weight = self.counted(micro_batch)
        if self._weighs and self.unit is None:
            self.unit = unit_near(weight, self._group)
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

        Without the unit a float16 gradient, multiplied by the number of rows, would overflow. The unit cancels out in
        sum(w g) / sum(w); it is a power of two, so it changes no digit.
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
    """Return a power of two near a weight; with several ranks, near the largest of their weights.

    Ranks sum their weighted gradients, so they must use the same unit. None for a single process whose weight is 0.
    """
    own = math.floor(math.log2(weight)) if weight else -math.inf
    largest = float(gather(np.array([own], np.float32), group).max())
    if largest == -math.inf:
        return 1.0 if group else None
    return 2.0**largest


def plain(value: Any) -> Any:
    """Return a Tensor or array of one element as a number, and anything else unchanged."""
    value = value.asnumpy() if isinstance(value, Tensor) else value
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value
