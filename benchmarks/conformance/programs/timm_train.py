"""timm: an epoch of `train.py` with `--grad-accum-steps` and `--variable-batch-loss-scale linear`, after its source.

The parts that are in the package are timm's own: the task, which holds the network, the loss and the average; the
clipping; the base of the schedulers; the saver of checkpoints. The script's loop is in no package, so its arithmetic of
windows is repeated here. The second option is for batches whose size is scheduled: a loss counts by its rows.
"""

from __future__ import annotations

import tempfile
from typing import Any

from serving import serve_cases

from torch_parts import Network, loader, loss_of, optimizer_of, result, weights  # isort: skip
from timm.scheduler.scheduler import Scheduler
from timm.task import ClassificationTask, resume_task_checkpoint
from timm.utils import CheckpointSaver, dispatch_clip_grad

from benchmarks.conformance.case import Case, Result


class Rates(Scheduler):
    """The rates of a case, by updates."""

    def __init__(self, optimizer: Any, case: Case):
        self.case = case
        super().__init__(optimizer, "lr", t_in_epochs=False)

    def _get_lr(self, t: int) -> list[float]:
        return [self.case.rate(t)] * len(self.optimizer.param_groups)


class Stopped(Exception):
    """The process ends."""


def train(case: Case) -> Result:
    """Train, from the script's recovery file if the case is stopped."""
    if not case.stop_after:
        return Run(case).train().result()
    with tempfile.TemporaryDirectory() as folder:
        before, after = Run(case, folder), Run(case)
        try:
            before.train()
        except Stopped:
            pass
        begin = resume_task_checkpoint(after.task, before.saver.find_recovery(), optimizer=after.optimizer)
    after.optimizer.taken = before.optimizer.taken
    return after.train(begin).result()


class Run:
    """What the script makes before its epochs."""

    def __init__(self, case: Case, folder: str = ""):
        self.case = case
        network = Network(case)
        self.task = ClassificationTask(network, loss_of(case), verbose=False)
        self.optimizer = optimizer_of(case, network)
        self.schedule = Rates(self.optimizer, case)
        if case.average is not None:
            self.task.setup_ema(decay=case.average)
        self.loader = loader(case)
        self.rows = sum(map(len, case.inputs)) / len(case.inputs)
        self.saver = CheckpointSaver(network, self.optimizer, recovery_dir=folder, task=self.task) if folder else None
        self.evaluated: Any = None

    def train(self, begin: int = 0) -> Run:
        """Train the epochs; each is followed by the validation."""
        for epoch in range(begin, self.case.epochs):
            self.train_one_epoch(epoch)
            if self.evaluated is None:
                self.evaluated = weights(self.task.get_trainable_module())
        return self

    def train_one_epoch(self, epoch: int) -> None:
        """Train an epoch: which micro-batches update, and what losses are divided by, is as in the script."""
        accum_steps, count = self.case.window, len(self.loader)
        last_accum_steps = count % accum_steps
        num_updates = epoch * ((count + accum_steps - 1) // accum_steps)
        self.task.get_trainable_module().train()
        self.optimizer.zero_grad()
        for index, (inputs, targets) in enumerate(self.loader):
            need_update = index == count - 1 or (index + 1) % accum_steps == 0
            if index >= count - last_accum_steps:
                accum_steps = last_accum_steps
            loss = self.task(inputs, targets)["loss"]
            if accum_steps > 1:
                loss = loss / accum_steps
            (loss * (len(inputs) / self.rows)).backward()
            if need_update:
                if self.case.clip is not None:
                    dispatch_clip_grad(self.task.get_clip_parameters(), value=self.case.clip, mode="norm")
                self.optimizer.step()
                num_updates += 1
                self.optimizer.zero_grad()
                self.task.update_ema(step=num_updates)
                if self.saver:
                    self.saver.save_recovery(epoch, batch_idx=index // accum_steps)
                self.schedule.step_update(num_updates=num_updates)
            if self.saver and epoch * count + index + 1 == self.case.stop_after:
                raise Stopped

    def result(self) -> Result:
        """Return what training has come to."""
        average = weights(self.task.get_trainable_module(ema=True)) if self.case.average is not None else None
        network = self.task.get_trainable_module()
        return result(network, self.optimizer, average=average, evaluated=self.evaluated)


if __name__ == "__main__":
    can = ["clip", "schedule", "ema", "nan", "own optimizer", "class weights", "float16", "two terms", "BatchNorm"]
    can += ["resume", "evaluation"]
    cannot = {
        "N that changes": "--grad-accum-steps is one number for the whole training.",
        "two ranks": "The loader of scheduled batches gives all ranks the same number of rows.",
    }
    serve_cases(train, ["timm", "torch"], can, cannot)
