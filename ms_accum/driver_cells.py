"""What is compiled for the driver alone?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from . import _tree
from ._state import loss_scale
from .boundary import Boundary
from .cells import LossAndGradients, TrainForwardBackward, emptied, hidden


class WithLoss(nn.WithLossCell):
    """A network and its loss, which may take several columns beside the network's output."""

    def construct(self, data: Any, *labels: Any) -> Any:
        return self._loss_fn(self._backbone(data), *labels)


class TrainEmpty(nn.Cell):
    """Do what `TrainClear` does, in place, as far as the accumulators are finite.

    A graph of its own: where one graph reads Parameters and changes them later, MindSpore copies them first.
    """

    def __init__(self, grad_sum: tuple, weight_sum: ms.Parameter | None):
        super().__init__(auto_prefix=False)
        self.grad_sum = grad_sum
        self.weight_sum = hidden(weight_sum)

    def construct(self) -> Any:
        return emptied(_tree.cancel, self.grad_sum, self.weight_sum)


class TrainNothing(nn.Cell):
    """Take part in the sums of a micro-batch that counts for nothing here: the other ranks wait.

    Args:
        forward_backward (TrainForwardBackward): would run it.
        parameters (Sequence[Parameter]): have the gradients' shapes.
    """

    def __init__(self, forward_backward: TrainForwardBackward, parameters: Sequence[Any]):
        super().__init__(auto_prefix=False)
        self.grad_sum, self.sums = forward_backward.grad_sum, forward_backward.sums
        self.shapes = [parameter.shape for parameter in parameters]

    def construct(self) -> bool:
        nothing = tuple([ops.zeros(shape, ms.float32) for shape in self.shapes])
        _tree.add(self.grad_sum, self.sums(nothing)[0])
        return True


class TrainTogether(nn.Cell):
    """Run several micro-batches, one after the other, in one call: a call costs as much as a small network.

    Args:
        forward_backward (TrainForwardBackward): runs one of them.
        most (int): how many there can be. Fewer compile nothing anew.

    Inputs:
        - **count** (Tensor) - how many there are.
        - **\\*columns** (tuple[Tensor]) - those of the micro-batches, stacked; with weights, these are the last.

    Outputs:
        Tensor, their losses, and zeros up to `most`.
    """

    def __init__(self, forward_backward: TrainForwardBackward, most: int):
        super().__init__(auto_prefix=False)
        self.forward_backward = forward_backward
        self.places = Tensor(np.eye(most), ms.bool_)
        network = forward_backward.loss_and_gradients.network
        self.touched = (*network.get_parameters(), *forward_backward.grad_sum, *forward_backward.weight_sum)

    def construct(self, count: Any, *columns: Any) -> Any:
        done = Tensor(0, ms.int32)
        count = ops.depend(count, self.touched)  # as in `Boundary.touch`: a loop is a branch
        losses = ops.zeros(self.places.shape[:1], ms.float32)
        while done < count:
            row = [column[done] for column in columns]
            if self.forward_backward.weight_sum:
                loss = self.forward_backward(*row[:-1], weight=row[-1])
            else:
                loss = self.forward_backward(*row)
            losses = ops.where(self.places[done], ops.cast(loss, ms.float32), losses)  # a sum of products makes inf NaN
            done = done + 1
        return losses


class TrainWindowOfOne(nn.Cell):
    """Run one micro-batch and update with it: a window of 1, which needs no accumulators.

    Args, Inputs and Outputs are those of `TrainForwardBackward` and `TrainOptim`; a weight would cancel out.
    """

    def __init__(self, network: nn.Cell, optimizer: Any, *, clip_norm: float | None = None):
        super().__init__(auto_prefix=False)
        self.loss_and_gradients = LossAndGradients("GradientAccumulation", network, optimizer, loss_scale(optimizer))
        self.boundary = Boundary("GradientAccumulation", optimizer, clip_norm)

    def construct(self, *inputs: Any) -> Any:
        loss, grads = self.loss_and_gradients(1.0, *inputs)
        updated, norm = self.boundary(grads)[:2]
        return loss, updated, norm
