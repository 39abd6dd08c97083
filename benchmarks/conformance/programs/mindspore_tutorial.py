"""MindSpore's 2.x tutorial: a class that sums gradients in the compiled step, and updates in every N-th one.

Written from what the tutorial's program does: the loss, a mean, is divided by N, and a counter runs on over epochs. The
tutorial's class also takes a bound for the norm, which it does not use: so here a case that clips is trained without.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore_parts import Network, loss_of, one_by_one, optimizer_of
from serving import serve_cases

from benchmarks.conformance.case import Case, Result
from benchmarks.programs.tutorial_functional import SumsInGraph


class Run:
    """Network, optimizer and step."""

    def __init__(self, case: Case):
        window, loss = case.window, loss_of(case)
        divisor = window if case.reduction == "mean" else 1
        network = Network(case)
        self.network, self.optimizer = network, optimizer_of(case, network)
        sums = SumsInGraph(self.optimizer, window)

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
