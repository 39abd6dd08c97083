"""MindSpore's r1.0 tutorial: a Cell that adds gradients, one that updates, one that clears; the host counts.

Written from what the tutorial's program does: gradients are summed, and not divided by their number; the sums are not
cleared at the end of an epoch, where the count begins anew.
"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import nn, ops
from mindspore_parts import Network, Updates, data_set, loaded, loss_of, optimizer_of, result, weights
from serving import serve_cases

from benchmarks.conformance.case import Case, Result

ms.set_context(mode=ms.GRAPH_MODE)
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

    def __init__(self, with_loss: nn.Cell, optimizer: Any, sums: Any):
        super().__init__(auto_prefix=False)
        with_loss.set_grad()
        with_loss.add_flags(defer_inline=True)
        self.with_loss, self.optimizer, self.sums = with_loss, optimizer, sums
        self.trained = ms.ParameterTuple(with_loss.trainable_params())
        self.differentiate = ops.GradOperation(sens_param=True, get_by_list=True)

    def construct(self, inputs: Any, targets: Any) -> Any:
        """Return the loss."""
        loss = self.with_loss(inputs, targets)
        gradients = self.differentiate(self.with_loss, self.trained)(inputs, targets, ops.ones_like(loss))
        return ops.depend(loss, _each(_add, self.sums, gradients))


class Update(nn.Cell):
    """Calls the optimizer with the sums."""

    def __init__(self, optimizer: Any, sums: Any):
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


class Run:
    """The three Cells, and the loop over epochs that calls them."""

    def __init__(self, case: Case):
        self.network = Network(case)
        self.updates = Updates(self.network)
        optimizer = optimizer_of(case, self.network)
        sums, zeros = (optimizer.parameters.clone(name, "zeros") for name in ("sums", "zeros"))
        with_loss = nn.WithLossCell(self.network, loss_of(case))
        self.accumulate = Accumulate(with_loss, optimizer, sums).set_train()
        self.update, self.clear = Update(optimizer, sums).set_train(), Clear(sums, zeros).set_train()

    def train(self, epochs: int, data: Any, window: int) -> None:
        """Train with micro-batches that come ready from a data set."""
        for _ in range(epochs):
            for number, (inputs, targets) in enumerate(data.create_tuple_iterator(num_epochs=1), 1):
                self.accumulate(inputs, targets)
                if number % window == 0:
                    self.update()
                    self.clear()
                self.updates.look()


def train(case: Case) -> Result:
    """Train by calls of the loop, which has the window as an argument."""
    run, evaluated = Run(case), None
    if case.stop_after:
        run.train(1, data_set(case).take(case.stop_after), case.window)
        count, run = run.updates.count, loaded(run, Run(case), ("accumulate",))  # what the tutorial saves
        run.updates = Updates(run.network)
        run.updates.count = count
        run.train(1, data_set(case).skip(case.stop_after), case.window)
        return result(run.network, run.updates)
    for window in case.windows:
        run.train(1, data_set(case), window)
        evaluated = weights(run.network) if evaluated is None else evaluated
    return result(run.network, run.updates, evaluated=evaluated)


if __name__ == "__main__":
    serve_cases(
        train,
        ["mindspore"],
        can=["schedule", "nan", "own optimizer", "class weights", "N that changes", "float16", "two terms", "BatchNorm"]
        + ["resume", "evaluation"],
        cannot={
            "clip": "the tutorial's Cells do not bound a norm",
            "ema": "MindSpore has no average of weights",
            "two ranks": "not tried: the tutorial's second part is for GPU",
        },
    )
