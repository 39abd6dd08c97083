"""MindSpore's r1.0 tutorial: windows with its three Cells."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import networks_ms
from mindspore import ParameterTuple, nn, ops
from workload import Network, Trainer, one_by_one, run

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


def make(network: Network) -> Trainer:
    """Return the tutorial's `GradientAccumulation`, which sums the gradients of a window; the host counts."""
    trained = networks_ms.make(network)
    optimizer = networks_ms.momentum(trained)
    grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
    zeros = optimizer.parameters.clone(prefix="zeros", init="zeros")
    with_loss = nn.WithLossCell(trained, networks_ms.loss())
    train_forward_backward = TrainForwardBackward(with_loss, optimizer, grad_sum).set_train()
    train_optim = TrainOptim(optimizer, grad_sum).set_train()
    train_clear = TrainClear(grad_sum, zeros).set_train()

    def end() -> None:
        train_optim()
        train_clear()

    train = one_by_one(train_forward_backward, end, ms.runtime.synchronize)
    return Trainer(networks_ms.VERSIONS, networks_ms.size(trained), networks_ms.tensors, lambda window: train)


if __name__ == "__main__":
    run(make)
