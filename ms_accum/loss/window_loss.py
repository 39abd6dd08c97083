"""What is the loss of a window, and of a micro-batch that has not been run yet?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from mindspore import Tensor


class Losses:
    """The losses of collected micro-batches; `values` is set when the micro-batches have been run."""

    values: Tensor | None = None

    def of(self, number: int) -> Loss:
        """Return the loss of one micro-batch."""
        return Loss(self, number)


class Loss(NamedTuple):
    """The loss of one micro-batch; read it after the window has ended."""

    among: Losses
    number: int

    def asnumpy(self) -> np.ndarray:
        """Return its value."""
        if self.among.values is None:
            raise RuntimeError("For 'Loss', the micro-batch has not been run yet.")
        return self.among.values.asnumpy()[self.number]


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

    def another(self) -> WindowLoss:
        """Return an empty one for the same loss."""
        return WindowLoss(self.summing)

    def clear(self) -> None:
        """Discard the window."""
        self._terms: list[tuple[Any, float, int]] = []
        self._sums = (0.0, 0.0)
        self._bad: list[int] = []
        self.samples = 0

    def add(self, loss: Any, weight: float, samples: int, number: int = 0) -> None:
        """Add a micro-batch with its number. Its loss is read from the device when the window's mean is needed."""
        self._terms.append((loss, weight, number))
        self.samples += samples

    @property
    def bad(self) -> list[int]:
        """list[int], the numbers of the micro-batches whose loss is not finite."""
        self._carry()
        return self._bad

    @property
    def weight(self) -> float:
        """The sum of the weights so far, including those of losses that have not been read."""
        return self._sums[1] + sum(weight for _, weight, _ in self._terms)

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
        """The values that `load` needs to continue from here."""
        return [*self._carry(), self.samples]

    def load(self, state: Sequence[float], bad: Sequence[int] = ()) -> None:
        """Continue from a saved state."""
        total, weights, samples = state
        self._sums, self._terms, self.samples = (total, weights), [], int(samples)
        self._bad = [*bad]
