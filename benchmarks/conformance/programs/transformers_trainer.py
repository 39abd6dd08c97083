"""Transformers' Trainer, with two ways to write the model.

- default: it returns its loss, a mean.
- kwargs: its `forward` takes `**kwargs`, and divides a sum by `num_items_in_batch`.
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

from serving import serve_cases
from torch import nn
from torch.utils.data import DataLoader
from torch_parts import Network, divided_of, loader, loss_of, optimizer_of, result, schedule_of, weights
from torch_ranks import across_ranks, rank
from transformers import Trainer, TrainerCallback, TrainingArguments

from benchmarks.conformance.case import Case, Result

KWARGS = sys.argv[1] == "kwargs"


def train(case: Case) -> Result:
    """Train; a stopped run is resumed by `resume_from_checkpoint`."""
    with tempfile.TemporaryDirectory() as folder:
        trainer, model = made(case, folder, case.stop_after)
        if case.stop_after:
            try:
                trainer.train()
            except InterruptedError:
                pass
            taken = trainer.state.global_step
            trainer, model = made(case, folder)
            trainer.train(resume_from_checkpoint=True)
            return Result(weights(model), taken + model.optimizer.taken)
        trainer.train()
        noted = [callback.noted for callback in trainer.callback_handler.callbacks if isinstance(callback, Note)]
    return result(model, model.optimizer, evaluated=noted[0])


class Model(nn.Module):
    """The network with its loss, as Trainer expects it."""

    def __init__(self, case: Case):
        super().__init__()
        self.network, self.loss_of, self.divided = Network(case), loss_of(case), divided_of(case)

    def loss(self, inputs: Any, labels: Any, items: Any) -> Any:
        """Return the loss, divided by what was counted in the window if that is given."""
        outputs = self.network(inputs)
        return {"loss": self.loss_of(outputs, labels) if items is None else self.divided(outputs, labels, items)}


class Default(Model):
    """Returns the mean."""

    def forward(self, inputs: Any, labels: Any) -> Any:
        return self.loss(inputs, labels, None)


class WithKwargs(Model):
    """Returns a sum divided by what Trainer has counted in the window."""

    def forward(self, inputs: Any, labels: Any, **kwargs: Any) -> Any:
        return self.loss(inputs, labels, kwargs.get("num_items_in_batch"))


class Stopping(list):
    """Micro-batches that stop the run."""

    after = 0

    def __getitem__(self, number: Any) -> Any:
        if self.after and number == self.after:
            raise InterruptedError
        inputs, labels = super().__getitem__(number)
        return {"inputs": inputs, "labels": labels}


class Note(TrainerCallback):
    """Notes the weights at the first evaluation."""

    noted = None

    def on_evaluate(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        """Note them."""
        self.noted = weights(model) if self.noted is None else self.noted


class OfReadyBatches(Trainer):
    """Takes micro-batches that are complete in the data set."""

    def get_train_dataloader(self) -> Any:
        """Return the loader."""
        return DataLoader(self.train_dataset, batch_size=1, collate_fn=lambda batch: batch[0])

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the loader."""
        return self.get_train_dataloader()


def made(case: Case, folder: str, stop_after: int = 0) -> tuple[Trainer, Any]:
    """Return a trainer and its model."""
    model = WithKwargs(case) if KWARGS else Default(case)
    model.optimizer = optimizer_of(case, model)
    data = Stopping(loader(case, rank()).dataset)
    data.after = stop_after
    arguments = TrainingArguments(
        output_dir=folder,
        num_train_epochs=case.epochs,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=case.window,
        max_grad_norm=case.clip or 0.0,
        use_cpu=True,
        save_strategy="steps" if case.stop_after else "no",
        save_steps=1,
        eval_strategy="epoch" if case.evaluates else "no",
        prediction_loss_only=True,
        logging_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    optimizers = (model.optimizer, schedule_of(case, model.optimizer))
    return OfReadyBatches(model, arguments, None, data, data, optimizers=optimizers, callbacks=[Note()]), model


if __name__ == "__main__":
    can = ["clip", "schedule", "nan", "own optimizer", "class weights", "float16", "two terms", "BatchNorm", "resume"]
    cannot = {"ema": "no average of the weights", "N that changes": "gradient_accumulation_steps is fixed"}
    serve_cases(
        across_ranks(train, __file__),
        ["transformers", "accelerate", "torch"],
        [*can, "evaluation", "two ranks"],
        cannot,
    )
