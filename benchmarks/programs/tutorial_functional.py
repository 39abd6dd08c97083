"""MindSpore's 2.x tutorial: windows with its `Accumulator`.

Rewritten after the tutorial, with what is slow in it: the boundary is an `if` on a tensor in the compiled function,
`clip_norm` is accepted and ignored, and a second set of zeros is there to clear with.
"""

from __future__ import annotations

from typing import Any, Callable

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


def step(network: nn.Cell, window: int) -> Callable[..., Any]:
    """Return a compiled train step that calls the accumulator; its loss is divided by the window's size."""
    accumulator = Accumulator(networks_ms.momentum(network), window)
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
    return train_step


if __name__ == "__main__":
    run(networks_ms.anew(step))
