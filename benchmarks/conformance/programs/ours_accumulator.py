"""ms_accum's `Accumulator` in a compiled step of one's own, as docs/how-to/functional.md has it."""

from __future__ import annotations

import tempfile
from typing import Any

import mindspore as ms
from mindspore import ops
from mindspore_parts import Network, optimizer_of, tensors, weights
from ours_parts import CAN, PACKAGES, across_ranks, divisor, loss_and_weight, sizes
from serving import serve_cases

from benchmarks.conformance.case import Case, Result
from ms_accum import Accumulator, Checkpointer, Ema, ResumableLoop, Terms, own_group


def train(case: Case) -> Result:
    """Train by a compiled step for each micro-batch, and `flush` at the end of an epoch."""
    run = Run(case)
    pieces, evaluated = tensors(case.micro_batches(own_group().rank)), None
    with tempfile.TemporaryDirectory() as folder:
        if case.stop_after:
            with ResumableLoop(Checkpointer(folder, every=1), run.network, run.accumulator) as loop:
                for number, columns in enumerate(pieces[: case.stop_after], 1):
                    run.step(*columns)
                    loop.after_micro_batch(1, number)
            run = Run(case)
            with ResumableLoop(Checkpointer(folder, resume="auto"), run.network, run.accumulator) as loop:
                for columns in pieces[loop.batches :]:
                    run.step(*columns)
        else:
            for _ in range(case.epochs):
                run.epoch(pieces)
                evaluated = weights(run.network) if evaluated is None else evaluated
    result = Result(weights(run.network), int(run.accumulator.updates), evaluated=evaluated)
    if run.average is not None:
        with run.average.applied():
            result.average = weights(run.network)
    return result


class Run:
    """A network, its accumulator, and the compiled step."""

    def __init__(self, case: Case):
        self.case, self.network = case, Network(case)
        self.average = Ema(case.average) if case.average else None
        loss_fn, counts = loss_and_weight(case)
        optimizer = optimizer_of(case, self.network)
        self.terms = Terms(counts) if isinstance(counts, dict) else None
        reduction = "sum" if self.terms or case.reduction == "sum" else "mean"
        options = {"reduction": reduction, "network": self.network, "ema": self.average}
        accumulator = self.accumulator = Accumulator(optimizer, sizes(case), case.clip, **options)
        network, terms = self.network, self.terms

        def forward(inputs: Any, targets: Any) -> Any:
            return loss_fn(network(inputs), targets)

        def scaled(inputs: Any, targets: Any, factors: Any, counts: Any) -> Any:
            return terms.scale(loss_fn(network(inputs), targets), factors, counts)

        differentiated = ms.value_and_grad(forward if terms is None else scaled, None, optimizer.parameters)

        @ms.jit
        def step(inputs: Any, targets: Any, weight: Any) -> Any:
            loss, gradients = differentiated(inputs, targets)
            return ops.depend(loss, accumulator(gradients, weight))

        @ms.jit
        def step_of_terms(inputs: Any, targets: Any, factors: Any, counts: Any) -> Any:
            loss, gradients = differentiated(inputs, targets, factors, counts)
            return ops.depend(loss, accumulator(gradients))

        self._step, self._step_of_terms = step, step_of_terms

    def step(self, inputs: Any, targets: Any) -> None:
        """Train a micro-batch."""
        self._step(inputs, targets, None if self.case.reduction == "sum" else divisor(self.case, inputs, targets))

    def epoch(self, pieces: list) -> None:
        """Train an epoch."""
        if self.terms is None:
            for columns in pieces:
                self.step(*columns)
        else:
            for start in range(0, len(pieces), self.case.window):
                window = pieces[start : start + self.case.window]
                for columns, (factors, counts) in zip(window, self.terms.factors(window)):
                    self._step_of_terms(*columns, factors, counts)
        self.accumulator.flush()


if __name__ == "__main__":
    serve_cases(across_ranks(train, __file__), PACKAGES, CAN)
