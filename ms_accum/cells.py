"""What is compiled?

Three Cells, a graph each, and only the first holds a forward: random layers keep their state in the
compiled graph, so a second forward would repeat the first one's masks. They are separate because the
host decides when a window ends; a branch in the first graph would be paid by every micro-batch.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, nn, ops

from . import _check, _tree
from ._state import agreed
from .boundary import Boundary
from .parallel import AUTO, begin_with, group_of, take_from_rank_0
from .reduction import Summing, summing

_SPARSE = "Outside a graph MindSpore gives sparse ones without their rows: take graph mode, or nn.Embedding."


class LossAndGradients(nn.Cell):
    """Loss and gradients of a network, the gradients scaled where it is free: at the loss."""

    def __init__(self, owner: str, network: nn.Cell, optimizer: Any, sens: float):
        super().__init__(auto_prefix=False)
        _check.optimizer(owner, optimizer)
        self.owner = owner
        self.network = _check.instance(owner, "network", network, nn.Cell, "a Cell")
        _check.trains(owner, optimizer, network)
        self.sens = _check.positive_number(owner, "sens", sens)
        self.parameters = tuple(optimizer.parameters)
        self.differentiate = ms.value_and_grad(self.forward, None, optimizer.parameters, has_aux=True)

    def forward(self, scale: Any, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        if isinstance(loss, (tuple, list, dict)):
            raise TypeError(
                f"For '{self.owner}', the network must return its loss alone, but got several values. "
                "Give the driver a 'loss_fn', or wrap the network in a Cell that returns the loss."
            )
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
        grads = _tree.dense(grads, self.parameters)
        grads = _check.same_layout(self.owner, "the gradients", grads, self.parameters, _SPARSE)
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
        group (Union[str, None, Group]): see :class:`TrainOptim`. Default: ``"auto"``.
        sync_every_micro_batch (bool): whether each micro-batch's gradients are summed over the ranks before they are
            added; then `TrainOptim` is told the same. With a `ZeroOptimizer` on several ranks the accumulators are
            those of this rank's parts, ``optimizer.inner.parameters``. Default: ``False``, a window's are.

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
        group: Any = AUTO,
        sync_every_micro_batch: bool = False,
    ):
        super().__init__(auto_prefix=False)
        owner = "TrainForwardBackward"
        self.loss_and_gradients = LossAndGradients(owner, network, optimizer, sens)
        how = summing(owner, optimizer, group, sync_every_micro_batch)
        self.sums = how.of_micro_batch
        begin_with(network, optimizer.parameters, group_of(owner, group))
        _check_accumulators(owner, grad_sum, optimizer, how, weight_sum, sync_every_micro_batch)
        self.grad_sum = tuple(grad_sum)
        self.weight_sum = hidden(weight_sum)

    def construct(self, *inputs: Any, weight: Any = None) -> Any:
        _check.not_traced("TrainForwardBackward")
        scale = 1.0
        if weight is not None and not self.weight_sum:
            raise ValueError("For 'TrainForwardBackward', 'weight' must come with a 'weight_sum', but got none.")
        if self.weight_sum:
            scale = inputs[0].shape[0] if weight is None else weight
            ops.assign_add(self.weight_sum[0], ops.cast(scale, ms.float32))
        loss, grads = self.loss_and_gradients(scale, *inputs)
        if self.sums is not None:
            grads = self.sums(grads)[0]
        _tree.add(self.grad_sum, grads)
        return loss


class TrainOptim(nn.Cell):
    """End a window: give the optimizer the gradient that `grad_sum` holds, if it is finite.

    It may divide `grad_sum` in place: clear it before the next window.

    Args:
        optimizer (Optimizer): updates the parameters.
        grad_sum (Union[ParameterTuple, tuple[Parameter]]): the accumulators.
        weight_sum (Optional[Parameter]): the sum of the weights, to divide by. Default: ``None``,
            the optimizer sees the sum.
        clip_norm (Optional[float]): bound of the gradient's global norm. Default: ``None``.
        group (Union[str, None, Group]): whose gradients are summed first: ``"auto"``, those of the process group
            this process belongs to, or ``None``, its own only. Default: ``"auto"``.
        sync_every_micro_batch (bool): whether `grad_sum` holds their sums already. Default: ``False``.

    Inputs:
        - **figures** (Tensor, optional) - float32, to be summed over the ranks in the same go.

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
        sync_every_micro_batch: bool = False,
    ):
        super().__init__(auto_prefix=False)
        owner = "TrainOptim"
        how = summing(owner, _check.optimizer(owner, optimizer), group, sync_every_micro_batch)
        _check_accumulators(owner, grad_sum, optimizer, how, weight_sum, sync_every_micro_batch)
        self.grad_sum = tuple(grad_sum)
        self.weight_sum = hidden(weight_sum)
        multiply = _tree.multiply_in_place
        self.boundary = Boundary(owner, optimizer, clip_norm, multiply=multiply, sums=how.at_the_end)
        if how.at_the_end is not None:
            take_from_rank_0(optimizer.parameters)

    def construct(self, figures: Any = None) -> Any:
        _check.not_traced("TrainOptim")
        weight_sum = self.weight_sum[0] if self.weight_sum else None
        updated, norm, summed = self.boundary(self.grad_sum, weight_sum, figures)
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
        self.weight_sum = hidden(weight_sum)

    def construct(self) -> Any:
        return emptied(_tree.clear, self.grad_sum, self.weight_sum)


def emptied(empty: Any, grad_sum: tuple, weight_sum: tuple) -> bool:
    """Empty the accumulators in one of the ways of `_tree`."""
    empty(grad_sum)
    if weight_sum:
        ops.assign(weight_sum[0], Tensor(0.0, ms.float32))
    return True


def _check_accumulators(
    owner: str, grad_sum: Any, optimizer: Any, how: Summing, weight_sum: Any, sync_every_micro_batch: bool
) -> None:
    """Raise unless accumulators are what a Cell needs, and what the other one thinks that they are."""
    of = "optimizer.parameters" if how.like is optimizer.parameters else "optimizer.inner.parameters"
    remedy = f"Make them of '{of}'."
    _check.as_many(owner, "grad_sum", grad_sum, how.like, remedy)
    _check.same_layout(owner, "grad_sum", grad_sum, how.like, remedy)
    given = {"weight_sum": "None" if weight_sum is None else "given", "group": "auto" if how.of_micro_batch else "None"}
    agreed(owner, grad_sum, sync_every_micro_batch=sync_every_micro_batch, **given)


def hidden(weight_sum: ms.Parameter | None) -> tuple:
    """Wrap a Parameter so that a Cell doesn't count it among its own weights."""
    return () if weight_sum is None else (weight_sum,)
