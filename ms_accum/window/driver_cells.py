"""What is compiled only for the driver?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ..loss.gradients import LossAndGradients
from ..network import tree
from ..network.accumulators import emptied, loss_scale
from ..network.parameters import has_half
from ..numerics.collaborators import NONE, Numerics
from ..ranks.group import Group
from .boundary import Boundary


def weighs_loss(network: nn.Cell, group: Group | None) -> bool:
    """Return whether the driver's weights multiply the loss, which costs nothing, in a unit near a window's first one.

    Else they multiply the gradients in float32 when these are added: in float16 a loss times another weight of the
    window may overflow or underflow, and several ranks would have to agree on the unit of each window.
    """
    return group is None and not has_half(network)


class TrainEmpty(nn.Cell):
    """Set the accumulators to zero in place. This works for finite values only; `TrainClear` works for all.

    It is a separate graph, because MindSpore copies Parameters that a graph reads and changes later.

    Args:
        forward_backward (TrainForwardBackward): the Cell with the accumulators.
    """

    def __init__(self, forward_backward: nn.Cell):
        super().__init__(auto_prefix=False)
        self.grad_sum, self.weight_sum = forward_backward.grad_sum, forward_backward.weight_sum
        self.skips = forward_backward.skips

    def construct(self) -> Any:
        return emptied(tree.clear_finite, self.grad_sum, self.weight_sum, self.skips)


class TrainWhole(nn.Cell):
    """End a window whose weights add up to 1, without a division. For a single process.

    Args:
        optim (TrainOptim): the Cell that ends other windows.
    """

    def __init__(self, optim: nn.Cell):
        super().__init__(auto_prefix=False)
        self.grad_sum, self.boundary = optim.grad_sum, optim.boundary

    def construct(self) -> Any:
        return self.boundary(self.grad_sum)[:2]


class TrainNothing(nn.Cell):
    """Add zeros to the sum over the ranks if this rank's micro-batch has weight 0: the other ranks wait for the sum.

    Args:
        forward_backward (TrainForwardBackward): the Cell with the accumulators.
        parameters (Sequence[Parameter]): Parameters with the gradients' shapes.
    """

    def __init__(self, forward_backward: nn.Cell, parameters: Sequence[Any]):
        super().__init__(auto_prefix=False)
        self.grad_sum, self.sums = forward_backward.grad_sum, forward_backward.sums
        self.shapes = [parameter.shape for parameter in parameters]

    def construct(self) -> bool:
        nothing = tuple([ops.zeros(shape, ms.float32) for shape in self.shapes])
        tree.add(self.grad_sum, self.sums(nothing)[0])
        return True


class TrainTogether(nn.Cell):
    """Run several micro-batches one after the other in one call, because a call costs as much as a small network.

    Args:
        forward_backward (TrainForwardBackward): the Cell that runs one micro-batch.
        most (int): the maximum number of micro-batches. Smaller numbers need no new compilation.

    Inputs:
        - **count** (Tensor) - the number of micro-batches.
        - **\\*columns** (tuple[Tensor]) - their columns, stacked; weights, if there are any, are the last column.

    Outputs:
        Tensor, their losses, padded with zeros to `most`.
    """

    def __init__(self, forward_backward: nn.Cell, most: int):
        super().__init__(auto_prefix=False)
        self.forward_backward = forward_backward
        self.places = Tensor(np.eye(most), ms.bool_)
        network = forward_backward.loss_and_gradients.network
        held = (*forward_backward.grad_sum, *forward_backward.weight_sum, *forward_backward.loss_and_gradients.changing)
        self.touched = (*network.get_parameters(), *held)
        if forward_backward.skips is not None:
            self.touched = (*self.touched, *forward_backward.skips.changed)

    def construct(self, count: Any, *columns: Any) -> Any:
        done = Tensor(0, ms.int32)
        count = ops.depend(count, self.touched)  # as in `Boundary.touch`: a loop behaves like a branch
        losses = ops.zeros(self.places.shape[:1], ms.float32)
        while done < count:
            row = [column[done] for column in columns]
            if self.forward_backward.weight_sum:
                loss = self.forward_backward(*row[:-1], weight=row[-1])
            else:
                loss = self.forward_backward(*row)
            losses = ops.where(self.places[done], ops.cast(loss, ms.float32), losses)  # in a product inf * 0 is NaN
            done = done + 1
        return losses


class TrainWindowOfOne(nn.Cell):
    """Run one micro-batch and update with it: a window of 1, without accumulators.

    Args, Inputs and Outputs as for `TrainForwardBackward` and `TrainOptim`, without a weight, which would cancel out.
    """

    def __init__(self, network: nn.Cell, optimizer: Any, *, clip_norm: float | None = None, numerics: Numerics = NONE):
        super().__init__(auto_prefix=False)
        owner, sens = "GradientAccumulation", loss_scale(optimizer) * numerics.scale
        self.loss_and_gradients = LossAndGradients(owner, network, optimizer, sens, numerics.changing)
        self.boundary = Boundary(owner, optimizer, clip_norm, numerics=numerics._replace(skips=None))
        self.scaled = numerics.dynamic is not None

    def construct(self, *inputs: Any) -> Any:
        loss, grads = self.loss_and_gradients(1.0, *inputs)
        figures = ops.reshape(ops.cast(loss, ms.float32), (1,)) if self.scaled else None
        updated, norm = self.boundary(grads, None, figures)[:2]
        return loss, updated, norm


class TrainZeros(nn.Cell):
    """Update with a gradient of 0, the sum of no rows, as windows of several micro-batches do.

    Args:
        one (TrainWindowOfOne): the Cell that ends windows of 1.
    """

    def __init__(self, one: TrainWindowOfOne):
        super().__init__(auto_prefix=False)
        self.boundary, self.scaled = one.boundary, one.scaled
        self.shapes = [parameter.shape for parameter in one.boundary.parameters]

    def construct(self) -> Any:
        zeros = tuple([ops.zeros(shape, ms.float32) for shape in self.shapes])
        return self.boundary(zeros, None, ops.zeros((1,), ms.float32) if self.scaled else None)[:2]
