"""Scenarios of ranks whose settings differ, or whose numbers of micro-batches do.

Run by tests/ranks_job.py.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from functools import partial
from itertools import count
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn, ops
from mindspore.train import Callback, Model

import ranks
import ranks_in_model
from helpers import cross_entropy, dataset, micro_batch
from ms_accum import (
    AccumulatedTrainStep,
    Accumulator,
    Checkpointer,
    Ema,
    FlushTail,
    GradientAccumulation,
    ResumableLoop,
    SaveStates,
    Stopped,
    TrainForwardBackward,
)
from ms_accum.ranks import group as collectives
from reference import digest
from ways import Half

FOLDER = Path(sys.argv[1]) / "agreement" if len(sys.argv) > 1 else Path()
N = 3


class Sets(Callback):
    """Calls a function at the end of epoch 1."""

    def __init__(self, change):
        self.change = change

    def on_train_epoch_end(self, run_context):
        if run_context.original_args().cur_epoch_num == 1:
            self.change()


def error_of(attempt):
    """Return the error that each rank sees, None if there is none."""
    try:
        attempt()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None


def network_of(own, frozen=4):
    """Return a network of the seed `own`, with a frozen layer of this size."""
    network = ranks.network_of(seed=own)
    network.append(nn.Dense(10, frozen))
    for parameter in network[-1].get_parameters():
        parameter.requires_grad = False
    return network


def settings_that_differ(group):
    """On rank 0 each is another one than on the others: nothing is trained."""
    first = group.rank == 0

    def driver(network=None, rate=0.1, order=1, loss_fn=None, **options):
        network = network or ranks.network_of()
        optimizer = nn.Momentum(network.trainable_params()[::order], rate, 0.9)
        return GradientAccumulation(network, loss_fn or cross_entropy(), optimizer, **options)

    def run(mini_steps=2, **options):
        ranks.train(driver(), ranks.even_data(group)[:4], mini_steps, **options)

    def forward_backward(sens):
        network = nn.WithLossCell(ranks.network_of(), cross_entropy())
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        return TrainForwardBackward(network, optimizer, optimizer.parameters.clone("sum", "zeros"), sens)

    def accumulator(steps=2):
        network = ranks.network_of()
        return Accumulator(nn.SGD(network.trainable_params(), 0.1), steps, network=network)

    def step(reduction):
        network = ranks.network_of()
        parts, optimizer = (network, cross_entropy()), nn.SGD(network.trainable_params(), 0.1)
        return AccumulatedTrainStep(parts, optimizer, 2, reduction=reduction)

    other = ranks.network_of(seed=1 + group.rank)  # another initialization is no difference
    tries = {
        "clip_norm": lambda: driver(clip_norm=1.0 if first else None),
        "rate": lambda: driver(rate=0.1 if first else 0.2),
        "order": lambda: driver(order=1 if first else -1),
        "loss": lambda: driver(loss_fn=None if first else nn.CrossEntropyLoss()),
        "frozen": lambda: driver(network_of(1, frozen=4 if first else 5)),
        "checkpointer": lambda: run(checkpointer=Checkpointer(FOLDER / "one") if first else None),
        "growing": lambda: run({0: 1, 4: 4} if first else {0: 1, 2: 2, 3: 3, 4: 1}),
        "way": lambda: driver() if first else accumulator(),
        "forward": lambda: forward_backward(2.0 if first else 4.0),
        "accumulator steps": lambda: accumulator(steps=2 if first else 3),
        "step": lambda: step("mean" if first else "sum"),
        "equal": lambda: driver(other),
    }
    return {name: error_of(attempt) for name, attempt in tries.items()}


def folders_per_machine(group):
    """Rank 0 finds its state, the others nothing; or all find one, which is another one on each rank."""
    data = ranks.even_data(group)[:4]

    def driver(states, seed, **options):
        network = ranks.network_of(seed)
        optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
        model = GradientAccumulation(network, cross_entropy(), optimizer, **options)
        ranks.train(model, data, 2, 1, checkpointer=states)

    def loop(states, seed, **options):
        network = ranks.network_of(seed)
        optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
        ResumableLoop(states, network, Accumulator(optimizer, 2, network=network, **options)).__enter__().__exit__(None)

    errors = {}
    for way, has in ((driver, group.rank == 0), (loop, True)):
        folder, seed = FOLDER / f"{way.__name__} {group.rank}", 1 + group.rank
        if has:
            way(Checkpointer(folder), seed, group=collectives.Group(0, 1))
        states = Checkpointer(folder, resume="auto", allow_config_change=True)
        errors[way.__name__] = error_of(partial(way, states, seed))
    return errors


def drifted(group):
    """Rank 0 alone changes something at the end of epoch 1."""
    data = ranks.even_data(group)[:4]

    def rate_of(optimizer):
        return lambda: group.rank or ops.assign(optimizer.learning_rate, Tensor(0.5, ms.float32))

    def weights_of(optimizer, by):
        first = optimizer.parameters[0]
        return lambda: group.rank or ops.assign(first, first * (1 + by))

    def driver(change):
        model = ranks.driver_of(ranks.network_of())
        error = error_of(lambda: ranks.train(model, data, 2, 3, callbacks=Sets(change(model._step.optimizer))))
        return [error, model.updates]

    def accumulator(change):
        network = ranks.network_of()
        optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
        system = Accumulator(optimizer, 2, network=network)
        grads = tuple(parameter * 0.1 for parameter in optimizer.parameters)
        error = None
        for epoch in range(3):
            for _ in range(4):
                system(grads)
            if epoch == 1:
                change(optimizer)()
            error = error or error_of(system.flush)
            if error:
                break
        return [error, int(system.updates)]

    def model(change):
        step = ranks_in_model.step_of(ranks.network_of())
        callbacks = [FlushTail(), Sets(change(step.optimizer))]  # in the order in which the change comes last
        error = error_of(lambda: Model(step).train(3, dataset(data), callbacks=callbacks))
        return [error, step.updates]

    ways = {"driver": driver, "accumulator": accumulator, "model": model}
    seen = {f"{name} rate": way(rate_of) for name, way in ways.items()}
    seen["driver weights"] = driver(lambda optimizer: weights_of(optimizer, 0.01))
    # One rounding more is what ranks on different machines may differ by.
    return {**seen, "rounding": driver(lambda optimizer: weights_of(optimizer, 2e-7))}


# Micro-batches of each rank, by its number: the last window of 3 has none of one rank; or one has more windows.
SHARDS = {"none": (4, 3, 5), "equal": (6, 6, 6), "more windows": (9, 3, 4)}


def value(rank, number):
    return float(1 + rank + 2 * number)


def rows(rank, number):
    return 1 + (rank + number) % 3


def own_shard(group, name):
    """Return this rank's micro-batches."""
    rank, numbers = group.rank, range(SHARDS[name][group.rank])
    return [micro_batch(*[value(rank, number)] * 2, rows=rows(rank, number)) for number in numbers]


def looped(group):
    """Train with the loop of README's Accumulator: micro-batches, then `flush`, of which one rank has no rest."""
    network, ema = Half(), Ema(0.5)
    optimizer = nn.SGD([network.w], 0.01)
    options = {"network": network, "ema": ema, "loss_scale": amp.DynamicLossScaler(8.0, 2, 2)}
    accumulator = Accumulator(optimizer, N, **options)

    def forward(x):
        return accumulator.scale(network(x))

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters)
    flushed = []
    for _ in range(2):
        for (x,) in own_shard(group, "none"):
            accumulator(grad_fn(x)[1])
        flushed.append([accumulator.flush(), accumulator.flush()])
    return {
        "weights": network.w.asnumpy().tolist(),
        "average": ema.state["of.w"].asnumpy().tolist(),
        "counts": [int(accumulator.updates), int(accumulator.skipped), int(accumulator.micro_batches), ema.updates],
        "scale": [accumulator.loss_scale, accumulator.overflows],
        "flushed": flushed,
        "norm": float(accumulator.grad_norm),
    }


def resized(group):
    """Rank 0 alone changes the size of its windows."""
    network = Half()
    accumulator = Accumulator(nn.SGD([network.w], 0.01), N, reduction="mean", network=network)
    if group.rank == 0:
        accumulator.accumulate_step = 2
    for number in range(3):
        accumulator((Tensor([1.0, number], ms.float32),), 1.0)
    return error_of(accumulator.flush)


def stepped(group):
    """A step of which one rank runs more windows: the others take part in them."""
    network = Half()
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 0.01), N, check="off")
    for _ in range(2):
        for columns in own_shard(group, "more windows"):
            step(*columns)
        step.flush()
    return [network.w.asnumpy().tolist(), step.updates, step.micro_batches]


def apart(group):
    """What is said to ranks of which one is ahead of the others."""
    network = Half()
    accumulator = Accumulator(nn.SGD([network.w], 0.01), N, network=network)
    ops.assign(accumulator.updates, Tensor(3 - group.rank, ms.int32))
    with ResumableLoop(Checkpointer(FOLDER / "apart"), network, accumulator) as loop:
        return [error_of(accumulator.flush), error_of(lambda: loop.after_micro_batch(2, 3 - group.rank))]


def loop_resumed(group):
    """Rank 1 is asked to stop inside a window: all stop at its end."""
    seen = []
    for stops in (True, False):
        network, asked = Half(), count(1)
        accumulator = Accumulator(nn.SGD([network.w], 0.01), N, reduction="mean", network=network)
        grad_fn = ms.value_and_grad(network, None, accumulator.optimizer.parameters)
        stop = (lambda asked=asked: next(asked) >= 2) if stops and group.rank == 1 else None
        states = Checkpointer(FOLDER / "loop", every=1, resume="auto", stop=stop)
        with contextlib.suppress(Stopped), ResumableLoop(states, network, accumulator) as loop:
            seen.append([loop.epoch, loop.batches, int(accumulator.updates)])
            for epoch in range(loop.epoch, 3):
                for number, (x,) in enumerate(own_shard(group, "equal"), 1):
                    if number > loop.batches:
                        accumulator(grad_fn(x)[1], x.shape[0])
                        loop.after_micro_batch(epoch, number)
                accumulator.flush()
                loop.after_micro_batch(epoch + 1, 0)
    return {"begun": seen, "weights": network.w.asnumpy().tolist(), "updates": int(accumulator.updates)}


class StopsOnRank1(Callback):
    def __init__(self, group, at=1):
        self.group, self.at, self.steps = group, at, 0

    def on_train_step_end(self, run_context):
        self.steps += 1
        if self.group.rank == 1 and self.steps == self.at:
            run_context.request_stop()


def model_stopped(group):
    """A callback of rank 1 requests a stop in epoch 1 of 2: all stop at its end."""
    data, seen = ranks.own_data(group), {}

    def run(*callbacks, states=None):
        step, shard = ranks_in_model.step_of(ranks.network_of()), dataset(data)
        saves = [] if states is None else [SaveStates(states, step, shard)]
        begun = {"initial_epoch": saves[0].initial_epoch} if saves else {}
        error = error_of(lambda: Model(step).train(2, shard, callbacks=[*callbacks, *saves], **begun))
        return [error, step.updates, digest(step.optimizer.parameters), *begun.values()]

    folder = FOLDER / "model"
    seen["inside"] = run(StopsOnRank1(group), FlushTail(), states=Checkpointer(folder))
    seen["resumed"] = run(FlushTail(), states=Checkpointer(folder, resume="auto"))
    return seen


class Evaluates(Callback):
    """Evaluates the averages by itself, on some of the ranks."""

    def __init__(self, evaluate, does):
        self.evaluate, self.does = evaluate, does

    def on_train_epoch_end(self, run_context):
        if self.does:
            self.evaluate()


def model_evaluated(group):
    """A callback of one rank evaluates the averages, before and after the tail: training is the same."""
    data, seen = ranks.own_data(group), {}
    for name, does, first in (("nobody", False, True), ("first", True, True), ("last", True, False)):
        network = ranks.network_of()
        optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
        step = AccumulatedTrainStep((network, nn.CrossEntropyLoss()), optimizer, ranks.N, ema=Ema(0.5))
        model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"acc"})
        shard, test = dataset(data), dataset(data[:1])
        evaluates = Evaluates(partial(model.eval, test), does and group.rank == 0)
        callbacks = [evaluates, FlushTail()] if first else [FlushTail(), evaluates]
        error = error_of(partial(model.train, 2, shard, callbacks=callbacks))
        seen[name] = [error, digest(step.optimizer.parameters)]
    return seen


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


def left_out(group):
    """All micro-batches of rank 1 are NaN."""
    network, lines = Half(), Lines()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 0.01), check="off", nonfinite="skip_micro")
    data = [micro_batch(np.nan if group.rank == 1 else 1.0, 1.0) for _ in range(4)]
    logging.getLogger("ms_accum").addHandler(lines)
    ranks.train(model, data, 2, 2)
    logging.getLogger("ms_accum").removeHandler(lines)
    return {"left out": model.left_out, "lines": lines.lines, "updates": model.updates}


def run_scenarios(group):
    scenarios = {
        "settings": settings_that_differ,
        "folders": folders_per_machine,
        "drifted": drifted,
        "uneven": looped,
        "resized": resized,
        "stepped": stepped,
        "apart": apart,
        "loop resumed": loop_resumed,
        "model": model_stopped,
        "model evaluated": model_evaluated,
        "left out": left_out,
    }
    return {name: ranks.on_host(scenario, group) for name, scenario in scenarios.items()}
