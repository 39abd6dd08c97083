"""MindSpore's 2.x tutorial: how long does a window take with its `Accumulator`?

Rewritten after the tutorial, with what is slow in it: the boundary is an `if` on a tensor in the compiled function,
`clip_norm` is accepted and ignored, and a second set of zeros is there to clear with.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import networks_ms
from mindspore import Parameter, Tensor, nn, ops
from workload import run


@ms.jit_class
class Accumulator:
    """Add up gradients, and update every `accumulate_step` calls."""

    def __init__(self, optimizer: Any, accumulate_step: int, clip_norm: float = 1.0):
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.inner_grads = optimizer.parameters.clone(prefix="accum_", init="zeros")
        self.zeros = optimizer.parameters.clone(prefix="zeros_", init="zeros")
        self.counter = Parameter(Tensor(1, ms.int32), "counter_")
        self.accumulate_step = accumulate_step
        self.map = ops.HyperMap()

    def __call__(self, grads: Any) -> bool:
        """Add the gradients of a micro-batch."""
        self.map(ops.partial(ops.assign_add), self.inner_grads, grads)
        if self.counter % self.accumulate_step == 0:
            self.optimizer(self.inner_grads)
            self.map(ops.partial(ops.assign), self.inner_grads, self.zeros)
        ops.assign_add(self.counter, Tensor(1, ms.int32))
        return True


class Functional:
    """A compiled train step that calls the accumulator."""

    versions = networks_ms.VERSIONS
    load = staticmethod(networks_ms.tensors)

    def __init__(self, arguments: argparse.Namespace):
        self._name = arguments.network
        self.parameters = networks_ms.size(networks_ms.make(self._name))

    def set_window(self, window: int) -> None:
        """Build everything anew: the window's size is a constant of the graph."""
        network = networks_ms.make(self._name)
        optimizer = networks_ms.momentum(network)
        accumulator = Accumulator(optimizer, window)
        loss_fn = nn.CrossEntropyLoss()

        def forward_fn(data: Any, label: Any) -> Any:
            return loss_fn(network(data), label) / window

        grad_fn = ms.value_and_grad(forward_fn, None, network.trainable_params())

        @ms.jit
        def train_step(data: Any, label: Any) -> Any:
            loss, grads = grad_fn(data, label)
            accumulator(grads)
            return loss

        network.set_train()
        self._train_step = train_step

    def train(self, windows: Sequence[Any]) -> float:
        """Run these windows; the loss is read once for each."""
        shown = 0.0
        for window in windows:
            for data, label in window:
                loss = self._train_step(data, label)
            shown = float(loss.asnumpy()) * len(window)
        ms.runtime.synchronize()
        return shown


if __name__ == "__main__":
    run(Functional)
