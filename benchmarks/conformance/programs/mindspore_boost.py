"""MindSpore's own accumulation, `mindspore.boost.GradientAccumulation`, as its documentation composes it.

It divides gradients by N before it adds them, and counts on over epochs.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import boost, nn
from mindspore_parts import Network, loss_of, one_by_one, optimizer_of
from serving import serve_cases

from benchmarks.conformance.case import Case, Result


class TrainOneStep(nn.Cell):
    """A training Cell with the accumulation."""

    def __init__(self, network: nn.Cell, optimizer: Any, window: int):
        super().__init__(auto_prefix=False)
        self.grad_fn = ms.value_and_grad(network, None, optimizer.parameters)
        self.accumulate = boost.GradientAccumulation(window, optimizer)

    def construct(self, inputs: Any, targets: Any) -> Any:
        """Return the loss of a micro-batch."""
        loss, gradients = self.grad_fn(inputs, targets)
        return self.accumulate(loss, gradients)


class Run:
    """Network and training Cell."""

    def __init__(self, case: Case):
        self.network = Network(case)
        with_loss = nn.WithLossCell(self.network, loss_of(case))
        self.step = TrainOneStep(with_loss, optimizer_of(case, self.network), case.window).set_train()


def train(case: Case) -> Result:
    """Train by calls of the step. What is saved is the training Cell, which has the sums and their number."""
    return one_by_one(case, Run, saved=("step",))


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE)
    serve_cases(
        train,
        ["mindspore"],
        can=["schedule", "nan", "own optimizer", "class weights", "float16", "two terms", "BatchNorm", "resume"]
        + ["evaluation"],
        cannot={
            "clip": "the class hands its sums to the optimizer, without a bound",
            "ema": "MindSpore has no average of weights",
            "N that changes": "max_accumulation_step is given when the Cell is made",
            "two ranks": "not tried: it sums gradients that were reduced before it",
        },
    )
