"""A network with its loss function, and the check that a loss is one number."""

from __future__ import annotations

from typing import Any

from mindspore import nn

from .known_losses import runnable


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
