"""MosaicML Composer: its `Trainer` with `device_train_microbatch_size`, by its documentation.

Composer gets a window as one batch and splits it. Where micro-batches differ in their rows, the `split_batch`
of its `DataSpec` does it. It runs with a PyTorch that is newer than those that it declares.

- samples: as by default, a micro-batch counts by its rows.
- tokens: with `accumulate_train_batch_on_tokens`, by its labels that are not ignored, or by their class weights.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from serving import serve_cases

from torch_parts import Network, items_of, loss_of, optimizer_of, result, schedule_of, tensors, weights  # isort: skip
import torch
from composer import Callback, DataSpec, Evaluator, Trainer
from composer.algorithms import EMA, GradientClipping
from composer.models import ComposerModel
from torch_ranks import across_ranks, rank

from benchmarks.conformance.case import Case, Result

TOKENS = sys.argv[1] == "tokens"


class Model(ComposerModel):
    """The network of a case with its loss."""

    def __init__(self, case: Case):
        super().__init__()
        self.network = Network(case)
        self.loss_of = loss_of(case)

    def forward(self, batch: Any) -> Any:
        return self.network(batch[0])

    def loss(self, outputs: Any, batch: Any) -> Any:
        return self.loss_of(outputs, batch[1])

    def eval_forward(self, batch: Any, outputs: Any = None) -> Any:
        return self.forward(batch)


class Notes(Callback):
    """Notes the weights at the first evaluation."""

    evaluated: Any = None

    def eval_start(self, state: Any, logger: Any) -> None:
        """Note the weights."""
        self.evaluated = weights(state.model) if self.evaluated is None else self.evaluated


class Run:
    """A trainer and what it is made of."""

    def __init__(self, case: Case, **more: Any):
        self.case = case
        self.model = Model(case)
        self.optimizer = optimizer_of(case, self.model)
        algorithms: list[Any] = []
        if case.clip is not None:
            algorithms.append(GradientClipping(clipping_type="norm", clipping_threshold=case.clip))
        self.averages = EMA(half_life=None, smoothing=case.average, update_interval="1ba") if case.average else None
        if self.averages:
            algorithms.append(self.averages)
        self.notes = Notes()
        self.trainer = Trainer(
            model=self.model,
            optimizers=self.optimizer,
            schedulers=schedule_of(case, self.optimizer) if "schedule" in case.needs else None,
            step_schedulers_every_batch=True,
            algorithms=algorithms,
            callbacks=[self.notes],
            eval_dataloader=_evaluator(case) if case.evaluates else None,
            device="cpu",
            device_train_microbatch_size=len(case.inputs[0]),
            accumulate_train_batch_on_tokens=TOKENS,
            progress_bar=False,
            auto_log_hparams=False,
            **more,
        )

    def result(self) -> Result:
        """Return what training has come to."""
        model = self.trainer.state.model
        average = None
        if self.averages:
            (average,) = self.averages.ema_model.named_parameters_dict.values()
        return result(model, self.optimizer, average=average, evaluated=self.notes.evaluated)


def train(case: Case) -> Result:
    """Train each epoch; a stopped run has saved after each of its batches."""
    if case.ranks > 1:
        os.environ["NODE_RANK"] = "0"
    if case.stop_after:
        with tempfile.TemporaryDirectory() as folder:
            before = Run(case, train_dataloader=_batches(case, 0), max_duration=f"{case.stop_after // case.window}ba",
                         save_folder=folder, save_interval="1ba")  # fmt: skip
            before.trainer.fit()
            before.trainer.close()
            run = Run(case, train_dataloader=_batches(case, 0), max_duration=f"{case.epochs}ep",
                      load_path=f"{folder}/latest-rank0.pt")  # fmt: skip
            run.optimizer.taken = before.optimizer.taken  # loading its state takes a step of a rate of zero
            run.trainer.fit()
    elif len(set(case.windows)) > 1:
        run = Run(case)
        for epoch in range(case.epochs):
            run.trainer.fit(train_dataloader=_batches(case, epoch), duration="1ep")
    else:
        run = Run(case, train_dataloader=_batches(case, 0), max_duration=f"{case.epochs}ep")
        run.trainer.fit()
    run.trainer.close()
    return run.result()


def _batches(case: Case, epoch: int) -> DataSpec:
    """Return the windows of an epoch as batches."""
    window = case.windows[epoch]
    pieces = tensors(case.micro_batches(rank()))
    groups = [pieces[start : start + window] for start in range(0, len(pieces), window)]
    sizes = [[len(x) for x, _ in group] for group in groups]
    batches = [tuple(torch.cat(columns) for columns in zip(*group)) for group in groups]
    full = len(case.inputs[0])
    by_default = all(set(rows[:-1]) <= {full} and rows[-1] <= full for rows in sizes)

    def split(batch: Any, _: Any) -> Any:
        (number,) = [number for number, made in enumerate(batches) if made[0] is batch[0]]
        return list(zip(*(column.split(sizes[number]) for column in batch)))

    return DataSpec(
        batches, split_batch=None if by_default else split, get_num_tokens_in_batch=_tokens(case) if TOKENS else None
    )


def _evaluator(case: Case) -> Evaluator:
    """Return an evaluation with the rows that are trained with."""
    return Evaluator(
        label="eval", dataloader=_batches(case, 0), metric_names=[], device_eval_microbatch_size=len(case.inputs[0])
    )


def _tokens(case: Case) -> Any:
    """Return the function that counts a batch: all its labels, and those that make the loss; or rows without labels."""

    def count(batch: Any) -> dict[str, Any]:
        inputs, targets = batch
        if targets.is_floating_point():
            return {"total": len(inputs), "loss_generating": len(inputs)}
        return {"total": targets.numel(), "loss_generating": items_of(case, targets)}

    return count


if __name__ == "__main__":
    serve_cases(
        across_ranks(train, __file__),
        ["mosaicml", "torch"],
        can=["clip", "schedule", "ema", "nan", "own optimizer", "class weights", "N that changes", "float16"]
        + ["two terms", "BatchNorm", "resume", "evaluation", "two ranks"],
    )
