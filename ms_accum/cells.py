"""What is compiled?

Three Cells, a graph each, and only the first holds a forward: random layers keep their state in the
compiled graph, so a second forward would repeat the first one's masks. They are separate because the
host decides when a window ends; a branch in the first graph would be paid by every micro-batch.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from . import _check, _tree
from ._state import loss_scale
from .accumulator import Boundary
from .parallel import AUTO, reduction_of


class _LossAndGradients(nn.Cell):
    """Loss and gradients of a network, the gradients scaled where it is free: at the loss."""

    def __init__(self, owner: str, network: nn.Cell, optimizer: Any, sens: float):
        super().__init__(auto_prefix=False)
        _check.optimizer(owner, optimizer)
        self.owner = owner
        self.network = _check.instance(owner, "network", network, nn.Cell, "a Cell")
        self.sens = _check.positive_number(owner, "sens", sens)
        self.differentiate = ms.value_and_grad(self.forward, None, optimizer.parameters, has_aux=True)

    def forward(self, scale: Any, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        if loss.ndim != 0:
            raise ValueError(
                f"For '{self.owner}', the loss must be a scalar, but got shape {loss.shape}. "
                "Give the loss function reduction='mean' or 'sum'."
            )
        return loss * scale, loss

    def construct(self, scale: Any, *inputs: Any) -> Any:
        if self.sens != 1.0:  # known when it is compiled: a kernel less
            scale = scale * self.sens
        (_, loss), grads = self.differentiate(scale, *inputs)
        return loss, grads


class TrainForwardBackward(nn.Cell):
    """Run one micro-batch and add its gradients into `grad_sum`.

    Args:
        network (Cell): from a micro-batch's columns to its loss, a scalar.
        optimizer (Optimizer): the gradients are those of ``optimizer.parameters``, in that order.
        grad_sum (Union[ParameterTuple, tuple[Parameter]]): the accumulators, one for each parameter.
        sens (float): the scale of the loss, which an optimizer's `loss_scale` takes out. Default: 1.0.
        weight_sum (Optional[Parameter]): float32 scalar that sums the weights; with it gradients are
            weighted, for the exact mean. Default: ``None``, gradients add up as they are.

    Inputs:
        - **\\*inputs** (tuple[Tensor]) - the columns of a micro-batch.
        - **weight** (Union[Tensor, float], optional) - with `weight_sum`, what the micro-batch counts
          for. Default: ``None``, the rows of the first column.

    Outputs:
        Tensor, the loss of the micro-batch as the network returns it.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `grad_sum` does not fit the optimizer's parameters, or the loss is no scalar.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import numpy as np
        >>> import mindspore as ms
        >>> from mindspore import Tensor, nn
        >>> from ms_accum import TrainClear, TrainForwardBackward, TrainOptim
        >>> net = nn.Dense(4, 2)
        >>> optimizer = nn.SGD(net.trainable_params(), 0.1)
        >>> grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
        >>> forward_backward = TrainForwardBackward(nn.WithLossCell(net, nn.MSELoss()), optimizer, grad_sum)
        >>> update, clear = TrainOptim(optimizer, grad_sum), TrainClear(grad_sum)
        >>> for _ in range(2):
        ...     loss = forward_backward(Tensor(np.ones((8, 4)), ms.float32), Tensor(np.ones((8, 2)), ms.float32))
        >>> updated, grad_norm = update()
        >>> print(updated, clear())
        True True
    """

    def __init__(
        self,
        network: nn.Cell,
        optimizer: Any,
        grad_sum: Any,
        sens: float = 1.0,
        *,
        weight_sum: ms.Parameter | None = None,
    ):
        super().__init__(auto_prefix=False)
        self.loss_and_gradients = _LossAndGradients("TrainForwardBackward", network, optimizer, sens)
        _check.same_layout("TrainForwardBackward", "grad_sum", grad_sum, optimizer.parameters)
        self.grad_sum = tuple(grad_sum)
        self.weight_sum = _hidden(weight_sum)

    def construct(self, *inputs: Any, weight: Any = None) -> Any:
        scale = 1.0
        if self.weight_sum:
            scale = inputs[0].shape[0] if weight is None else weight
            ops.assign_add(self.weight_sum[0], ops.cast(scale, ms.float32))
        loss, grads = self.loss_and_gradients(scale, *inputs)
        _tree.add(self.grad_sum, grads)
        return loss


class TrainOptim(nn.Cell):
    """End a window: give the optimizer the gradient that `grad_sum` holds, if it is finite.

    Args:
        optimizer (Optimizer): updates the parameters.
        grad_sum (Union[ParameterTuple, tuple[Parameter]]): the accumulators.
        weight_sum (Optional[Parameter]): the sum of the weights, to divide by. Default: ``None``,
            the optimizer sees the sum.
        clip_norm (Optional[float]): bound of the gradient's global norm. Default: ``None``.
        group (Union[str, None, Group]): whose gradients are summed first: ``"auto"``, those of the process group
            this process belongs to, or ``None``, its own only. Default: ``"auto"``.

    Inputs:
        - **figures** (Tensor, optional) - float32, to be summed over the ranks in the same go.
        - **unit** (Tensor, optional) - with `weight_sum`, what this rank's weights are in units of.

    Outputs:
        tuple[Tensor], whether the parameters were updated, and the norm before clipping; and the figures' sum if
        there are figures.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If `grad_sum` does not fit the optimizer's parameters, or `clip_norm` is not above 0.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        See :class:`TrainForwardBackward`.
    """

    def __init__(
        self,
        optimizer: Any,
        grad_sum: Any,
        *,
        weight_sum: ms.Parameter | None = None,
        clip_norm: float | None = None,
        group: Any = AUTO,
    ):
        super().__init__(auto_prefix=False)
        reduction = reduction_of("TrainOptim", group, _check.optimizer("TrainOptim", optimizer).parameters)
        multiply = _tree.multiply_in_place
        self.boundary = Boundary("TrainOptim", optimizer, clip_norm, multiply=multiply, reduction=reduction)
        _check.same_layout("TrainOptim", "grad_sum", grad_sum, optimizer.parameters)
        self.grad_sum = tuple(grad_sum)
        self.weight_sum = _hidden(weight_sum)

    def construct(self, figures: Any = None, unit: Any = None) -> Any:
        weight_sum = self.weight_sum[0] if self.weight_sum else None
        updated, norm, summed = self.boundary(self.grad_sum, weight_sum, figures, unit)
        return (updated, norm) if figures is None else (updated, norm, summed)


class TrainClear(nn.Cell):
    """Empty the accumulators.

    Args:
        grad_sum (Union[ParameterTuple, tuple[Parameter]]): the accumulators.
        zeros (Any): accepted from programs written for the tutorial, not needed. Default: ``None``.
        weight_sum (Optional[Parameter]): the sum of the weights. Default: ``None``.

    Outputs:
        bool, True.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        See :class:`TrainForwardBackward`.
    """

    def __init__(self, grad_sum: Any, zeros: Any = None, *, weight_sum: ms.Parameter | None = None):
        super().__init__(auto_prefix=False)
        del zeros
        self.grad_sum = tuple(grad_sum)
        self.weight_sum = _hidden(weight_sum)

    def construct(self) -> Any:
        return _emptied(_tree.clear, self.grad_sum, self.weight_sum)


class _TrainEmpty(nn.Cell):
    """Do what `TrainClear` does, in place, as far as the accumulators are finite.

    A graph of its own: where one graph reads Parameters and changes them later, MindSpore copies them first.
    """

    def __init__(self, grad_sum: tuple, weight_sum: ms.Parameter | None):
        super().__init__(auto_prefix=False)
        self.grad_sum = grad_sum
        self.weight_sum = _hidden(weight_sum)

    def construct(self) -> Any:
        return _emptied(_tree.cancel, self.grad_sum, self.weight_sum)


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
        self.places = Tensor(np.eye(most), ms.float32)
        network = forward_backward.loss_and_gradients.network
        self.touched = (*network.get_parameters(), *forward_backward.grad_sum, *forward_backward.weight_sum)

    def construct(self, count: Any, *columns: Any) -> Any:
        done = Tensor(0, ms.int32)
        count = ops.depend(count, self.touched)  # as in `Boundary.touch`: a loop is a branch
        losses = ops.zeros_like(self.places[0])
        while done < count:
            row = [column[done] for column in columns]
            if self.forward_backward.weight_sum:
                loss = self.forward_backward(*row[:-1], weight=row[-1])
            else:
                loss = self.forward_backward(*row)
            losses = losses + self.places[done] * ops.cast(loss, ms.float32)
            done = done + 1
        return losses


class TrainWindowOfOne(nn.Cell):
    """Run one micro-batch and update with it: a window of 1, which needs no accumulators.

    Args, Inputs and Outputs are those of `TrainForwardBackward` and `TrainOptim`; a weight would cancel out.
    """

    def __init__(self, network: nn.Cell, optimizer: Any, *, clip_norm: float | None = None):
        super().__init__(auto_prefix=False)
        self.loss_and_gradients = _LossAndGradients("GradientAccumulation", network, optimizer, loss_scale(optimizer))
        self.boundary = Boundary("GradientAccumulation", optimizer, clip_norm)

    def construct(self, *inputs: Any) -> Any:
        loss, grads = self.loss_and_gradients(1.0, *inputs)
        updated, norm, _ = self.boundary(grads)
        return loss, updated, norm


def _emptied(empty: Any, grad_sum: tuple, weight_sum: tuple) -> bool:
    empty(grad_sum)
    if weight_sum:
        ops.assign(weight_sum[0], Tensor(0.0, ms.float32))
    return True


def _hidden(weight_sum: ms.Parameter | None) -> tuple:
    """Wrap a Parameter so that a Cell doesn't count it among its own weights."""
    return () if weight_sum is None else (weight_sum,)
