"""MindSpore's own accumulation: windows with `mindspore.boost.GradientAccumulation`."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import networks_ms
from mindspore import boost, nn
from workload import run


class TrainOneStep(nn.Cell):
    """A training Cell with the boost accumulation, as its documentation composes them."""

    def __init__(self, network: nn.Cell, optimizer: Any, window: int):
        super().__init__(auto_prefix=False)
        self.grad_fn = ms.value_and_grad(network, None, optimizer.parameters)
        self.accumulate = boost.GradientAccumulation(window, optimizer)

    def construct(self, data: Any, label: Any) -> Any:
        """Return the loss of a micro-batch."""
        loss, grads = self.grad_fn(data, label)
        return self.accumulate(loss, grads)


def step(network: nn.Cell, window: int) -> nn.Cell:
    """Return the Cell that runs a micro-batch, and updates with the last of a window."""
    with_loss = nn.WithLossCell(network, networks_ms.loss())
    return TrainOneStep(with_loss, networks_ms.momentum(network), window).set_train()


if __name__ == "__main__":
    run(networks_ms.rebuilt_for_each_window(step))
