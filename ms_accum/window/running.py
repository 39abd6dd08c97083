"""How are the micro-batches of a window run?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ..loss.window_loss import Losses
from ..network.optimizers import LearningRate
from ..numerics.collaborators import NONE, Numerics
from .driver_cells import TrainEmpty, TrainNothing, TrainTogether, TrainWhole, TrainWindowOfOne, TrainZeros

# Up to this number of micro-batches are collected and run in one call, if they need no more than this number of bytes.
TOGETHER = 8
_LIMIT = 64 * 2**20


class Waiting:
    """Collected micro-batches of one shape, to be run in one call; copies, because loaders reuse their buffers."""

    def __init__(self) -> None:
        self.count = 0
        """int, the number of micro-batches."""
        self._layout: list[tuple] = []
        self._rooms: list[np.ndarray] = []

    def takes(self, columns: tuple) -> bool:
        """Return whether these columns have the shapes and types of the collected ones."""
        return not self.count or _layout(columns) == self._layout

    def take(self, columns: tuple) -> None:
        """Add a micro-batch."""
        arrays = [column.asnumpy() for column in columns]
        if not self.count:
            self._layout = _layout(columns)
            self._rooms = [np.empty((TOGETHER, *array.shape), array.dtype) for array in arrays]
        for room, array in zip(self._rooms, arrays):
            room[self.count] = array
        self.count += 1

    def stacked(self) -> list[Tensor]:
        """Return each column as a Tensor for the maximum number of micro-batches; unused entries are not read."""
        return [Tensor.from_numpy(room) for room in self._rooms]


def _layout(columns: tuple) -> list[tuple]:
    return [(column.shape, column.dtype) for column in columns]


class Accumulating:
    """The Cells of a window, and the accumulators that they share.

    In graph mode on CPU, micro-batches of one shape are collected and run in one call, at the latest when the window
    ends; but not if each is summed over the ranks, because other ranks may not be able to collect the same ones.

    Args:
        forward_backward (TrainForwardBackward): the Cell with the accumulators.
        optim (TrainOptim), clear (TrainClear): the Cells that share them.
        optimizer (Optimizer): updates the parameters.
        wait (bool): whether micro-batches may be collected. Default: ``True``.
    """

    def __init__(self, forward_backward: nn.Cell, optim: nn.Cell, clear: nn.Cell, optimizer: Any, *, wait: bool = True):
        self._forward_backward, self._optim, self._clear = forward_backward, optim, clear
        in_step = forward_backward.sums is not None
        self._wait = wait and not in_step
        self._nothing = TrainNothing(forward_backward, optimizer.parameters) if in_step else None
        self._learning_rate = LearningRate(optimizer)
        sums = zip(optimizer.parameters, forward_backward.grad_sum)
        self._accumulators = {f"window.grad_sum.{parameter.name}": total for parameter, total in sums}
        if forward_backward.weight_sum:
            self._accumulators["window.weight_sum"] = forward_backward.weight_sum[0]
        if forward_backward.skips is not None:
            self._accumulators["window.counts"] = forward_backward.skips.counts
        self._whole, self._empty = TrainWhole(optim), TrainEmpty(forward_backward)
        self._together = TrainTogether(forward_backward, TOGETHER)
        self._waiting = Waiting()
        self._losses = Losses()

    def add(self, micro_batch: tuple, weight: Tensor | None) -> Any:
        """Add a micro-batch and return its loss, to be read after the window has ended."""
        columns = micro_batch if weight is None else (*micro_batch, weight)
        if not self._waiting.takes(columns):
            self._run()
        if not (self._wait and _may_wait(columns)):
            return self._forward_backward(*micro_batch, weight=weight)
        loss = self._losses.of(self._waiting.count)
        self._waiting.take(columns)
        if self._waiting.count == TOGETHER:
            self._run()
        return loss

    def pass_over(self) -> None:
        """Skip a micro-batch of weight 0."""
        if self._nothing is not None:
            self._nothing()
        if self._forward_backward.skips is not None:
            self._forward_backward.skips.pass_over()

    def run_waiting(self) -> None:
        """Run the collected micro-batches, before anything outside the window changes the weights."""
        self._run()

    def _run(self) -> None:
        """Run the collected micro-batches, if there are any."""
        waiting, self._waiting = self._waiting, Waiting()
        losses, self._losses = self._losses, Losses()
        if waiting.count:
            losses.values = self._together(Tensor(waiting.count, ms.int32), *waiting.stacked())

    @property
    def accumulators(self) -> dict[str, ms.Parameter]:
        """The accumulators, by names that are the same in every process."""
        self._run()
        return self._accumulators

    def clear(self) -> None:
        """Discard the window."""
        self._waiting, self._losses = Waiting(), Losses()
        self._clear()

    def end(self, figures: Callable[[], Sequence[float]] | None = None, weights: float | None = None) -> tuple:
        """Update and clear; return the learning rate used, whether the optimizer was called, and the norm.

        Args:
            figures (Optional[Callable]): returns numbers to sum over the ranks; their sums are also returned. It is
                called after the micro-batches have been run. Default: ``None``.
            weights (Optional[float]): the exact sum of the weights, if it is available. Default: ``None``.
        """
        self._run()
        lr = self._learning_rate()
        updated, norm, *summed = self._update(weights) if figures is None else self._optim(_tensor(figures()))
        # After an update the norm was finite, so every element is finite.
        (self._empty if updated.asnumpy() else self._clear)()
        return (lr, updated, norm, *summed)

    def _update(self, weights: float | None) -> tuple:
        if weights == 1:
            return self._whole()
        if weights is not None:  # the graph has only the sum of the rounded weights
            ops.assign(self._forward_backward.weight_sum[0], _tensor(weights))
        return self._optim()


def _tensor(values: Any) -> Tensor:
    return Tensor(values, ms.float32)


def _may_wait(columns: tuple) -> bool:
    """Return whether to collect a micro-batch: it saves graph calls, which are slow on CPU, but needs a copy."""
    graphs_on_cpu = ms.get_context("device_target") == "CPU" and ms.get_context("mode") == ms.GRAPH_MODE
    stackable = all(column.dtype != ms.bfloat16 for column in columns)  # NumPy has no bfloat16
    return graphs_on_cpu and stackable and TOGETHER * sum(column.nbytes for column in columns) <= _LIMIT


class Immediate:
    """Replaces `Accumulating` for windows of 1, without accumulators."""

    accumulators: dict[str, ms.Parameter] = {}
    _ended: tuple | None = None

    def __init__(
        self,
        network: nn.Cell,
        optimizer: Any,
        clip_norm: float | None,
        numerics: Numerics = NONE,
        *,
        reduction: str = "mean",
    ):
        self._cell = TrainWindowOfOne(network, optimizer, clip_norm=clip_norm, numerics=numerics)
        self._zeros = TrainZeros(self._cell) if reduction == "sum" else None
        self._learning_rate = LearningRate(optimizer)

    def add(self, micro_batch: tuple, weight: Tensor | None) -> Tensor:
        """Run a micro-batch and update with it; a weight would cancel out."""
        del weight
        lr = self._learning_rate()
        loss, updated, norm = self._cell(*micro_batch)
        self._ended = (lr, updated, norm)
        return loss

    def pass_over(self) -> None:
        """Skip a micro-batch of weight 0. The mean over no rows does not exist; their sum is 0, and updates."""
        if self._zeros is not None:
            self._ended = (self._learning_rate(), *self._zeros())

    def run_waiting(self) -> None:
        """Do nothing: no micro-batch waits."""

    def end(self, figures: Any = None, weights: Any = None) -> tuple:
        """Do what `Accumulating.end` does; if the micro-batch had weight 0, a mean has no update and no norm."""
        del figures, weights
        ended, self._ended = self._ended, None
        return ended or (self._learning_rate(), Tensor(False), Tensor(math.nan, ms.float32))

    def clear(self) -> None:
        """Discard the window."""
        self._ended = None
