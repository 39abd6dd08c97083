"""MindSpore's r1.0 tutorial: a Cell that adds gradients, one that updates, one that clears; the host counts.

Written from what the tutorial's program does: three graphs, gradients that are summed without a division, and a second
set of zeros to clear with.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops

from benchmarks.programs import networks_ms
from benchmarks.programs.workload import Network, Trainer, one_by_one, run

_each = ops.HyperMap()
_add, _write = (ops.MultitypeFuncGraph(name) for name in ("add", "write"))


@_add.register("Tensor", "Tensor")
def _added(total: Any, gradient: Any) -> Any:
    return ops.assign_add(total, gradient)


@_write.register("Tensor", "Tensor")
def _written(target: Any, value: Any) -> Any:
    return ops.depend(True, ops.assign(target, value))


class Accumulate(nn.Cell):
    """Forward and backward of a micro-batch, whose gradients are added to the sums."""

    def __init__(self, with_loss: nn.Cell, sums: Any):
        super().__init__(auto_prefix=False)
        with_loss.set_grad()
        with_loss.add_flags(defer_inline=True)
        self.sums, self.trained = sums, ms.ParameterTuple(with_loss.trainable_params())
        self.differentiate = ops.GradOperation(sens_param=True, get_by_list=True)
        self.with_loss = with_loss

    def construct(self, inputs: Any, targets: Any) -> Any:
        """Return the loss."""
        loss = self.with_loss(inputs, targets)
        gradients = self.differentiate(self.with_loss, self.trained)(inputs, targets, ops.ones_like(loss))
        return ops.depend(loss, _each(_add, self.sums, gradients))


class Update(nn.Cell):
    """Calls the optimizer with the sums."""

    def __init__(self, optimizer: nn.Optimizer, sums: Any):
        super().__init__(auto_prefix=False)
        self.sums, self.optimizer = sums, optimizer

    def construct(self) -> Any:
        return self.optimizer(self.sums)


class Clear(nn.Cell):
    """Assigns zeros to the sums."""

    def __init__(self, sums: Any, zeros: Any):
        super().__init__(auto_prefix=False)
        self.zeros, self.sums = zeros, sums

    def construct(self) -> Any:
        return _each(_write, self.sums, self.zeros)


def make(network: Network, tuned: bool = False) -> Trainer:
    """Return a trainer whose host calls the first Cell for each micro-batch, and the two others after a window.

    With `--tuned` under the environment variables that ours sets.
    """
    made = networks_ms.make(network)
    trained = networks_ms.tuned(made) if tuned else made
    optimizer = networks_ms.momentum(trained)
    sums, zeros = (optimizer.parameters.clone(name, "zeros") for name in ("sums", "zeros"))
    accumulate = Accumulate(nn.WithLossCell(trained, networks_ms.loss()), sums).set_train()
    update, clear = Update(optimizer, sums).set_train(), Clear(sums, zeros).set_train()

    def end() -> None:
        update()
        clear()

    train = one_by_one(accumulate, end, ms.runtime.synchronize)
    return Trainer(networks_ms.VERSIONS, networks_ms.size(trained), networks_ms.tensors, lambda window: train)


if __name__ == "__main__":
    run(make)
