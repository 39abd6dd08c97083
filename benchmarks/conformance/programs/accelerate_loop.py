"""Accelerate's loop with `accumulate`; with `tokens` that of its guide for samples of variable size.

The guide reads a window ahead, counts its items, and multiplies by N what Accelerate divides by N. Items with class
weights are counted by them.
"""

from __future__ import annotations

import sys
import tempfile
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator, skip_first_batches
from accelerate.state import AcceleratorState, GradientState, PartialState
from serving import serve_cases
from torch_parts import Network, divided_of, items_of, loader, loss_of, optimizer_of, result, schedule_of, weights
from torch_ranks import across_ranks, rank

from benchmarks.conformance.case import Case, Result

TOKENS = "tokens" in sys.argv


def train(case: Case) -> Result:
    """Train; a stopped run is loaded by `load_state` in a new Accelerator, with `skip_first_batches`."""
    run = Run(case)
    with tempfile.TemporaryDirectory() as folder:
        for epoch, size in enumerate(case.windows):
            run.accelerator.gradient_accumulation_steps = size
            for number, columns in enumerate(run.loader, 1):
                if not TOKENS:
                    run.micro_batch(*columns)
                if case.stop_after == number:
                    run.accelerator.save_state(folder)
                    taken, run = run.steps, Run(case)
                    run.accelerator.load_state(folder)
                    for rest in skip_first_batches(run.loader, number):
                        run.micro_batch(*rest)
                    return Result(weights(run.network), taken + run.steps)
            if TOKENS:
                run.epoch(size)
            run.evaluated = weights(run.network) if epoch == 0 else run.evaluated
    return result(run.network, run.optimizer_of_torch, evaluated=run.evaluated)


class Run:
    """What `prepare` returns."""

    def __init__(self, case: Case):
        for state in (AcceleratorState, GradientState, PartialState):  # one process has one Accelerator
            state._reset_state()
        self.case, self.evaluated = case, None
        self.accelerator = Accelerator(gradient_accumulation_steps=case.window, cpu=True)
        self.network = Network(case)
        self.optimizer_of_torch = optimizer_of(case, self.network)
        schedule = schedule_of(case, self.optimizer_of_torch)
        pieces = loader(case, rank())
        made = self.accelerator.prepare(self.network, self.optimizer_of_torch, schedule)
        self.model, self.optimizer, self.schedule = made
        # The ranks' data are already theirs; `prepare` would divide them once more.
        self.loader = pieces if case.ranks > 1 else self.accelerator.prepare(pieces)
        self.loss_of, self.divided = loss_of(case), divided_of(case)

    @property
    def steps(self) -> int:
        """int, the steps of the optimizer."""
        return self.optimizer_of_torch.taken

    def micro_batch(self, inputs: Any, targets: Any) -> None:
        """Train a micro-batch: what is to happen once a window is done or not by Accelerate."""
        with self.accelerator.accumulate(self.model):
            self.accelerator.backward(self.loss_of(self.model(inputs), targets))
            if self.case.clip is not None and self.accelerator.sync_gradients:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.case.clip)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()

    def epoch(self, size: int) -> None:
        """Train an epoch by the guide: window by window, divided by the items of the window."""
        pieces = list(self.loader)
        for start in range(0, len(pieces), size):
            window = pieces[start : start + size]
            items = torch.tensor(float(sum(items_of(self.case, targets) for _, targets in window)))
            items = self.accelerator.gather(items).sum().item()
            for number, (inputs, targets) in enumerate(window, 1):
                ranks = self.accelerator.num_processes
                waits = number < len(window) and ranks > 1
                with self.model.no_sync() if waits else nullcontext():
                    loss = self.divided(self.model(inputs), targets, items / (size * ranks))
                    self.accelerator.backward(loss if self.case.reduction == "mean" else loss * size)
            if self.case.clip is not None:
                self.accelerator.clip_grad_norm_(self.model.parameters(), self.case.clip)
            self.optimizer.step()
            self.schedule.step()
            self.optimizer.zero_grad()


if __name__ == "__main__":
    can = ["clip", "schedule", "nan", "own optimizer", "class weights", "N that changes", "float16", "two terms"]
    can += ["BatchNorm", "evaluation", "two ranks", *([] if TOKENS else ["resume"])]
    cannot = {"ema": "no average of the weights", "resume": "not tried: the other way shows it"}
    serve_cases(across_ranks(train, __file__), ["accelerate", "torch"], can, cannot)
