"""Scenarios of ranks whose loss compares the rows of all of them.

Run by tests/ranks_job.py.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import nn

import ranks
import towers
from ms_accum import CoupledLoss, GradientAccumulation, ZeroOptimizer
from ms_accum.ranks.group import gather_rows
from reference import digest

N = 2


def data_of(rank):
    """Return micro-batches of other numbers of rows on each rank, of a window and of a tail."""
    return towers.pairs(np.random.RandomState(5 + rank), (4, 5 - rank, 2 + rank))


def windows(rank):
    """Return a rank's windows."""
    data = data_of(rank)
    return data[:N], data[N:]


def trained_by(group, zero=False, **options):
    """Train from weights that only rank 0 has."""
    ms.set_seed(1 + group.rank)
    network, loss_fn = towers.Towers(), towers.Tempered()
    trained = [*network.trainable_params(), *loss_fn.trainable_params()]
    optimizer = ZeroOptimizer(lambda parameters: nn.SGD(parameters, 1.0), trained) if zero else nn.SGD(trained, 1.0)
    model = GradientAccumulation(network, CoupledLoss(loss_fn), optimizer, inputs=2, **options)
    records = ranks.train(model, data_of(group.rank), N, epochs=2)
    parameters = [parameter.asnumpy() for parameter in trained]
    return {
        "parameters": [array.tolist() for array in parameters],
        "digest": digest(trained),
        "losses": [record.loss for record in records],
        "samples": [record.samples for record in records],
    }


def another_number(group):
    """The last rank has a window less."""
    network = towers.Towers()
    model = GradientAccumulation(
        network, CoupledLoss(towers.Tempered()), nn.SGD(network.trainable_params(), 1.0), inputs=2
    )
    data = data_of(group.rank)
    try:
        ranks.train(model, data[:N] if group.rank == group.size - 1 else data, N)
    except RuntimeError as error:
        return [str(error), model.updates]


def gathered(group):
    """Rows of types and bytes that no sum would leave alone, and of another number on each rank."""
    rows = [np.full((2 + group.rank, 3), value, kind) for value, kind in ((-1, np.int32), (group.rank, np.uint8))]
    results = [gather_rows(part, group) for part in rows]
    return [[array.tolist(), str(array.dtype), first] for array, first in results]


def run_scenarios(group):
    return {
        "trained": ranks.on_host(trained_by, group),
        "zero": ranks.on_host(trained_by, group, zero=True, sync_every_micro_batch=True),
        "another number": ranks.on_host(another_number, group),
        "gathered": gathered(group),
    }
