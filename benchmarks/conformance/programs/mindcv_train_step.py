"""MindCV's trainer, as its training script makes it: a Model around its TrainStep, with gradient_accumulation_steps.

With drop_overflow_update also with its option for gradients that are not finite.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import mindspore as ms
from mindcv.optim.adamw import AdamW
from mindcv.utils import create_trainer
from mindspore import nn
from mindspore_parts import Network, Updates, data_set, loss_of, optimizer_of, result, weights
from serving import serve_cases

from benchmarks.conformance.case import Case, Result

DROPS = "drop_overflow_update" in sys.argv


class Look(ms.Callback):
    """Looks at the weights after each micro-batch, and notes them at the end of the first epoch."""

    def __init__(self, network: nn.Cell):
        self.updates, self.evaluated = Updates(network), None

    def on_train_step_end(self, run_context: Any) -> None:
        """Look whether the weights have changed."""
        self.updates.look()

    def on_train_epoch_end(self, run_context: Any) -> None:
        """Note the weights, when MindCV's StateMonitor evaluates."""
        self.evaluated = weights(self.updates.network) if self.evaluated is None else self.evaluated


class Run:
    """Network, optimizer and trainer."""

    def __init__(self, case: Case):
        self.network = Network(case)
        if case.optimizer == "adamw":
            self.optimizer = AdamW(self.network.trainable_params(), case.rate(0), weight_decay=case.weight_decay)
        else:
            self.optimizer = optimizer_of(case, self.network)
        self.trainer = create_trainer(
            self.network,
            loss_of(case),
            self.optimizer,
            metrics=None,
            amp_level="O0",
            amp_cast_list=None,
            loss_scale_type="fixed",
            drop_overflow_update=DROPS,
            clip_grad=case.clip is not None,
            clip_value=case.clip or 0.0,
            gradient_accumulation_steps=case.window,
        )


def train(case: Case) -> Result:
    """Train with a data set of micro-batches."""
    run = Run(case)
    look = Look(run.network)
    data = data_set(case)
    if case.stop_after:
        run.trainer.train(1, data.take(case.stop_after), look, dataset_sink_mode=False)
        run = resumed(case, run)
        look.updates.network, data = run.network, data_set(case).skip(case.stop_after)
    run.trainer.train(case.epochs, data, look, dataset_sink_mode=False)
    return result(run.network, look.updates, evaluated=look.evaluated)


def resumed(case: Case, run: Run) -> Run:
    """Return a new run with what MindCV's StateMonitor saves: a checkpoint of the network and one of the optimizer."""
    made = Run(case)
    with tempfile.TemporaryDirectory() as folder:
        for name in ("network", "optimizer"):
            file = str(Path(folder, f"{name}.ckpt"))
            ms.save_checkpoint(getattr(run, name), file)
            ms.load_param_into_net(getattr(made, name), ms.load_checkpoint(file))
    return made


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE)
    serve_cases(
        train,
        ["mindcv", "mindspore"],
        can=["clip", "schedule", "nan", "own optimizer", "class weights", "float16", "two terms", "BatchNorm", "resume"]
        + ["evaluation"],
        cannot={
            "ema": "the decay of its average grows by a formula of its own, with each micro-batch",
            "N that changes": "gradient_accumulation_steps is given when the trainer is made",
            "two ranks": "not tried: it needs a launcher of MindSpore",
        },
    )
