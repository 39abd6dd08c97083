"""What the programs of ms_accum share: the loss and the weights of a case, a stop in the data, several ranks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, Callable

import mindspore as ms
from mindspore import Tensor, nn
from mindspore_parts import Network, loss_of, tensors, weights
from several_ranks import case_of_rank, launched, write

from benchmarks.conformance.case import IGNORED, Case, Result
from benchmarks.conformance.oracle import PENALTY
from ms_accum import own_group

PACKAGES = ["mindspore"]  # ms_accum is that of this commit
EVERY = "clip, schedule, ema, nan, own optimizer, class weights, N that changes, float16, two terms, BatchNorm, resume"
CAN = [*EVERY.split(", "), "evaluation", "two ranks"]


class Terms(nn.Cell):
    """The loss of two terms, by their names."""

    def __init__(self, case: Case):
        super().__init__()
        self.entropy = nn.CrossEntropyLoss(ignore_index=IGNORED)

    def construct(self, outputs: Any, targets: Any) -> Any:
        """Return the terms, each a mean of its own."""
        entropy = self.entropy(outputs.reshape((-1, outputs.shape[-1])), targets.reshape((-1,)))
        return {"entropy": entropy, "penalty": PENALTY * outputs.square().sum() / outputs.shape[0]}


def loss_and_weight(case: Case) -> tuple[Any, Any]:
    """Return the loss, and what it averages over where that is not seen from the loss itself."""
    if case.loss == "penalized":
        return Terms(case), {"entropy": labels, "penalty": "rows"}
    if case.loss == "cross_entropy" and len(case.micro_batches()[0][1].shape) > 1:
        return loss_of(case), labels
    if case.loss == "cross_entropy":
        weights = None if case.class_weights is None else Tensor(case.class_weights)
        return nn.CrossEntropyLoss(weights, ignore_index=IGNORED), None
    return loss_of(case), None


def labels(inputs: Any, targets: Any) -> Any:
    """Return how many labels a micro-batch has."""
    return (targets != IGNORED).sum()


def divisor(case: Case, inputs: Any, targets: Any) -> Tensor:
    """Return what the loss of a micro-batch averages over, for the ways to which the loop gives it."""
    if case.loss == "squares":
        return Tensor(float(inputs.shape[0]), ms.float32)
    all_labels = targets.asnumpy()
    counted = all_labels[all_labels != IGNORED]
    class_weights = case.class_weights or [1.0] * len(case.start)
    return Tensor(float(sum(class_weights[label] for label in counted)), ms.float32)


def sizes(case: Case) -> Any:
    """Return N, or by the number of the update the N that begins with it."""
    if len(set(case.windows)) == 1:
        return case.window
    found, updates = {}, 0
    for size in case.windows:
        found[updates] = size
        updates += -(-len(case.inputs) // size)
    return found


class Stopped(Exception):
    """The run was stopped."""


class Data(list):
    """The micro-batches of an epoch, which stop the run once, after a number of them."""

    def __init__(self, case: Case, rank: int = 0, stop_after: int = 0):
        super().__init__(tensors(case.micro_batches(rank)))
        self.stop_after, self.seen = stop_after, 0

    def __iter__(self) -> Iterator[Any]:
        for columns in super().__iter__():
            if self.stop_after and self.seen == self.stop_after:
                raise Stopped
            self.seen += 1
            yield columns


class Watch(nn.Metric):
    """A metric that notes the weights of the first evaluation."""

    def __init__(self, network: Network):
        super().__init__()
        self.network, self.noted = network, None

    def clear(self) -> None:
        """Do nothing."""

    def update(self, *_: Any) -> None:
        """Do nothing."""

    def eval(self) -> float:
        """Note the weights."""
        self.noted = weights(self.network) if self.noted is None else self.noted
        return 0.0


def across_ranks(train: Callable[[Case], Result], program: str) -> Callable[[Case], Result]:
    """Return `train`, which for a case of several ranks starts the program again on each of them.

    On a rank this function trains, writes the result of rank 0, and ends the process.
    """
    case = case_of_rank()
    if case is not None:
        made = train(case)
        if own_group().rank == 0:
            write(made)
        sys.exit(0)

    def start(case: Case) -> Result:
        return train(case) if case.ranks == 1 else launched(case, ("ms_accum.launch", f"--nproc={case.ranks}"), program)

    return start
