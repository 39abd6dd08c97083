"""DeepSpeed on the CPU, with `managed_gradient_accumulation` off, by its documentation.

The caller divides a mean by the micro-batches of a window, and calls step at its end.

When to evaluate is up to the caller, who has the epochs: here it is after each.
"""

from __future__ import annotations

import os
import socket
import tempfile
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed
import torch
from serving import serve_cases
from torch_parts import Network, loader, loss_of, optimizer_of, result, schedule_of, weights
from torch_ranks import across_ranks, rank

from benchmarks.conformance.case import Case, Result


def train(case: Case) -> Result:
    """Train, from a checkpoint if the case is stopped."""
    if case.ranks == 1 and not torch.distributed.is_initialized():
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    run = Run(case)
    done = 0
    for size in case.windows:
        if size != case.window:
            run.engine.set_train_batch_size(size * run.engine.train_micro_batch_size_per_gpu())
        pieces = list(loader(case, rank()))
        for number, columns in enumerate(pieces):
            begin = number // size * size
            run.take(*columns, count=len(pieces[begin : begin + size]))
            if number + 1 == len(pieces) or (number + 1) % size == 0:
                run.engine.step()
            done += 1
            if done == case.stop_after:
                run = run.resumed()
        run.evaluated = weights(run.network) if run.evaluated is None else run.evaluated
    return result(run.engine.module, run.optimizer, evaluated=run.evaluated)


class Run:
    """An engine and what it is made of."""

    def __init__(self, case: Case):
        self.case = case
        self.network = Network(case)
        self.optimizer = optimizer_of(case, self.network)
        self.loss_of = loss_of(case)
        self.evaluated: Any = None
        config = {
            "train_micro_batch_size_per_gpu": len(case.inputs[0]),
            "gradient_accumulation_steps": case.window,
            "gradient_clipping": case.clip or 0.0,
            "managed_gradient_accumulation": False,
            "fp16": {"enabled": case.dtype == "float16"},
            "zero_allow_untested_optimizer": True,
        }
        self.engine, *_ = deepspeed.initialize(
            model=self.network,
            optimizer=self.optimizer,
            lr_scheduler=schedule_of(case, self.optimizer) if "schedule" in case.needs else None,
            config=config,
        )

    def take(self, inputs: Any, targets: Any, count: int) -> None:
        """Take a micro-batch, of a window with so many."""
        loss = self.loss_of(self.engine(inputs), targets)
        loss = loss / count if self.case.reduction == "mean" else loss
        self.engine.backward(loss, scale_wrt_gas=False)

    def resumed(self) -> Run:
        """Return a run that was made anew and has loaded this one's checkpoint."""
        with tempfile.TemporaryDirectory() as folder:
            self.engine.save_checkpoint(folder)
            made = Run(self.case)
            made.engine.load_checkpoint(folder)
        made.optimizer.taken = self.optimizer.taken
        return made


if __name__ == "__main__":
    serve_cases(
        across_ranks(train, __file__),
        ["deepspeed", "torch"],
        can=["clip", "schedule", "nan", "own optimizer", "class weights", "N that changes", "float16", "two terms"]
        + ["BatchNorm", "resume", "evaluation", "two ranks"],
        cannot={"ema": "It has no average of the weights."},
    )
