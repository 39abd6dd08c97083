"""MindSpore's 2.x tutorial: a class that sums gradients in the compiled step, and updates in every N-th one.

Written from what the tutorial's program does: the loss, a mean, is divided by N, a counter runs on over epochs, and the
class takes a bound for the norm, which it does not use.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore_parts import Network, loss_of, one_by_one, optimizer_of
from serving import serve_cases

from benchmarks.conformance.case import Case, Result

_each = ops.HyperMap()


@ms.jit_class
class Sums:
    """Sums of gradients, which the optimizer gets with every `window`-th call."""

    def __init__(self, optimizer: Any, window: int, clip_norm: float = 1.0):
        self.update, self.window, self.clip_norm = optimizer, window, clip_norm
        self.sums = optimizer.parameters.clone("sums", "zeros")
        self.empty = optimizer.parameters.clone("empty", "zeros")
        self.calls = Parameter(Tensor(1, ms.int32), name="calls")

    def __call__(self, gradients: Any) -> bool:
        """Add the gradients of a micro-batch."""
        _each(ops.partial(ops.assign_add), self.sums, gradients)
        if self.calls % self.window == 0:
            self.update(self.sums)
            _each(ops.partial(ops.assign), self.sums, self.empty)
        ops.assign_add(self.calls, Tensor(1, ms.int32))
        return True


class Run:
    """Network, optimizer and step."""

    def __init__(self, case: Case):
        window, loss = case.window, loss_of(case)
        divisor = window if case.reduction == "mean" else 1
        network = Network(case)
        self.network, self.optimizer = network, optimizer_of(case, network)
        sums = Sums(self.optimizer, window, 1.0 if case.clip is None else case.clip)

        def part_of_the_mean(inputs: Any, targets: Any) -> Any:
            return loss(network(inputs), targets) / divisor

        differentiated = ms.value_and_grad(part_of_the_mean, None, network.trainable_params())

        @ms.jit
        def step(inputs: Any, targets: Any) -> Any:
            value, gradients = differentiated(inputs, targets)
            sums(gradients)
            return value

        self.step = step


def train(case: Case) -> Result:
    """Train by calls of the step. What is saved is network and optimizer, as MindSpore's tutorial on saving has it."""
    return one_by_one(case, Run, saved=("network", "optimizer"))


if __name__ == "__main__":
    serve_cases(
        train,
        ["mindspore"],
        can=["clip", "schedule", "nan", "own optimizer", "class weights", "float16", "two terms", "BatchNorm", "resume"]
        + ["evaluation"],
        cannot={
            "ema": "MindSpore has no average of weights",
            "N that changes": "the class takes N when it is made, and the step is compiled with it",
            "two ranks": "not tried: the tutorial is of one process",
        },
    )
