"""Which learning rate does an optimizer use?"""

from __future__ import annotations

import math
from typing import Any

import mindspore as ms
from mindspore import nn

from . import checks


class LearningRate:
    """Returns the learning rate of the next update (of the first group); NaN if the optimizer computes it itself.

    Args:
        optimizer (Optimizer): the optimizer.
    """

    def __init__(self, optimizer: Any):
        self._optimizer = optimizer
        inner = checks.inner_of(optimizer)
        self._sets_its_own = isinstance(inner, nn.AdaFactor) and inner.relative_step
        self._first = _first_of_first_group(inner)
        self._compiled: Any = None

    def __call__(self) -> float:
        """Return the learning rate."""
        if self._sets_its_own:
            return math.nan
        groups = getattr(self._optimizer, "param_groups", None)
        rate = self._of_group(groups[0]) if groups else self._optimizer.get_lr()
        rate = rate[self._first] if isinstance(rate, (tuple, list)) else rate
        return float(rate.asnumpy()) if hasattr(rate, "asnumpy") else float(rate)

    def _of_group(self, group: dict[str, Any]) -> Any:
        """Return the rate that the optimizer uses for its first group. A graph keeps the rate of its first run."""
        if ms.get_context("mode") == ms.GRAPH_MODE and self._compiled is not None:
            return self._compiled
        rate = group.get("lr_float", group["lr"])  # `mint.optim.SGD` uses only this one
        if not isinstance(rate, float) and not type(self._optimizer).__module__.startswith("mindspore.mint"):
            rate = self._optimizer.lrs[0]
        self._compiled = rate
        return rate


def _first_of_first_group(optimizer: Any) -> int:
    """Return the index of the first group's first parameter: `order_params` may have moved it."""
    if not getattr(optimizer, "is_group_params_ordered", False):
        return 0
    first = next(iter(list(optimizer.init_params["params"])[0]["params"]), None)
    return next((number for number, each in enumerate(optimizer.parameters) if each is first), 0)
