"""MindSpore's own accumulation, `mindspore.boost.GradientAccumulation`, as its documentation composes it.

It divides gradients by N before it adds them, and counts on over epochs.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import mindspore as ms
from mindspore import boost, nn
from mindspore_parts import Network, Updates, loss_of, optimizer_of, result, tensors, weights
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
    """Train, and evaluate at the end of an epoch."""
    run = Run(case)
    updates, done, evaluated = Updates(run.network), 0, None
    for _ in case.windows:
        for inputs, targets in tensors(case.micro_batches()):
            run.step(inputs, targets)
            updates.look()
            done += 1
            if done == case.stop_after:
                run = resumed(case, run)
                updates.network = run.network
        evaluated = weights(run.network) if evaluated is None else evaluated
    return result(run.network, updates, evaluated=evaluated)


def resumed(case: Case, run: Run) -> Run:
    """Return a new run with the checkpoint of the training Cell, which holds the sums and their number."""
    made = Run(case)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "step.ckpt"))
        ms.save_checkpoint(run.step, file)
        ms.load_param_into_net(made.step, ms.load_checkpoint(file))
    return made


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
