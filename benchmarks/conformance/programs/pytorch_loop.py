"""PyTorch's loop by hand: it divides a mean by N, and steps with each N-th micro-batch and after an epoch's last one.

Several ranks are `DistributedDataParallel`, with `no_sync` for all micro-batches but the last of a window.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from typing import Any

import torch
from serving import serve_cases
from torch import distributed
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch_parts import Network, loader, loss_of, optimizer_of, result, schedule_of, weights
from torch_ranks import across_ranks, rank

from benchmarks.conformance.case import Case, Result


def train(case: Case) -> Result:
    """Divide by N; step with each N-th micro-batch of an epoch, and with its last one."""
    run, done = Run(case), 0
    for size in case.windows:
        pieces = loader(case, rank())
        for number, (inputs, targets) in enumerate(pieces, 1):
            ends = number % size == 0 or number == len(pieces)
            with run.model.no_sync() if case.ranks > 1 and not ends else nullcontext():
                loss = run.loss_of(run.model(inputs), targets)
                (loss / size if case.reduction == "mean" else loss).backward()
            if ends:
                run.end()
            done += 1
            if done == case.stop_after:
                run.save_and_load()
        run.evaluate()
    return run.result()


class Run:
    """Network, optimizer, schedule and average."""

    def __init__(self, case: Case):
        self.case = case
        self.network = Network(case)
        self.model: Any = self.network
        if case.ranks > 1:
            distributed.init_process_group("gloo")
            self.model = DistributedDataParallel(self.network)
        self.optimizer = optimizer_of(case, self.network)
        self.schedule = schedule_of(case, self.optimizer)
        self.loss_of = loss_of(case)
        decay = case.average or 0.0
        self.averaged = AveragedModel(self.network, multi_avg_fn=get_ema_multi_avg_fn(decay))
        self.evaluated: Any = None

    def end(self) -> None:
        """End a window."""
        if self.case.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), self.case.clip)
        self.optimizer.step()
        self.schedule.step()
        self.averaged.update_parameters(self.network)
        self.optimizer.zero_grad()

    def evaluate(self) -> None:
        """Note the weights at the end of an epoch."""
        self.evaluated = weights(self.network) if self.evaluated is None else self.evaluated

    def save_and_load(self) -> None:
        """Do what PyTorch's tutorial on checkpoints says: the states of network and optimizer, in a new process."""
        saved = copy.deepcopy([part.state_dict() for part in (self.network, self.optimizer, self.schedule)])
        taken = self.optimizer.taken
        self.__init__(self.case)  # type: ignore[misc]
        for part, state in zip((self.network, self.optimizer, self.schedule), saved):
            part.load_state_dict(state)
        self.optimizer.taken = taken

    def result(self) -> Result:
        """Return what training has come to."""
        average = weights(self.averaged) if self.case.average else None
        return result(self.network, self.optimizer, average=average, evaluated=self.evaluated)


if __name__ == "__main__":
    serve_cases(
        across_ranks(train, __file__),
        ["torch"],
        can=["clip", "schedule", "ema", "nan", "own optimizer", "class weights", "N that changes", "float16"]
        + ["two terms", "BatchNorm", "resume", "evaluation", "two ranks"],
    )
