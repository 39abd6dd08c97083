"""How are the micro-batches of a window run?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Callable, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from ._learning_rate import LearningRate
from ._state import loss_scale, new_grad_sum, state, unique_name
from .cells import TrainClear, TrainForwardBackward, TrainOptim
from .driver_cells import TrainEmpty, TrainNothing, TrainTogether, TrainWindowOfOne
from .parallel import Group
from .reduction import summing

# Micro-batches that are run in one call, where they wait for each other in no more memory than this.
TOGETHER = 8
_LIMIT = 64 * 2**20


class Losses:
    """The losses of some micro-batches, of which there are none before they have been run."""

    values: Tensor | None = None

    def of(self, number: int) -> Loss:
        """Return that of one of them."""
        return Loss(self, number)


class Loss(NamedTuple):
    """One of them; read it once the window has ended."""

    among: Losses
    number: int

    def asnumpy(self) -> np.ndarray:
        """Return its value."""
        if self.among.values is None:
            raise RuntimeError("For 'Loss', the micro-batch has not been run yet.")
        return self.among.values.asnumpy()[self.number]


class Waiting:
    """Micro-batches of one shape, as many as can be run together. A copy: loaders use their buffers again."""

    def __init__(self) -> None:
        self.count = 0
        """int, how many there are."""
        self._layout: list[tuple] = []
        self._rooms: list[np.ndarray] = []

    def takes(self, columns: tuple) -> bool:
        """Return whether they are like those that are there."""
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
        """Return each column as one Tensor, with room for as many as can be run together; nothing reads the rest."""
        return [Tensor.from_numpy(room) for room in self._rooms]


def _layout(columns: tuple) -> list[tuple]:
    return [(column.shape, column.dtype) for column in columns]


class Accumulating:
    """The Cells and the accumulators they share.

    In graph mode on CPU micro-batches of one shape wait for each other, to be run in one call, at the latest when the
    window ends. Those that are summed over the ranks one by one do not: what waits on one rank need not on another.
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: Any,
        reduction: str,
        clip_norm: float | None,
        *,
        group: Group | None = None,
        sync_every_micro_batch: bool = False,
        wait: bool = True,
    ):
        name = unique_name("gradient_accumulation")
        how = summing("GradientAccumulation", optimizer, group, sync_every_micro_batch)
        grad_sum = new_grad_sum(name, how.like)
        weight_sum = state(f"{name}.weight_sum", 0.0, ms.float32) if reduction == "mean" else None
        sens = loss_scale(optimizer)
        where: dict[str, Any] = {"group": group, "sync_every_micro_batch": sync_every_micro_batch}
        self._forward_backward = TrainForwardBackward(
            network, optimizer, grad_sum, sens, weight_sum=weight_sum, **where
        )
        in_step = how.of_micro_batch is not None
        self._wait = wait and not in_step
        self._nothing = TrainNothing(self._forward_backward, optimizer.parameters) if in_step else None
        self._learning_rate = LearningRate(optimizer)
        self._accumulators = {f"window.grad_sum.{p.name}": total for p, total in zip(optimizer.parameters, grad_sum)}
        if weight_sum is not None:
            self._accumulators["window.weight_sum"] = weight_sum
        self._optim = TrainOptim(optimizer, grad_sum, weight_sum=weight_sum, clip_norm=clip_norm, **where)
        self._empty = TrainEmpty(grad_sum, weight_sum)
        self._clear = TrainClear(grad_sum, weight_sum=weight_sum)
        self._together = TrainTogether(self._forward_backward, TOGETHER)
        self._waiting = Waiting()
        self._losses = Losses()

    def add(self, micro_batch: tuple, weight: Tensor | None) -> Any:
        """Take a micro-batch in, and return its loss, to be read when the window has ended."""
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
        """Leave a micro-batch out that counts for nothing."""
        if self._nothing is not None:
            self._nothing()

    def _run(self) -> None:
        """Run what waits, if anything does."""
        waiting, self._waiting = self._waiting, Waiting()
        losses, self._losses = self._losses, Losses()
        if waiting.count:
            losses.values = self._together(Tensor(waiting.count, ms.int32), *waiting.stacked())

    @property
    def accumulators(self) -> dict[str, ms.Parameter]:
        """What holds the window, by names that are the same in every process."""
        self._run()
        return self._accumulators

    def clear(self) -> None:
        """Forget the window."""
        self._waiting, self._losses = Waiting(), Losses()
        self._clear()

    def end(self, figures: Callable[[], Sequence[float]] | None = None) -> tuple:
        """Empty the window; return the learning rate used, whether the optimizer was called, and the norm.

        Args:
            figures (Optional[Callable]): returns what is to be summed over the ranks, and returned too. The
                micro-batches have been run when it is asked. Default: ``None``.
        """
        self._run()
        lr = self._learning_rate()
        updated, norm, *summed = self._optim() if figures is None else self._optim(Tensor(figures(), ms.float32))
        # The norm was finite, so every element is.
        (self._empty if updated.asnumpy() else self._clear)()
        return (lr, updated, norm, *summed)


def _may_wait(columns: tuple) -> bool:
    """Return whether to run them with others: calling a graph costs a CPU much, and they have to be copied."""
    graphs_on_cpu = ms.get_context("device_target") == "CPU" and ms.get_context("mode") == ms.GRAPH_MODE
    stackable = all(column.dtype != ms.bfloat16 for column in columns)  # there is no bfloat16 in NumPy
    return graphs_on_cpu and stackable and TOGETHER * sum(column.nbytes for column in columns) <= _LIMIT


class Immediate:
    """The same for windows of 1, where there is nothing to accumulate."""

    accumulators: dict[str, ms.Parameter] = {}
    _ended: tuple | None = None

    def __init__(self, network: nn.Cell, optimizer: Any, clip_norm: float | None):
        self._cell = TrainWindowOfOne(network, optimizer, clip_norm=clip_norm)
        self._learning_rate = LearningRate(optimizer)

    def add(self, micro_batch: tuple, weight: Tensor | None) -> Tensor:
        """Run a micro-batch and update with it; a weight would cancel out."""
        del weight
        lr = self._learning_rate()
        loss, updated, norm = self._cell(*micro_batch)
        self._ended = (lr, updated, norm)
        return loss

    def pass_over(self) -> None:
        """Leave a micro-batch out that counts for nothing."""

    def end(self, figures: Any = None) -> tuple:
        """Do what `Accumulating.end` does; if no micro-batch counted there is no update and no norm."""
        del figures
        ended, self._ended = self._ended, None
        return ended or (self._learning_rate(), Tensor(False), Tensor(math.nan, ms.float32))

    def clear(self) -> None:
        """Forget the window."""
        self._ended = None
