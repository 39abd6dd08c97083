"""How are the loss and the gradients of a micro-batch computed?"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn

from .. import _check
from ..network import tree
from ..network.optimizers import check_optimizer, check_sparse_rule, check_trains
from .forms import check_gradient, runnable

_SPARSE = "Outside graphs MindSpore returns sparse ones without their rows: use graph mode, or nn.Embedding."


class WithLoss(nn.WithLossCell):
    """A network and its loss function, which may get several columns in addition to the network's output."""

    def __init__(self, network: nn.Cell, loss_fn: Any):
        super().__init__(network, runnable(loss_fn))

    def construct(self, data: Any, *labels: Any) -> Any:
        return self._loss_fn(self._backbone(data), *labels)


def scalar(owner: str, loss: Any, of_loss_fn: bool) -> Any:
    """Return a loss, or raise an error if it is not a scalar. Runs on the host and while a graph is compiled.

    Args:
        owner (str): the name used in error messages.
        loss (Tensor): the loss.
        of_loss_fn (bool): whether a `loss_fn` has returned it, and not a network.
    """
    if loss is None:
        raise TypeError(f"For '{owner}', the loss must be a scalar, but got None. Does the function return it?")
    if isinstance(loss, (tuple, list, dict)) and of_loss_fn:
        raise TypeError(
            f"For '{owner}', 'loss_fn' must return only the loss, a scalar, but got several values. "
            "Leave the others out of what it returns."
        )
    if isinstance(loss, (tuple, list, dict)):
        raise TypeError(
            f"For '{owner}', the network must return only its loss, but got several values. "
            "Give the driver a 'loss_fn', or wrap the network in a Cell that returns the loss."
        )
    if loss.ndim != 0 and of_loss_fn:
        raise ValueError(
            f"For '{owner}', the loss must be a scalar, but got shape {loss.shape}. "
            "Give the loss function reduction='mean' or 'sum'."
        )
    if loss.ndim != 0:
        raise ValueError(
            f"For '{owner}', the loss must be a scalar, but got shape {loss.shape}. "
            "Give the loss function reduction='mean' or 'sum', and the driver a 'loss_fn'."
        )
    return loss


def _check_uncoupled(owner: str, network: nn.Cell) -> None:
    if any(getattr(cell, "couples_rows", False) for _, cell in network.cells_and_names()):
        remedy = "Give it to GradientAccumulation as 'loss_fn'."
        _check.refuse(ValueError, owner, "network", "one whose loss is per micro-batch", "a CoupledLoss", remedy)


class LossAndGradients(nn.Cell):
    """Computes the loss and the gradients of a network. Scaling the loss scales the gradients at no cost.

    Args:
        owner (str): the name used in error messages.
        network (Cell): returns the loss.
        optimizer (Optimizer): contains the parameters.
        sens (float): a constant scale.
        changing (Optional[Parameter]): a scale that may change. Default: ``None``.
    """

    def __init__(self, owner: str, network: nn.Cell, optimizer: Any, sens: float, changing: Any = None):
        super().__init__(auto_prefix=False)
        check_optimizer(owner, optimizer)
        self.owner = owner
        self.network = _check.instance(owner, "network", network, nn.Cell, "a Cell")
        self.has_loss_fn = isinstance(network, WithLoss)
        check_trains(owner, optimizer, network)
        check_sparse_rule(owner, optimizer, [network])
        _check_uncoupled(owner, network)
        check_gradient(owner, network)
        self.sens = _check.positive_number(owner, "sens", sens)
        self.changing = () if changing is None else (changing,)  # in a tuple, so that it is not saved with the model
        self.parameters = tuple(optimizer.parameters)
        self.differentiate = ms.value_and_grad(self.forward, None, optimizer.parameters, has_aux=True)

    def forward(self, scale: Any, *inputs: Any) -> Any:
        loss = self.network(*inputs)
        loss = scalar(self.owner, loss, self.has_loss_fn)
        return loss * scale, loss

    def construct(self, scale: Any, *inputs: Any) -> Any:
        if self.sens != 1.0:  # constant in the graph, which saves a kernel
            scale = scale * self.sens
        if self.changing:
            scale = scale * self.changing[0]
        (_, loss), grads = self.differentiate(scale, *inputs)
        grads = tree.dense(grads, self.parameters)
        grads = tree.check_shapes(self.owner, "the gradients", grads, self.parameters, _SPARSE)
        return loss, grads
