"""Which learning rate does an optimizer use?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
from mindspore import Parameter, nn

from . import checks
from .as_found import Attributes, numbers_of, put_back
from .parameters import as_array, without


class LearningRate:
    """Returns the learning rate of the next update (of the first group); NaN if the optimizer computes it itself.

    Reading changes nothing: a `get_lr` or a schedule that the user wrote may count its calls, or advance `global_step`,
    as MindSpore's own did up to 2.1. What it changes in the optimizer is set back.

    Args:
        optimizer (Optimizer): the optimizer.
    """

    def __init__(self, optimizer: Any):
        inner = checks.inner_of(optimizer)
        self._optimizer = inner.opt if isinstance(inner, nn.LARS) else inner
        self._sets_its_own = isinstance(inner, nn.AdaFactor) and inner.relative_step
        self._first = _first_of_first_group(self._optimizer)
        self._counters = _counters_of(self._optimizer)
        self._compiled: Any = None

    def __call__(self) -> float:
        """Return the learning rate."""
        if self._sets_its_own:
            return math.nan
        groups = getattr(self._optimizer, "param_groups", None)
        if groups:
            return _number(self._of_group(groups[0]))
        if _is_of_mindspore(self._optimizer):
            return self._given()
        with _undone(self._optimizer, self._counters):
            return self._given()

    def _given(self) -> float:
        """Return what the optimizer's `get_lr` returns, as a number: the Parameter that it returns may be set back."""
        rate = self._optimizer.get_lr()
        return _number(rate[self._first] if isinstance(rate, (tuple, list)) else rate)

    def _of_group(self, group: dict[str, Any]) -> Any:
        """Return the rate that the optimizer uses for its first group. A graph keeps the rate of its first run."""
        if ms.get_context("mode") == ms.GRAPH_MODE and self._compiled is not None:
            return self._compiled
        rate = group.get("lr_float", group["lr"])  # `mint.optim.SGD` uses only this one
        if not isinstance(rate, float) and not type(self._optimizer).__module__.startswith("mindspore.mint"):
            rate = self._optimizer.lrs[0]
        self._compiled = rate
        return rate


def _number(rate: Any) -> float:
    return float(rate.asnumpy()) if hasattr(rate, "asnumpy") else float(rate)


def _first_of_first_group(optimizer: Any) -> int:
    """Return the index of the first group's first parameter: `order_params` may have moved it.

    Not all optimizers keep their groups (`nn.AdamWeightDecay` does not): then it is that of the first parameter.
    """
    if not getattr(optimizer, "is_group_params_ordered", False):
        return 0
    groups = getattr(optimizer, "init_params", {}).get("params", ())
    grouped = [each for group in groups if "params" in group for each in group["params"]]
    return next((number for number, each in enumerate(optimizer.parameters) if grouped and each is grouped[0]), 0)


def _is_of_mindspore(optimizer: Any) -> bool:
    """Return whether MindSpore's own code computes the rate, which changes nothing and so needs no copies."""
    schedule = getattr(optimizer, "learning_rate", None)
    cells = [cell for _, cell in schedule.cells_and_names()] if isinstance(schedule, nn.Cell) else []
    modules = [getattr(optimizer.get_lr, "__module__", ""), *(type(cell).__module__ for cell in cells)]
    return all(module.partition(".")[0] == "mindspore" for module in modules)


def _counters_of(optimizer: Any) -> list[Parameter]:
    """Return the optimizer's Parameters that are neither trained nor as large as trained ones, such as moments."""
    endings = tuple(f".{parameter.name}" for parameter in optimizer.parameters)
    others = without(optimizer.get_parameters(), optimizer.parameters)
    return [parameter for parameter in others if not parameter.name.endswith(endings)]


@contextmanager
def _undone(optimizer: Any, counters: list[Parameter]) -> Iterator[None]:
    """Set back what the block changes: the Parameters `counters`, and attributes of the optimizer and its schedules."""
    kept = [(parameter, as_array(parameter).copy()) for parameter in counters]
    attributes = [Attributes(optimizer, object), *numbers_of([optimizer])]
    try:
        yield
    finally:
        put_back(kept)
        for each in attributes:
            each.put_back()
