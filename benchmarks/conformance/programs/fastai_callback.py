"""fastai: the callback `GradientAccumulation`, by its documentation.

Its `n_acc` counts rows, not micro-batches: N micro-batches are expressed by the rows of a window of N. Schedules are
functions of the part of the training that is done, which counts micro-batches; here this is turned into windows.
"""

from __future__ import annotations

from typing import Any

from serving import serve_cases

from torch_parts import Network, loader, loss_of, optimizer_of, result, weights  # isort: skip

from fastai.callback.core import Callback
from fastai.callback.schedule import ParamScheduler
from fastai.callback.training import GradientAccumulation, GradientClip
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.optimizer import OptimWrapper

from benchmarks.conformance.case import Case, Result


def train(case: Case) -> Result:
    """Train with the callbacks that the case needs."""
    network = Network(case)
    optimizer = optimizer_of(case, network)
    pieces = loader(case)
    callbacks: list[Any] = []
    if case.clip is not None:
        callbacks.append(GradientClip(case.clip))
    if "schedule" in case.needs:
        micro_batches = case.epochs * len(pieces)
        callbacks.append(ParamScheduler({"lr": lambda done: case.rate(round(done * micro_batches) // case.window)}))
    notes = Notes()
    learner = Learner(
        DataLoaders(pieces, pieces, device="cpu"),
        network,
        loss_of(case),
        opt_func=OptimWrapper(opt=optimizer),
        lr=case.rate(0),
        cbs=[notes, *callbacks],
    )
    with learner.no_bar(), learner.no_logging():
        if "N that changes" in case.needs:
            for size in case.windows:
                learner.fit(1, cbs=GradientAccumulation(_rows(case, size)))
        else:
            learner.fit(case.epochs, cbs=GradientAccumulation(_rows(case, case.window)))
    return result(network, optimizer, evaluated=notes.evaluated)


class Notes(Callback):
    """Notes the weights at the first validation."""

    evaluated: Any = None

    def before_validate(self) -> None:
        """Note the weights."""
        self.evaluated = weights(self.learn.model) if self.evaluated is None else self.evaluated


def _rows(case: Case, size: int) -> int:
    """Return the rows of the first window: all full windows of a case have as many."""
    return sum(len(rows) for rows in case.inputs[:size])


if __name__ == "__main__":
    serve_cases(
        train,
        ["fastai", "torch"],
        can=["clip", "schedule", "nan", "own optimizer", "class weights", "N that changes", "float16", "two terms"]
        + ["BatchNorm", "evaluation"],
        cannot={
            "ema": "It has no average of the weights.",
            "resume": "It saves and resumes at the end of an epoch, with fit(start_epoch=...), not inside it.",
            "two ranks": "not tried: its distributed loader shards the rows itself.",
        },
    )
