"""Scenarios of several ranks that sum gradients at the end of a window.

Run by tests/ranks_job.py. Scenarios of the host compile nothing.
"""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import anf_ir_pb2

from helpers import Recorder, batches, compiled_step, cross_entropy, values
from ms_accum import (
    Accumulator,
    Checkpointer,
    GradientAccumulation,
    Stopped,
    TrainOptim,
    ZeroOptimizer,
    total,
)
from ms_accum.training.loop import RunState
from reference import digest

# Of all ranks together: uneven, and for N = 3 the last window is shorter. Two sizes, which are two graphs.
ROWS = [8, 8, 5, 8, 8, 8, 8, 5, 8, 5]
N = 3


def on_host(scenario, *arguments, **options):
    """Run a scenario with nothing compiled, by MindSpore's own switch."""
    before = os.environ.get("MS_JIT")  # scenarios may be nested
    os.environ["MS_JIT"] = "0"
    try:
        return scenario(*arguments, **options)
    finally:
        del os.environ["MS_JIT"]
        if before is not None:
            os.environ["MS_JIT"] = before


def network_of(seed=1, features=6):
    ms.set_seed(seed)
    return nn.SequentialCell(nn.Flatten(), nn.Dense(features, 5), nn.ReLU(), nn.Dense(5, 10))


def driver_of(network, make=nn.Momentum, reduction="mean", **options):
    loss_fn = cross_entropy(reduction)
    optimizer = make(network.trainable_params(), 0.05, 0.9)
    return GradientAccumulation(network, loss_fn, optimizer, reduction=reduction, **options)


def all_data(rows):
    return batches(np.random.RandomState(3), rows)


def own_data(group):
    return all_data(ROWS)[group.rank :: group.size]


class Batches(list):
    """Batches with `get_batch_size`, as a dataset has it."""

    def get_batch_size(self):
        return len(self[0][0])


def even_data(group):
    """For what has nothing to do with sizes."""
    return Batches(all_data([8] * 8 * group.size)[group.rank :: group.size])


def train(model, data, mini_steps=N, epochs=2, **options):
    """Train and return the record of each update."""
    recorder = Recorder()
    model.train_process(epochs, data, mini_steps, report=(recorder,), ckpt_path=None, **options)
    return [record._replace(seconds=0.0) for record in recorder.records]


def final_state_of(model):
    parameters = values(model._step.optimizer.get_parameters())
    return {
        "parameters": [array.tolist() for array in parameters],
        "digest": digest(model._step.optimizer.get_parameters()),
    }


def trained(group):
    """From weights that only rank 0 has."""
    model = driver_of(network_of(seed=1 + group.rank), clip_norm=0.5)
    records = train(model, own_data(group))
    return {**final_state_of(model), "records": records}


def nodes_of(cell):
    """Return the nodes of a Cell's compiled graph, those in branches left out, and which of them are collectives."""
    model = anf_ir_pb2.ModelProto()
    model.ParseFromString(cell.get_func_graph_proto())
    nodes = list(model.graph.node)
    return nodes, [node for node in nodes if node.op_type.endswith(("Reduce", "Gather", "Broadcast"))]


def operators_of(cell):
    """Return how often each collective is in a Cell's compiled graph."""
    names = [node.op_type for node in nodes_of(cell)[1]]
    return {name: names.count(name) for name in names}


def functional(group, mini_steps):
    """An Accumulator inside a compiled step."""
    network = network_of()
    loss_fn = cross_entropy()
    optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
    accumulator = Accumulator(optimizer, mini_steps, reduction="mean", network=network)
    train_step = compiled_step(network, loss_fn, accumulator, optimizer)

    for x, y in own_data(group):
        train_step(x, y)
    accumulator.flush()
    parameters = [array.tolist() for array in values(optimizer.parameters)]
    return {"parameters": parameters, "digest": digest(optimizer.parameters), "updates": int(accumulator.updates)}


def reduced_already(group):
    """What an Accumulator warns of, with own gradients, and with those that MindSpore has averaged over the ranks."""
    seen = []
    for reduces in (False, True):
        network, loss_fn = network_of(), cross_entropy()
        optimizer = nn.SGD(network.trainable_params(), 0.05)
        accumulator = Accumulator(optimizer, 2, reduction="mean", network=network)
        reduce = nn.DistributedGradReducer(optimizer.parameters)

        def forward(x, y, network=network, loss_fn=loss_fn):
            return loss_fn(network(x), y)

        for x, y in own_data(group)[:4]:
            gradients = ms.grad(forward, None, optimizer.parameters)(x, y)
            accumulator(reduce(gradients) if reduces else gradients, x.shape[0])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            accumulator.flush()
            accumulator.flush()
        seen.append([str(warning.message) for warning in caught])
    return seen


def same_rows(group):
    """What the driver warns of when all ranks read the same rows, and when each reads its own."""
    seen = []
    for data in (all_data([8] * 4), own_data(group)):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            train(driver_of(network_of()), data, epochs=1)
        seen.append([str(warning.message) for warning in caught])
    return seen


WEIGHT = 40  # of a window of all ranks
OWN_ROWS = ([8, 3, 5, 8, 8, 3, 8, 5], [2, 2, 8, 3, 3, 8, 5, 2, 2, 5])


def by_weight(group):
    """Windows that are full with a number of rows: ranks read different numbers of micro-batches for each."""
    data, folder = batches(np.random.RandomState(group.rank), OWN_ROWS[group.rank]), Path(sys.argv[1]) / "by weight"
    whole, first, resumed = (driver_of(network_of()) for _ in range(3))
    records = train(whole, data, None, window_weight=WEIGHT)
    stop = (lambda: True) if group.rank == 1 else None
    with contextlib.suppress(Stopped):
        train(first, data, None, window_weight=WEIGHT, checkpointer=Checkpointer(folder, stop=stop))
    total([0], group)  # no rank looks for the state before it is saved
    train(resumed, data, None, window_weight=WEIGHT, checkpointer=Checkpointer(folder, keep=2, resume="auto"))
    return {
        **final_state_of(whole),
        "samples": [record.samples for record in records],
        "updates": [first.updates, whole.updates, resumed.updates],
        "resumed": final_state_of(resumed)["digest"],
    }


def own_weights(group):
    """The Cells and the Accumulator, of networks that each rank has made for itself."""
    digests = []
    for make in (
        lambda network, optimizer: Accumulator(optimizer, 2, network=network),
        lambda network, optimizer: TrainOptim(optimizer, optimizer.parameters.clone("sum", "zeros")),
    ):
        network = network_of(seed=1 + group.rank)
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        before = digest(optimizer.parameters)
        make(network, optimizer)
        digests.append([before, digest(optimizer.parameters)])
    return digests


def flushed(group):
    """Rank 0 alone holds a micro-batch when all of them flush."""
    network = network_of()
    model = driver_of(network, tail="carry")
    data = even_data(group)[: 4 if group.rank == 0 else 3]
    train(model, data, epochs=1)
    micro_batches, updated, again = model.micro_batches, model.flush(), model.flush()
    sums = total([2**40 + group.rank, 0, 2**24 - 1], group)
    return {"held": micro_batches, "updated": [updated, again], "sums": sums, **final_state_of(model)}


# Micro-batches of each rank: rank 0 has none in the last window, and a short one before it.
SHARDS = (5, 7)


def uneven_data(rank):
    """Return a rank's micro-batches, of uneven numbers of rows."""
    return batches(np.random.RandomState(30 + rank), (8, 5, 8, 3, 8, 8, 5)[: SHARDS[rank]])


class OfUnknownSize:
    """Batches without `__len__`."""

    def __init__(self, data):
        self.data = data

    def __iter__(self):
        return iter(self.data)


def weights_of(model):
    weights = model._step.optimizer.parameters
    return {"parameters": [array.tolist() for array in values(weights)], "digest": digest(weights)}


def uneven(group):
    """Ranks with other numbers of windows, of data whose size is not known."""
    model = driver_of(network_of(seed=1 + group.rank), clip_norm=0.5, sync_every_micro_batch=True)
    records = train(model, OfUnknownSize(uneven_data(group.rank)))
    return {**weights_of(model), "records": records}


def batches_to_split(rank):
    """Return complete batches: rank 0 has one more."""
    return batches(np.random.RandomState(40 + rank), (7, 3, 5)[rank:])


def split(group):
    """Complete batches that are split, into other numbers of micro-batches on each rank, of which each is summed."""
    data = batches_to_split(group.rank)
    model = driver_of(network_of(seed=1 + group.rank), clip_norm=0.5, sync_every_micro_batch=True)
    records = train(model, data, None, micro_batch_size=2 + group.rank)
    return {**weights_of(model), "records": records}


def uneven_and_resumed(group):
    """A state is saved at each window's end, and a run is resumed from each of them."""
    folder, models = Path(sys.argv[1]) / "uneven", []
    train(driver_of(network_of()), uneven_data(group.rank), checkpointer=Checkpointer(folder, every=1, keep=9))
    for number in range(1, 7):
        total([0], group)
        state = folder / f"state-{number:08}.safetensors"
        models.append(driver_of(network_of(seed=9)))
        states = Checkpointer(folder.with_name(f"uneven {number}"), resume=state)
        train(models[-1], uneven_data(group.rank), checkpointer=states)
    return [[model.updates, final_state_of(model)["digest"]] for model in models]


def carried_and_resumed(group):
    """Tails that are carried: saved inside a window of two epochs, resumed, and refused if the ranks' tails differ."""
    data, folder, seen = even_data(group)[:4], Path(sys.argv[1]) / "carried", []
    for options in ({}, {"max_updates": 1, "checkpointer": Checkpointer(folder)}, {"checkpointer": None}):
        if "checkpointer" in options and options["checkpointer"] is None:
            total([0], group)
            options = {"checkpointer": Checkpointer(folder, resume="auto")}
        model = driver_of(network_of(), tail="carry")
        train(model, data, epochs=3, **options)
        seen.append([model.updates, final_state_of(model)["digest"]])
    try:
        states = Checkpointer(folder.with_name("refused"))
        train(driver_of(network_of(), tail="carry"), data[group.rank :], checkpointer=states)
    except RuntimeError as error:
        seen.append(str(error))
    return seen


def stopped_and_resumed(group):
    """The last rank is asked to stop in the middle of its second window; all resume later."""
    folder = Path(sys.argv[1]) / "states"
    uninterrupted = driver_of(network_of())
    train(uninterrupted, even_data(group))
    first, message = driver_of(network_of()), None
    stop = (lambda: first.updates == 1) if group.rank == group.size - 1 else None
    try:
        train(first, even_data(group), checkpointer=Checkpointer(folder, stop=stop))
    except Stopped as stopped:
        message = str(stopped)
    total([0], group)  # no rank looks for the state before it is saved
    second = driver_of(network_of(seed=9))
    states = Checkpointer(folder, keep=2, resume="auto")
    train(second, even_data(group), checkpointer=states)
    return {
        "said": message,
        "updates": [first.updates, second.updates],
        "digests": [final_state_of(model)["digest"] for model in (uninterrupted, second)],
        **final_state_of(uninterrupted),
    }


def optimizer_of(network, make, zero):
    parameters = network.trainable_params()
    return ZeroOptimizer(make, parameters) if zero else make(parameters)


def adam_of(network, zero):
    return optimizer_of(network, lambda parameters: nn.Adam(parameters, 0.01, weight_decay=0.1), zero)


def momentum_of(network, zero):
    """Return the optimizer that compiles faster."""
    return optimizer_of(network, lambda parameters: nn.Momentum(parameters, 0.05, 0.9, weight_decay=0.1), zero)


def adam_driver(zero):
    network = network_of()
    return GradientAccumulation(network, cross_entropy(), adam_of(network, zero), clip_norm=0.5)


def complete_state_of(model):
    state = RunState(model._network, model._step).parameters()
    return {name: parameter.asnumpy().tolist() for name, parameter in state.items()}


def sharded(group):
    """Adam's state complete and sharded, and runs that continue from one kind of state with the other optimizer."""
    folder, models = Path(sys.argv[1]) / "zero", [adam_driver(zero) for zero in (False, True)]
    for model in models:
        train(model, own_data(group))
    states = [complete_state_of(model) for model in models]
    with contextlib.suppress(Stopped):
        stop = {"stop": lambda: True} if group.rank == 0 else {}
        train(adam_driver(zero=True), own_data(group), checkpointer=Checkpointer(folder, **stop))
    total([0], group)
    resumed = adam_driver(zero=False)
    train(resumed, own_data(group), checkpointer=Checkpointer(folder, keep=2, resume="auto"))
    again = adam_driver(zero=True)
    saved = Checkpointer(folder.with_name("more"), resume=Path(sys.argv[1]) / "zero" / "state-00000002.safetensors")
    train(again, own_data(group), epochs=3, checkpointer=saved)
    plain = adam_driver(zero=False)
    train(plain, own_data(group), epochs=3)
    kept = [own for own in models[1]._step.optimizer.inner.get_parameters() if own.name.startswith("moment1.")]
    return {
        "plain": states[0],
        "sharded": states[1],
        "resumed": complete_state_of(resumed),
        "more": [complete_state_of(model) for model in (plain, again)],
        "kept": [own.size for own in kept],
    }


def run_scenarios(group):
    return {
        "mean 3": trained(group),
        "reduced": on_host(reduced_already, group),
        "same rows": on_host(same_rows, group),
        "by weight": on_host(by_weight, group),
        "own weights": own_weights(group),
        "flushed": on_host(flushed, group),
        "uneven": on_host(uneven, group),
        "split": on_host(split, group),
        "uneven and resumed": on_host(uneven_and_resumed, group),
        "carried": on_host(carried_and_resumed, group),
        "resumed": on_host(stopped_and_resumed, group),
        "zero": on_host(sharded, group),
    }
