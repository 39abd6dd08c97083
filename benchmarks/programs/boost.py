"""MindSpore's own accumulation: how long does a window take with `mindspore.boost.GradientAccumulation`?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
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


class Boost:
    """One Cell that runs a micro-batch, and updates with the last of a window."""

    versions = networks_ms.VERSIONS
    load = staticmethod(networks_ms.tensors)

    def __init__(self, arguments: argparse.Namespace):
        self._name = arguments.network
        self.parameters = networks_ms.size(networks_ms.make(self._name))

    def set_window(self, window: int) -> None:
        """Build everything anew: the window's size is a constant of the graph."""
        network = networks_ms.make(self._name)
        with_loss = nn.WithLossCell(network, networks_ms.loss())
        self._train_step = TrainOneStep(with_loss, networks_ms.momentum(network), window).set_train()

    def train(self, windows: Sequence[Any]) -> float:
        """Run these windows; the loss is read once for each."""
        shown = 0.0
        for window in windows:
            for micro_batch in window:
                loss = self._train_step(*micro_batch)
            shown = float(loss.asnumpy())
        ms.runtime.synchronize()
        return shown


if __name__ == "__main__":
    run(Boost)
