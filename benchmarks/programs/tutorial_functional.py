"""MindSpore's 2.x tutorial: a class that sums gradients in the compiled step, and updates in a branch of its graph.

Written from what the tutorial's program does, with what is slow in it: the window ends in an `if` on a tensor, and the
sums are cleared with a second set of zeros.
"""

from __future__ import annotations

from typing import Any, Callable

import mindspore as ms
from mindspore import Parameter, Tensor, nn, ops

from benchmarks.programs import networks_ms
from benchmarks.programs.workload import Network, Train, Trainer, one_by_one, run

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


def step(network: nn.Cell, window: int) -> Callable[..., Any]:
    """Return the step with the benchmarks' loss and optimizer."""
    return step_of(network, networks_ms.loss(), networks_ms.momentum(network), window)


def make(network: Network, tuned: bool = False) -> Trainer:
    """Return a trainer whose step is built anew for each size of the window, a constant of its graph.

    With `--tuned` under the environment variables that ours sets.
    """
    made = networks_ms.make(network)
    first = networks_ms.tuned(made) if tuned else made

    def windows_of(window: int) -> Train:
        return one_by_one(step(networks_ms.make(network), window), wait=ms.runtime.synchronize)

    return Trainer(networks_ms.VERSIONS, networks_ms.size(first), networks_ms.tensors, windows_of)


if __name__ == "__main__":
    run(make)
