"""mindone's TrainOneStepWrapper, which accumulates gradients, clips and averages weights.

Its training scripts call it for each batch of a data set. Of mindone only this file and that of the average are loaded:
the package imports every model.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import mindspore as ms
from mindcv.optim.adamw import AdamW
from mindspore import Tensor, nn
from mindspore_parts import Network, loss_of, one_by_one, optimizer_of
from serving import serve_cases

from benchmarks.conformance.case import Case, Result


def _wrapper() -> Any:
    """Return the class, from a package of its file and of the one that it imports."""
    found = importlib.util.find_spec("mindone")
    folder = Path(found.submodule_search_locations[0], "trainers")  # type: ignore[union-attr, index]
    package = ModuleType("trainers")
    package.__spec__, package.__path__ = ModuleSpec("trainers", None, is_package=True), [str(folder)]
    sys.modules["trainers"] = package
    return importlib.import_module("trainers.train_step").TrainOneStepWrapper


class Run:
    """Network, optimizer and training Cell."""

    def __init__(self, case: Case):
        self.network = Network(case)
        if case.optimizer == "adamw":  # its create_optimizer makes this one
            self.optimizer = AdamW(self.network.trainable_params(), case.rate(0), weight_decay=case.weight_decay)
        else:
            self.optimizer = optimizer_of(case, self.network)
        self.step = _wrapper()(
            nn.WithLossCell(self.network, loss_of(case)),
            self.optimizer,
            scale_sense=Tensor(1.0, ms.float32),
            gradient_accumulation_steps=case.window,
            clip_grad=case.clip is not None,
            clip_norm=case.clip or 1.0,
        )
        self.step.set_train()


def train(case: Case) -> Result:
    """Train by calls of the step. What is saved is the training Cell, which EvalSaveCallback saves to resume from."""
    return one_by_one(case, Run, saved=("step",))


if __name__ == "__main__":
    ms.set_context(mode=ms.GRAPH_MODE)
    serve_cases(
        train,
        ["mindone", "mindspore"],
        can=["clip", "schedule", "nan", "own optimizer", "class weights", "float16", "two terms", "BatchNorm", "resume"]
        + ["evaluation"],
        cannot={
            "ema": "the decay of its average grows by a formula of its own, with each micro-batch",
            "N that changes": "gradient_accumulation_steps is given when the Cell is made",
            "two ranks": "not tried: it needs a launcher of MindSpore",
        },
    )
