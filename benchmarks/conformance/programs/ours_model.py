"""ms_accum's step in MindSpore's Model, as docs/how-to/model.md has it: `AccumulatedTrainStep` and `FlushTail`."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from typing import Any

import mindspore as ms
from mindspore_parts import Network, data_set, optimizer_of, weights
from ours_parts import CAN, PACKAGES, Stopped, Watch, across_ranks, loss_and_weight, sizes
from serving import serve_cases

from benchmarks.conformance.case import Case, Result
from ms_accum import AccumulatedTrainStep, Checkpointer, Ema, FlushTail, SaveStates, own_group


def train(case: Case) -> Result:
    """Train by `Model.train`, or `Model.fit` where there is an evaluation."""
    loss_fn, weight = loss_and_weight(case)

    def made() -> tuple[Any, AccumulatedTrainStep]:
        network = Network(case)
        average = Ema(case.average) if case.average else None
        options = {"reduction": case.reduction, "weight": weight, "clip_norm": case.clip, "ema": average}
        return network, AccumulatedTrainStep((network, loss_fn), optimizer_of(case, network), sizes(case), **options)

    network, step = made()
    data, watch = data_set(case, own_group().rank), Watch(network)
    with tempfile.TemporaryDirectory() as folder:
        if case.stop_after:
            states = SaveStates(Checkpointer(folder, every=1), step, data)
            with suppress(Stopped):
                ms.Model(step).train(case.epochs, data, callbacks=[FlushTail(), states, Stop(case.stop_after)])
            network, step = made()
            data = data_set(case)
            states = SaveStates(Checkpointer(folder, resume="auto"), step, data)
            ms.Model(step).train(case.epochs, data, callbacks=[FlushTail(), states], initial_epoch=states.initial_epoch)
        elif case.evaluates:
            model = ms.Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"watch": watch})
            model.fit(case.epochs, data, data_set(case), callbacks=[FlushTail()], dataset_sink_mode=False)
        else:
            ms.Model(step).train(case.epochs, data, callbacks=[FlushTail()], dataset_sink_mode=False)
    result = Result(weights(network), step.updates, evaluated=watch.noted)
    if step.ema is not None:
        with step.ema.applied():
            result.average = weights(network)
    return result


class Stop(ms.Callback):
    """Stops the run after a number of micro-batches."""

    def __init__(self, after: int):
        super().__init__()
        self.after = after

    def on_train_step_end(self, run_context: Any) -> None:
        """Stop."""
        if run_context.original_args().cur_step_num == self.after:
            raise Stopped


if __name__ == "__main__":
    serve_cases(across_ranks(train, __file__), PACKAGES, CAN)
