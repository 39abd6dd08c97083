"""MindSpore's 2.x tutorial: a class that sums gradients in the compiled step, and updates in a branch of its graph.

Written from what the tutorial's program does, with what is slow in it: the window ends in an `if` on a tensor, and the
sums are cleared with a second set of zeros.
"""

from __future__ import annotations

from typing import Any, Callable

import mindspore as ms
import networks_ms
from mindspore import Parameter, Tensor, nn, ops
from workload import run

_each = ops.HyperMap()


@ms.jit_class
class SumsInGraph:
    """Sums of gradients, which the optimizer gets with every `window`-th call."""

    def __init__(self, optimizer: Any, window: int):
        self.update, self.window = optimizer, window
        self.calls = Parameter(Tensor(0, ms.int32), name="sums.calls")
        self.empty = optimizer.parameters.clone("sums.empty", "zeros")
        self.sums = optimizer.parameters.clone("sums", "zeros")

    def __call__(self, gradients: Any) -> bool:
        """Add the gradients of a micro-batch."""
        _each(ops.partial(ops.assign_add), self.sums, gradients)
        calls = ops.assign_add(self.calls, Tensor(1, ms.int32))
        if calls % self.window == 0:
            self.update(self.sums)
            _each(ops.partial(ops.assign), self.sums, self.empty)
        return True


def step(network: nn.Cell, window: int) -> Callable[..., Any]:
    """Return a compiled step of the workload."""
    return step_of(network, nn.CrossEntropyLoss(), networks_ms.momentum(network), window)


def step_of(network: nn.Cell, loss_of: nn.Cell, optimizer: nn.Optimizer, window: int) -> Callable[..., Any]:
    """Return a compiled step: the loss is divided by the window's size before it is differentiated."""
    sums = SumsInGraph(optimizer, window)

    def part_of_the_mean(inputs: Any, targets: Any) -> Any:
        return loss_of(network(inputs), targets) / window

    differentiated = ms.value_and_grad(part_of_the_mean, None, network.trainable_params())

    @ms.jit
    def accumulate(inputs: Any, targets: Any) -> Any:
        loss, gradients = differentiated(inputs, targets)
        sums(gradients)
        return loss

    network.set_train()
    return accumulate


if __name__ == "__main__":
    run(networks_ms.rebuilt_for_each_window(step))
