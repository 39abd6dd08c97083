"""Scenarios of ranks that train with MindSpore's Model, or with its callbacks.

Run by tests/ranks_job.py.
"""

from __future__ import annotations

import contextlib
import sys
from itertools import count
from pathlib import Path

from mindspore import nn
from mindspore.train import Callback, Model

import ranks
from helpers import Losses, cross_entropy, dataset, values
from ms_accum import AccumulatedTrainStep, Checkpointer, FlushTail, SaveStates, Stopped
from reference import digest


def step_of(network, **options):
    optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
    return AccumulatedTrainStep((network, cross_entropy()), optimizer, ranks.N, clip_norm=0.5, **options)


def trained(group):
    """From weights that only rank 0 has."""
    step = step_of(ranks.network_of(seed=1 + group.rank))
    Model(step).train(2, dataset(ranks.own_data(group)), callbacks=FlushTail())
    return {"digest": digest(values(step.optimizer.parameters))}


def another_number(group):
    """One rank has a micro-batch more."""
    data = ranks.all_data([8] * (3 + (group.rank == 0)))
    try:
        Model(step_of(ranks.network_of())).train(1, dataset(data), callbacks=[FlushTail()])
    except RuntimeError as error:
        return str(error)
    return ""


def resumed(group):
    """Rank 1 is asked to stop inside a window; all stop at its end, and resume from the state of rank 0."""
    folder, losses, asked = Path(sys.argv[1]) / "model", Losses(), count(1)
    for stop in (lambda: group.rank == 1 and next(asked) == 4, None):
        step, data = step_of(ranks.network_of(seed=1 + group.rank)), dataset(ranks.own_data(group))
        states = SaveStates(Checkpointer(folder, resume="auto", stop=stop), step, data)
        with contextlib.suppress(Stopped):
            callbacks = [losses, states, FlushTail()]
            Model(step).train(2, data, callbacks=callbacks, initial_epoch=states.initial_epoch)
    return {"digest": digest(values(step.optimizer.parameters)), "micro-batches": len(losses.seen)}


class StopsOnRank1(Callback):
    def __init__(self, group):
        self.group, self.results = group, []

    def on_train_step_end(self, run_context):
        if self.group.rank == 1:
            run_context.request_stop()

    def on_eval_end(self, run_context):
        self.results.append(run_context.original_args().eval_results["eval_loss"])


def stopped_by_a_callback(group, **options):
    """One rank's callback ends the run of all; each rank evaluates other data, and all get the results of rank 0."""
    model, stops = ranks.driver_of(ranks.network_of()), StopsOnRank1(group)
    valid = ranks.all_data([8, 5, 3])[group.rank : group.rank + 1]
    ranks.train(model, ranks.own_data(group), epochs=3, callbacks=stops, valid_dataset=valid, **options)
    return {"results": stops.results, "updates": model.updates}


def run_scenarios(group):
    return {
        "trained": ranks.on_host(trained, group),
        "another number": ranks.on_host(another_number, group),
        "resumed": ranks.on_host(resumed, group),
        "stopped": ranks.on_host(stopped_by_a_callback, group),
        "stopped inside": ranks.on_host(stopped_by_a_callback, group, eval_every=1),
    }
