"""mindone's TrainOneStepWrapper, which accumulates gradients, clips and averages weights.

Its training scripts call it for each batch of a data set. Of mindone only this file and that of the average are loaded:
the package imports every model.
"""

from __future__ import annotations

import importlib.util
import sys
import tempfile
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import mindspore as ms
from mindcv.optim.adamw import AdamW
from mindspore import Tensor, nn
from mindspore_parts import Network, Updates, loss_of, optimizer_of, result, tensors, weights
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
    """Train, and evaluate at the end of an epoch."""
    run = Run(case)
    updates, done, evaluated = Updates(run.network), 0, None
    for _ in case.windows:
        for inputs, targets in tensors(case.micro_batches()):
            run.step(inputs, targets)
            updates.look()
            done += 1
            if done == case.stop_after:
                run = resumed(case, run)
                updates.network = run.network
        evaluated = weights(run.network) if evaluated is None else evaluated
    return result(run.network, updates, evaluated=evaluated)


def resumed(case: Case, run: Run) -> Run:
    """Return a new run with a checkpoint of the training Cell, as EvalSaveCallback saves it to resume from."""
    made = Run(case)
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "train_resume.ckpt"))
        ms.save_checkpoint(run.step, file)
        ms.load_param_into_net(made.step, ms.load_checkpoint(file))
    return made


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
