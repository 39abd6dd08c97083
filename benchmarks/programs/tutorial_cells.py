"""MindSpore's r1.0 tutorial: how long does a window take with its three Cells?"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import networks_ms
from mindspore import ParameterTuple, nn, ops
from workload import run

_sum_op = ops.MultitypeFuncGraph("grad_sum_op")
_clear_op = ops.MultitypeFuncGraph("clear_op")


@_sum_op.register("Tensor", "Tensor")
def _add(grad_sum: Any, grad: Any) -> Any:
    return ops.AssignAdd()(grad_sum, grad)


@_clear_op.register("Tensor", "Tensor")
def _clear(grad_sum: Any, zero: Any) -> Any:
    success = True
    return ops.depend(success, ops.assign(grad_sum, zero))


class TrainForwardBackward(nn.Cell):
    """Run a micro-batch and add its gradients into `grad_sum`."""

    def __init__(self, network: nn.Cell, optimizer: Any, grad_sum: Any, sens: float = 1.0):
        super().__init__(auto_prefix=False)
        self.network = network
        self.network.set_grad()
        self.network.add_flags(defer_inline=True)
        self.weights = ParameterTuple(network.trainable_params())
        self.optimizer = optimizer
        self.grad_sum = grad_sum
        self.grad = ops.GradOperation(get_by_list=True, sens_param=True)
        self.sens = sens
        self.hyper_map = ops.HyperMap()

    def construct(self, *inputs: Any) -> Any:
        """Return the loss."""
        loss = self.network(*inputs)
        sens = ops.fill(loss.dtype, loss.shape, self.sens)
        grads = self.grad(self.network, self.weights)(*inputs, sens)
        return ops.depend(loss, self.hyper_map(ops.partial(_sum_op), self.grad_sum, grads))


class TrainOptim(nn.Cell):
    """Give the optimizer what `grad_sum` holds."""

    def __init__(self, optimizer: Any, grad_sum: Any):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer
        self.grad_sum = grad_sum

    def construct(self) -> Any:
        """Update."""
        return self.optimizer(self.grad_sum)


class TrainClear(nn.Cell):
    """Assign `zeros` to `grad_sum`."""

    def __init__(self, grad_sum: Any, zeros: Any):
        super().__init__(auto_prefix=False)
        self.grad_sum = grad_sum
        self.zeros = zeros
        self.hyper_map = ops.HyperMap()

    def construct(self) -> Any:
        """Clear."""
        return self.hyper_map(ops.partial(_clear_op), self.grad_sum, self.zeros)


class Cells:
    """The tutorial's `GradientAccumulation`, which sums the gradients of a window."""

    versions = networks_ms.VERSIONS
    load = staticmethod(networks_ms.tensors)

    def __init__(self, arguments: argparse.Namespace):
        network = networks_ms.make(arguments.network)
        self.parameters = networks_ms.size(network)
        optimizer = networks_ms.momentum(network)
        grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
        zeros = optimizer.parameters.clone(prefix="zeros", init="zeros")
        loss_fn = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
        with_loss = nn.WithLossCell(network, loss_fn)
        self._train_forward_backward = TrainForwardBackward(with_loss, optimizer, grad_sum).set_train()
        self._train_optim = TrainOptim(optimizer, grad_sum).set_train()
        self._train_clear = TrainClear(grad_sum, zeros).set_train()

    def set_window(self, window: int) -> None:
        """Nothing to do: the host counts."""

    def train(self, windows: Sequence[Any]) -> float:
        """Run these windows; the loss is read once for each, as the tutorial prints it."""
        shown = 0.0
        for window in windows:
            for micro_batch in window:
                loss = self._train_forward_backward(*micro_batch)
            shown = float(loss.asnumpy())
            self._train_optim()
            self._train_clear()
        ms.runtime.synchronize()
        return shown


if __name__ == "__main__":
    run(Cells)
