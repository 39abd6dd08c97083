"""PyTorch Ignite: `create_supervised_trainer` with `gradient_accumulation_steps`, by its documentation.

The average is its `EMAHandler`, which is attached to every N-th iteration as its example shows; a scheduler is attached
likewise. A run is resumed from its `Checkpoint` by its deterministic engine, which goes on at the iteration that was
saved.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.handlers import Checkpoint, DiskSaver, EMAHandler
from serving import serve_cases
from torch_parts import Network, loader, loss_of, optimizer_of, result, schedule_of, weights
from torch_ranks import across_ranks

from benchmarks.conformance.case import Case, Result


def train(case: Case) -> Result:
    """Train, from a checkpoint if the case is stopped."""
    if not case.stop_after:
        return Run(case).result()
    with tempfile.TemporaryDirectory() as folder:
        before = Run(case, save_to=folder)
        (saved,) = Path(folder).iterdir()
        after = Run(case, load_from=saved)
    after.optimizer.taken += before.optimizer.taken
    return after.result()


class Run:
    """A trainer and what is attached to it."""

    def __init__(self, case: Case, save_to: Any = None, load_from: Any = None):
        self.case = case
        if case.ranks > 1:
            idist.initialize("gloo")
        self.network = idist.auto_model(Network(case))
        self.optimizer = optimizer_of(case, self.network)
        self.evaluated: Any = None
        trainer = create_supervised_trainer(
            self.network,
            self.optimizer,
            loss_of(case),
            gradient_accumulation_steps=case.window,
            deterministic=case.stop_after > 0,
        )
        each_window = Events.ITERATION_COMPLETED(every=case.window)
        if "schedule" in case.needs:
            schedule = schedule_of(case, self.optimizer)
            trainer.add_event_handler(each_window, lambda: schedule.step())
        if case.average is not None:
            self.averages = EMAHandler(self.network, momentum=1 - case.average)
            self.averages.attach(trainer, event=each_window)
        pieces = loader(case, idist.get_rank())
        if case.evaluates:
            evaluator = create_supervised_evaluator(self.network)
            evaluator.add_event_handler(Events.STARTED, self.note)
            trainer.add_event_handler(Events.EPOCH_COMPLETED, lambda: evaluator.run(pieces))
        parts = {"model": self.network, "optimizer": self.optimizer, "trainer": trainer}
        if save_to is not None:
            stop = Events.ITERATION_COMPLETED(once=case.stop_after)
            trainer.add_event_handler(stop, Checkpoint(parts, DiskSaver(save_to)))
            trainer.add_event_handler(stop, trainer.terminate)
        if load_from is not None:
            Checkpoint.load_objects(parts, checkpoint=torch.load(load_from, weights_only=False))
        trainer.run(pieces, max_epochs=case.epochs)

    def note(self) -> None:
        """Note the weights at an evaluation."""
        self.evaluated = weights(self.network) if self.evaluated is None else self.evaluated

    def result(self) -> Result:
        """Return what training has come to."""
        average = weights(self.averages.ema_model) if self.case.average is not None else None
        return result(self.network, self.optimizer, average=average, evaluated=self.evaluated)


if __name__ == "__main__":
    serve_cases(
        across_ranks(train, __file__),
        ["pytorch-ignite", "torch"],
        can=["schedule", "ema", "nan", "own optimizer", "class weights", "float16", "two terms", "BatchNorm"]
        + ["resume", "evaluation", "two ranks"],
        cannot={
            "clip": "The training step clips nothing, and has no event between the gradients and the optimizer's step.",
            "N that changes": "gradient_accumulation_steps is fixed when the trainer is made.",
        },
    )
