"""MindCV's trainer, as its training script makes it: a Model around its TrainStep, with gradient_accumulation_steps.

Its option for gradients that are not finite, drop_overflow_update, is not available on CPU.
"""

from __future__ import annotations

import mindspore as ms
from mindcv.optim.adamw import AdamW
from mindcv.utils import create_trainer
from mindspore_parts import Look, Network, data_set, loaded, loss_of, optimizer_of, result
from serving import serve_cases

from benchmarks.conformance.case import Case, Result


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
            drop_overflow_update=False,
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
        run = loaded(run, Run(case), ("network", "optimizer"))  # what MindCV's StateMonitor saves
        look.updates.network, data = run.network, data_set(case).skip(case.stop_after)
    run.trainer.train(case.epochs, data, look, dataset_sink_mode=False)
    return result(run.network, look.updates, evaluated=look.evaluated)


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
