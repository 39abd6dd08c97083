"""Scenarios of ranks with a loss of several terms.

Run by tests/ranks_job.py.
"""

from __future__ import annotations

import numpy as np
from mindspore import nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback, Model

import ranks
import several_terms
from ms_accum import AccumulatedTrainStep, FlushTail, GradientAccumulation, Terms, ZeroOptimizer
from ms_accum.training import shares
from reference import digest

N = 2


def data_of(rank):
    """Micro-batches of other numbers of rows on each rank, of a window and of a tail; on rank 1 one has no labels."""
    return several_terms.data_of((4, 5 - rank, 2 + rank), seed=rank, masked=[0] if rank == 1 else [])


def spoiled(rank):
    """The same, but the first one of rank 0 is not finite."""
    data = data_of(rank)
    return [(np.full_like(data[0][0], np.inf), data[0][1]), *data[1:]] if rank == 0 else data


def trained_by(group, data=data_of, weight=several_terms.WEIGHT, loss_fn=None, zero=False, **options):
    network = several_terms.Net()
    trained = network.trainable_params()
    optimizer = ZeroOptimizer(lambda parameters: nn.SGD(parameters, 1.0), trained) if zero else nn.SGD(trained, 1.0)
    coefficients = {name: value for name, value in several_terms.COEFFICIENTS.items() if name in weight}
    model = GradientAccumulation(
        network, loss_fn or several_terms.Loss(), optimizer, weight=weight, coefficients=coefficients, **options
    )
    records = ranks.train(model, data(group.rank), N, epochs=1)
    return {
        "parameters": [parameter.asnumpy().tolist() for parameter in trained],
        "digest": digest(trained),
        "losses": [record.loss for record in records],
        "terms": [dict(record.terms) for record in records],
        "left out": model.left_out,
        "counts": [model.updates, model.skipped],
    }


def nothing_counts(group):
    """A window in which nothing counts on any rank, between two others; in the first one nothing counts on rank 0."""
    masked = [0, 1, 2, 3] if group.rank == 0 else [2, 3]
    data = several_terms.data_of((2, 3, 2, 2, 3, 1), seed=group.rank, masked=masked)
    weight = {"ce": several_terms.WEIGHT["ce"]}
    return trained_by(group, lambda rank: data, weight, OnlyTokens())


class OnlyTokens(several_terms.Loss):
    """One term, as a dict."""

    def construct(self, logits, labels):
        return {"ce": super().construct(logits, labels)["ce"]}


def factors(group):
    """The functional pattern: the divisors are those of all ranks."""
    found = Terms(several_terms.WEIGHT, group=group).factors(data_of(group.rank)[:N])
    return [values.asnumpy().tolist() for values, _ in found]


def in_model(group):
    """The same in a step of MindSpore's `Model`."""
    network = several_terms.Net()
    optimizer = nn.SGD(network.trainable_params(), 1.0)
    options = {"weight": several_terms.WEIGHT, "coefficients": several_terms.COEFFICIENTS, "check": "off"}
    step = AccumulatedTrainStep((network, several_terms.Loss()), optimizer, N, **options)
    watch = _Watch(step)
    data = GeneratorDataset(data_of(group.rank), ["x", "y"], shuffle=False)
    Model(step).train(1, data, callbacks=[FlushTail(), watch], dataset_sink_mode=False)
    return {
        "parameters": [parameter.asnumpy().tolist() for parameter in network.trainable_params()],
        "digest": digest(network.trainable_params()),
        "losses": watch.losses,
        "terms": watch.terms,
    }


class _Watch(Callback):
    def __init__(self, step):
        self.step, self.losses, self.terms = step, [], []

    def on_train_step_end(self, run_context):
        if self.step.updates > len(self.terms):
            self.losses.append(float(run_context.original_args().net_outputs.asnumpy()))
            self.terms.append(self.step.terms)


def exchanges(group):
    """How many numbers the host gathers in a run of two windows: once for each, and once when all data are over."""
    counted, gather = [], shares.gather_numbers

    def count(numbers, of):
        counted.append(len(numbers))
        return gather(numbers, of)

    shares.gather_numbers = count
    try:
        trained_by(group)
    finally:
        shares.gather_numbers = gather
    return counted


def run_scenarios(group):
    every = {"sync_every_micro_batch": True}
    return {
        "trained": ranks.on_host(trained_by, group),
        "in step": ranks.on_host(trained_by, group, **every),
        "in model": ranks.on_host(in_model, group),
        "zero 2": ranks.on_host(trained_by, group, zero=True, **every),
        "left out": ranks.on_host(trained_by, group, spoiled, nonfinite="skip_micro"),
        "nothing counts": ranks.on_host(nothing_counts, group),
        "factors": ranks.on_host(factors, group),
        "exchanges": ranks.on_host(exchanges, group),
    }
