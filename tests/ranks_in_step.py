"""Scenarios of ranks that sum gradients in every micro-batch, complete or in parts.

Run by tests/ranks_job.py, as tests/ranks.py.
"""

from __future__ import annotations

from itertools import combinations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import ranks
from helpers import Slope, cross_entropy
from ms_accum import (
    GradientAccumulation,
    TrainClear,
    TrainForwardBackward,
    TrainOptim,
    ZeroOptimizer,
)
from ms_accum.engine.config import checked, resolve
from ms_accum.engine.window import Window
from ms_accum.ranks import agreement, reduction
from reference import digest

IN_STEP = {"sync_every_micro_batch": True}
IGNORED = -100


def driver_of(zero, *, clip_norm=0.05, **options):
    network = ranks.network_of()
    optimizer = ranks.momentum_of(network, zero)
    return GradientAccumulation(network, nn.CrossEntropyLoss(), optimizer, clip_norm=clip_norm, **options)


def even(group):
    """The same number of micro-batches on all ranks, with different numbers of unmasked rows, in one shape."""
    count = [8, 5, 8, 8, 5, 8, 8, 8]
    data = [
        (x, ops.cat([y[:n], ops.full_like(y[n:], IGNORED)]))
        for n, (x, y) in zip(count, ranks.all_data([8] * len(count)))
    ]
    return data[group.rank :: group.size]


def trained(group, zero, **options):
    """Also the records: the norm before clipping is one of all ranks."""
    model = driver_of(zero, **options)
    records = ranks.train(model, even(group))
    return {"state": ranks.complete_state_of(model), "records": records}


def graphs(group):
    """The Cells by themselves, with ZeRO-2: what each sends, and what the accumulators hold."""
    network = ranks.network_of()
    optimizer = ranks.momentum_of(network, True)
    grad_sum = optimizer.inner.parameters.clone(prefix="grad_sum", init="zeros")
    loss = nn.WithLossCell(network, cross_entropy())
    options = checked("graphs", {"sync_every_micro_batch": True})
    config = resolve("graphs", optimizer, loss, options, divides=False)
    window = Window(config, grad_sum)
    forward_backward = TrainForwardBackward(loss, optimizer, window)
    update, clear = TrainOptim(optimizer, window), TrainClear(window)
    forward_backward(*ranks.even_data(group)[0])
    held = digest(grad_sum)
    updated, _ = update()
    clear()
    return {
        "operators": [ranks.operators_of(cell) for cell in (forward_backward, update, clear)],
        "unordered": [unordered(cell) for cell in (forward_backward, update)],
        "held": held,
        "elements": sum(total.size for total in grad_sum),
        "updated": bool(updated.asnumpy()),
        "after": digest(optimizer.parameters),
    }


def unordered(cell):
    """Count the pairs of collectives, outside of branches, neither of which waits for the other."""
    nodes, collectives = ranks.nodes_of(cell)
    inputs = {node.name: [argument.name for argument in node.input] for node in nodes}

    def before(name):
        ancestors, todo = set(), [name]
        while todo:
            new = set(inputs.get(todo.pop(), ())) - ancestors
            ancestors |= new
            todo += new
        return ancestors

    earlier = {node.name: before(node.name) for node in collectives}
    return sum(a not in earlier[b] and b not in earlier[a] for a, b in combinations(earlier, 2))


def narrow(group, zero, **options):
    """Sums of which one element does not fit into float16, and sums that do."""
    network = Slope(4, ms.float16)
    optimizer = nn.SGD([network.w], 2**-10)
    if zero:
        optimizer = ZeroOptimizer(lambda parts: nn.SGD(parts, 2**-10), [network.w])
    model, seen = GradientAccumulation(network, None, optimizer, reduction="sum", **options), []
    for last in (40_000.0, 1.0):
        x = Tensor(np.array([[1, 1, 1, last]], np.float16))
        model.train_process(1, [(x,)] * 4, 2, report=(), ckpt_path=None)
        seen.append([model.updates, model.skipped, network.w.asnumpy().tolist()])
    return seen


def passed_over(group, **options):
    """The first micro-batch of the last rank counts for nothing; every loss of it is 0/0."""
    data = [
        (x, ops.full_like(y, IGNORED) if group.rank == group.size - 1 and not n else y)
        for n, (x, y) in enumerate(even(group))
    ]
    model = driver_of(zero=False, **options)
    records = ranks.train(model, data)
    return {"state": ranks.complete_state_of(model), "records": records}


def sent(group):
    """All ranks get the parameters of rank 0, of any type."""
    random = np.random.RandomState(group.rank)
    arrays = [random.rand(3, 2), random.randint(0, 2**62, 5), random.rand(7).astype(np.float16), random.rand(4) < 0.5]
    parameters = [Parameter(Tensor(array)) for array in arrays]
    agreement.take_from_rank_0(parameters, group)
    return [parameter.astype(ms.float64).asnumpy().tolist() for parameter in parameters]


@ms.jit_class
class ScatterOnCPU:
    """What `ops.ReduceScatter` does, of operators that a CPU has."""

    def __init__(self, rank):
        self.rank, self.all_reduce = rank, ops.AllReduce()

    def __call__(self, rows):
        return self.all_reduce(rows)[self.rank : self.rank + 1]


def scattered(group):
    """The way of devices that can."""
    made = reduction.PartSums.__init__

    def with_scatter(self, *arguments):
        made(self, *arguments)
        self.reduce_scatter = ScatterOnCPU(group.rank)

    reduction.PartSums.__init__ = with_scatter
    seen = trained(group, True, **IN_STEP)
    reduction.PartSums.__init__ = made
    return seen


def run_scenarios(group):
    on_host = ranks.on_host
    kinds = {"plain": (False, {}), "in step": (False, IN_STEP), "zero 1": (True, {}), "zero 2": (True, IN_STEP)}
    return {
        "plain": on_host(trained, group, False),
        "zero 2": on_host(trained, group, True, **IN_STEP),
        "graphs": graphs(group),
        "passed over": [on_host(passed_over, group), on_host(passed_over, group, **IN_STEP)],
        "narrow": {name: on_host(narrow, group, zero, **options) for name, (zero, options) in kinds.items()},
        "scattered": on_host(scattered, group),
        "sent": sent(group),
    }
