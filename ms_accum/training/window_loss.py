"""The mean loss of a window."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any


class WindowLoss:
    """The mean loss of a window: losses and weights are summed, and divided at the end.

    Args:
        summing (bool): whether the losses are sums over rows, which are added without multiplying by the weight.
        leaves_out (bool): whether micro-batches whose loss is not finite are left out.
    """

    def __init__(self, summing: bool = False, leaves_out: bool = False):
        self.leaves_out = leaves_out
        self.summing = summing
        """bool, whether losses are added as they are."""
        self.clear()

    def clear(self) -> None:
        """Discard the window."""
        self._terms: list[tuple[Any, float, int]] = []
        self._sums = (0.0, 0.0)
        self._bad: list[int] = []
        self.samples = 0

    def add(self, loss: Any, weight: float, samples: int, number: int = 0) -> None:
        """Add a micro-batch with its number. Its loss is read from the device when the window's mean is needed."""
        if weight:  # a loss over no labels is 0/0, and 0 times NaN is NaN
            self._terms.append((loss, weight, number))
        self.samples += samples

    @property
    def terms(self) -> dict[str, float]:
        """dict, the means of the loss's terms: it is one."""
        return {}

    @property
    def bad(self) -> list[int]:
        """list[int], the numbers of the micro-batches whose loss is not finite."""
        self._carry()
        return self._bad

    @property
    def mean(self) -> float:
        """The mean loss so far; NaN for a window without weight."""
        total, weights = self._carry()
        return total / weights if weights else float("nan")

    def _carry(self) -> tuple[float, float]:
        """Return the sums of the losses and of the weights so far."""
        total, weights = self._sums
        for loss, weight, number in self._terms:
            value = float(loss.asnumpy())
            if not math.isfinite(value):
                self._bad.append(number)
                if self.leaves_out:
                    continue
            total += value * (1.0 if self.summing else weight)
            weights += weight
        self._sums, self._terms = (total, weights), []
        return self._sums

    @property
    def state(self) -> list[float]:
        """list, the values that `load` needs."""
        return [*self._carry(), self.samples]

    def load(self, state: Sequence[float], bad: Sequence[int] = ()) -> None:
        """Continue from a saved state."""
        total, weights, samples = state
        self._sums, self._terms, self.samples = (total, weights), [], int(samples)
        self._bad = [*bad]
