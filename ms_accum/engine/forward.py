"""The forward and backward pass of a micro-batch: loss x scale (x weight) -> gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, nn, ops

from .. import _check
from ..loss.known_losses import WithLoss, scalar
from ..loss.terms import WeighedTerms
from ..network import tree
from ..network.calls import call
from ..network.state import untracked
from .config import WindowConfig


class Forward(nn.Cell):
    """Computes the loss and the gradients of a micro-batch. Scaling the loss scales the gradients at no cost.

    Args:
        network (Cell): returns the loss.
        config (WindowConfig): has the optimizer, whose parameters are differentiated, and the loss scale.
        sens (float): another constant scale.
    """

    def __init__(self, network: nn.Cell, config: WindowConfig, sens: float):
        super().__init__(auto_prefix=False)
        self.owner = config.owner
        self.network = network
        self.has_loss_fn = isinstance(network, WithLoss)
        self.has_terms = isinstance(network, WeighedTerms)
        """bool, whether the loss that is returned is a vector of the loss and its terms."""
        self.sens = sens * config.scale.constant
        self.changing = untracked(config.scale.value)
        self.parameters = config.parameters
        self.frozen = _frozen(self.parameters)
        self.differentiate = ms.value_and_grad(self.forward, None, config.optimizer.parameters, has_aux=True)

    def forward(self, scale: Any, *inputs: Any) -> Any:
        loss = call(self.network, inputs)
        if self.has_terms:
            return loss[0] * scale, loss[1]
        loss = scalar(self.owner, loss, self.has_loss_fn)
        return loss * scale, loss

    def construct(self, *inputs: Any, weight: Any = None) -> Any:
        scale = self.sens * self.changing[0] if self.changing else self.sens
        if weight is not None:
            scale = scale * weight
        (_, loss), grads = call(self.differentiate, (scale, *inputs))
        grads = tree.check_shapes(self.owner, "the gradients", grads, self.parameters)
        return loss, tree.zero_where(self.frozen(), grads)  # a graph differentiates them all the same


def _frozen(parameters: Sequence[Parameter]) -> Any:
    """Return an operator whose result is whether each parameter requires no gradient when a graph is compiled.

    A graph keeps its operators, and a Cell its graphs. An operator that kept the Cell would never be freed.
    """

    def frozen() -> tuple[bool, ...]:
        return tuple(not parameter.requires_grad for parameter in parameters)

    return ops.constexpr(frozen, reuse_result=False)


def check_network(owner: str, network: nn.Cell) -> None:
    """Raise an error for a network that can't be differentiated micro-batch by micro-batch."""
    _check.instance(owner, "network", network, nn.Cell, "a Cell")
    if any(getattr(cell, "couples_rows", False) for _, cell in network.cells_and_names()):
        remedy = "Give it to GradientAccumulation as 'loss_fn'."
        _check.raise_invalid(ValueError, owner, "network", "one whose loss is per micro-batch", "a CoupledLoss", remedy)
