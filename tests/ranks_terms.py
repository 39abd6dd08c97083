"""Scenarios of ranks with a loss of several terms.

Run by tests/ranks_job.py.
"""

from __future__ import annotations

from mindspore import nn

import ranks
import several_terms
from ms_accum import GradientAccumulation, Terms
from reference import digest

N = 2


def data_of(rank):
    """Micro-batches of other numbers of rows on each rank, of a window and of a tail; on rank 1 one has no labels."""
    return several_terms.data_of((4, 5 - rank, 2 + rank), seed=rank, masked=[0] if rank == 1 else [])


def trained_by(group, data, weight, loss_fn):
    network = several_terms.Net()
    model = GradientAccumulation(network, loss_fn, nn.SGD(network.trainable_params(), 1.0), weight=weight)
    records = ranks.train(model, data, N, epochs=1)
    return {
        "digest": digest(network.trainable_params()),
        "losses": [record.loss for record in records],
        "terms": [dict(record.terms) for record in records],
        "counts": [model.updates, model.skipped],
    }


def nothing_counts(group):
    """A window in which nothing counts on any rank, between two others; in the first one nothing counts on rank 0."""
    masked = [0, 1, 2, 3] if group.rank == 0 else [2, 3]
    data = several_terms.data_of((2, 3, 2, 2, 3, 1), seed=group.rank, masked=masked)
    weight = {"ce": several_terms.WEIGHT["ce"]}
    return trained_by(group, data, weight, OnlyTokens())


class OnlyTokens(several_terms.Loss):
    """One term, as a dict."""

    def construct(self, logits, labels):
        return {"ce": super().construct(logits, labels)["ce"]}


def factors(group):
    """The functional pattern: the divisors are those of all ranks."""
    found = Terms(several_terms.WEIGHT, group=group).factors(data_of(group.rank)[:N])
    return [values.asnumpy().tolist() for values, _ in found]


def refused(group):
    """The others of a window would run again, and be summed again, on one rank alone."""
    network = several_terms.Net()
    options = {"weight": several_terms.WEIGHT, "nonfinite": "skip_micro", "sync_every_micro_batch": True}
    try:
        GradientAccumulation(network, several_terms.Loss(), nn.SGD(network.trainable_params(), 1.0), **options)
    except ValueError as error:
        return str(error)


def run_scenarios(group):
    return {
        "nothing counts": ranks.on_host(nothing_counts, group),
        "factors": ranks.on_host(factors, group),
        "refused": ranks.on_host(refused, group),
    }
