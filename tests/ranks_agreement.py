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
from helpers import cross_entropy, micro_batch
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
    TrainOptim,
    ZeroOptimizer,
)
from ms_accum.ranks import agreement, reduction
from ms_accum.ranks import group as collectives
from ms_accum.saving import training_state
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

    def run(**options):
        ranks.train(driver(), ranks.even_data(group)[:4], options.pop("mini_steps", 2), **options)

    def cells(rate=0.1, **options):
        network = ranks.network_of()
        optimizer = nn.SGD(network.trainable_params(), rate)
        return TrainOptim(optimizer, optimizer.parameters.clone("sum", "zeros"), **options)

    def forward_backward(sens):
        network = nn.WithLossCell(ranks.network_of(), cross_entropy())
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        return TrainForwardBackward(network, optimizer, optimizer.parameters.clone("sum", "zeros"), sens)

    def accumulator(rate=0.1, steps=2, **options):
        network = ranks.network_of()
        return Accumulator(nn.SGD(network.trainable_params(), rate), steps, network=network, **options)

    def step(**options):
        network = ranks.network_of()
        return AccumulatedTrainStep((network, cross_entropy()), nn.SGD(network.trainable_params(), 0.1), 2, **options)

    rate = 0.1 if first else 0.2
    other = ranks.network_of(seed=1 + group.rank)  # another initialization is no difference
    tries = {
        "clip_norm": lambda: driver(clip_norm=1.0 if first else None),
        "nonfinite": lambda: driver(nonfinite="skip_micro" if first else "skip_window"),
        "loss_scale": lambda: driver(loss_scale=8.0 if first else 16.0),
        "ema": lambda: driver(ema=Ema(0.9) if first else None),
        "rate": lambda: driver(rate=rate),
        "rates": lambda: driver(rate=[rate, rate]),
        "order": lambda: driver(order=1 if first else -1),
        "loss": lambda: driver(loss_fn=None if first else nn.CrossEntropyLoss()),
        "frozen": lambda: driver(network_of(1, frozen=4 if first else 5)),
        "valid_dataset": lambda: run(valid_dataset=ranks.even_data(group)[:1] if first else None, metrics={"acc"}),
        "checkpointer": lambda: run(checkpointer=Checkpointer(FOLDER / "one") if first else None),
        "callbacks": lambda: run(callbacks=Sets(lambda: None) if first else None),
        "max_updates": lambda: run(max_updates=1 if first else 2),
        "growing": lambda: run(mini_steps={0: 1, 4: 4} if first else {0: 1, 2: 2, 3: 3, 4: 1}),
        "way": lambda: driver() if first else accumulator(),
        "optim": lambda: cells(clip_norm=1.0 if first else 2.0),
        "optim rate": lambda: cells(rate=rate),
        "forward": lambda: forward_backward(2.0 if first else 4.0),
        "accumulator": lambda: accumulator(clip_norm=1.0 if first else None),
        "accumulator rate": lambda: accumulator(rate),
        "accumulator steps": lambda: accumulator(steps=2 if first else 3),
        "step": lambda: step(reduction="mean" if first else "sum"),
        "equal": lambda: driver(other),
    }
    return {name: error_of(attempt) for name, attempt in tries.items()}


def folders_per_machine(group):
    """Rank 0 finds its state, the others nothing; or all find one, which is another one on each rank."""
    errors = {}
    single = collectives.Group(0, 1)
    for name, has in (("first", group.rank == 0), ("each", True)):
        data = ranks.even_data(group)[:4]
        for way in ("driver", "loop"):
            folder = FOLDER / f"{name} {way} {group.rank}"
            for resume in (None, "auto"):
                if resume is None and not has:
                    continue
                own = {"group": single} if resume is None else {}
                network = ranks.network_of(seed=1 + group.rank)
                optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
                states = Checkpointer(folder, resume=resume, allow_config_change=True)
                if way == "driver":
                    model = GradientAccumulation(network, cross_entropy(), optimizer, **own)
                    train = partial(ranks.train, model, data, 2, 1, checkpointer=states)
                    errors[f"{name} {way}"] = error_of(train)
                else:
                    accumulator = Accumulator(optimizer, 2, network=network, **own)
                    loop = ResumableLoop(states, network, accumulator)
                    errors[f"{name} {way}"] = error_of(lambda loop=loop: loop.__enter__().__exit__(None))
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
        error = error_of(lambda: Model(step).train(3, ranks_in_model.dataset(data), callbacks=callbacks))
        return [error, step.updates]

    ways = {"driver": driver, "accumulator": accumulator, "model": model}
    seen = {f"{name} rate": way(rate_of) for name, way in ways.items()}
    seen["driver weights"] = driver(lambda optimizer: weights_of(optimizer, 0.01))
    # One rounding more is what ranks on different machines may differ by.
    return {**seen, "rounding": driver(lambda optimizer: weights_of(optimizer, 2e-7))}


# Micro-batches of each rank, by its number: equally many full windows of 3, so that the last window is a short one on
# all ranks, or has none of one rank; or more windows on one.
SHARDS = {"tail": (5, 4, 4), "none": (4, 3, 5), "equal": (6, 6, 6), "more windows": (9, 3, 4)}


def value(rank, number):
    return float(1 + rank + 2 * number)


def rows(rank, number):
    return 1 + (rank + number) % 3


def own_shard(group, name):
    """Return this rank's micro-batches."""
    rank, numbers = group.rank, range(SHARDS[name][group.rank])
    return [micro_batch(*[value(rank, number)] * 2, rows=rows(rank, number)) for number in numbers]


def looped(group, name, **options):
    """Train with the loop of README's Accumulator: micro-batches, then `flush`."""
    network = Half()
    optimizer = nn.SGD([network.w], 0.01)
    scaler = amp.DynamicLossScaler(8.0, 2, 2) if options.pop("scaled", False) else None
    ema = Ema(0.5)
    options = {"reduction": "mean", **options}
    accumulator = Accumulator(optimizer, N, network=network, ema=ema, loss_scale=scaler, **options)

    def forward(x):
        return accumulator.scale(network(x))

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters)
    weighs = options.get("reduction") != "sum"
    flushed, norms = [], []
    for _ in range(2):
        for (x,) in own_shard(group, name):
            accumulator(grad_fn(x)[1], *([x.shape[0]] if weighs else []))
        flushed.append([accumulator.flush(), accumulator.flush()])
        norms.append(float(accumulator.grad_norm))
    return {
        "weights": network.w.asnumpy().tolist(),
        "average": ema.state["of.w"].asnumpy().tolist(),
        "counts": [int(accumulator.updates), int(accumulator.skipped), int(accumulator.micro_batches), ema.updates],
        "scale": [accumulator.loss_scale, accumulator.overflows],
        "flushed": flushed,
        "norms": norms,
    }


def resized(group, **options):
    """Rank 0 alone changes the size of its windows."""
    network = Half()
    accumulator = Accumulator(nn.SGD([network.w], 0.01), N, reduction="mean", network=network, **options)
    if group.rank == 0:
        accumulator.accumulate_step = 2
    for number in range(3):
        accumulator((Tensor([1.0, number], ms.float32),), 1.0)
    return [error_of(accumulator.flush), int(accumulator.updates)]


def reductions(group, **options):
    """How often gradients are summed in two windows without a flush."""
    kept, calls = reduction._sum, []
    reduction._sum = lambda *arguments: calls.append(1) or kept(*arguments)
    network = Half()
    accumulator = Accumulator(nn.SGD([network.w], 0.01), N, reduction="mean", network=network, **options)
    for _ in range(2 * N):
        accumulator((Tensor([1.0, 2.0], ms.float32),), 1.0)
    reduction._sum = kept
    return [len(calls), int(accumulator.updates)]


def uneven(group):
    """Loops of ranks whose last windows have other numbers of micro-batches."""
    return {
        "tail plain": ranks.on_host(looped, group, "tail"),
        "scaled sums": ranks.on_host(looped, group, "none", scaled=True, reduction="sum"),
    }


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


class StopsAfterEpoch(Callback):
    def __init__(self, group):
        self.group = group

    def on_train_epoch_end(self, run_context):
        if self.group.rank == 1:
            run_context.request_stop()


def model_stopped(group):
    """A callback of rank 1 requests a stop in epoch 1 of 2: all stop at its end, in any order of the callbacks."""
    data, seen = ranks.own_data(group), {}

    def run(*callbacks, states=None):
        step, shard = ranks_in_model.step_of(ranks.network_of()), ranks_in_model.dataset(data)
        saves = [] if states is None else [SaveStates(states, step, shard)]
        begun = {"initial_epoch": saves[0].initial_epoch} if saves else {}
        error = error_of(lambda: Model(step).train(2, shard, callbacks=[*callbacks, *saves], **begun))
        return [error, step.updates, digest(step.optimizer.parameters), *begun.values()]

    folder = FOLDER / "model"
    seen["inside"] = run(StopsOnRank1(group), FlushTail(), states=Checkpointer(folder))
    seen["resumed"] = run(FlushTail(), states=Checkpointer(folder, resume="auto"))
    seen["at the end"] = run(FlushTail(), StopsAfterEpoch(group))
    return seen


class Evaluates(Callback):
    """Evaluates the averages by itself, on some of the ranks."""

    def __init__(self, evaluate, ranks_that_do, rank):
        self.evaluate, self.does = evaluate, rank in ranks_that_do

    def on_train_epoch_end(self, run_context):
        if self.does:
            self.evaluate()


def model_evaluated(group):
    """A callback evaluates the averages, on all ranks or on one, before and after the tail: training is the same."""
    data, seen = ranks.own_data(group), {}
    for name, evaluating_ranks in (("nobody", ()), ("one", (0,))):
        for first in (True, False):
            network = ranks.network_of()
            optimizer = nn.Momentum(network.trainable_params(), 0.05, 0.9)
            step = AccumulatedTrainStep((network, nn.CrossEntropyLoss()), optimizer, ranks.N, ema=Ema(0.5))
            model = Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2], metrics={"acc"})
            shard, test = ranks_in_model.dataset(data), ranks_in_model.dataset(data[:1])
            evaluates = Evaluates(lambda model=model, test=test: model.eval(test), evaluating_ranks, group.rank)
            callbacks = [evaluates, FlushTail()] if first else [FlushTail(), evaluates]
            error = error_of(lambda model=model, shard=shard, calls=callbacks: model.train(2, shard, callbacks=calls))
            seen[f"{name}, {'first' if first else 'last'}"] = [error, digest(step.optimizer.parameters)]
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


def sent(group):
    """How many messages of how many bytes give all ranks the parameters of rank 0: of a driver, and of its runs."""
    kept, sizes = collectives._broadcast, []

    def counting(values):
        sizes.append(values.nbytes)
        return kept(values)

    collectives._broadcast = counting
    seen = []
    for seed in (1, 1 + group.rank):  # equal, and another one on each rank
        model = ranks.driver_of(ranks.network_of(seed=seed, features=600))
        for _ in range(2):
            seen.append(list(sizes))
            sizes.clear()
            ranks.train(model, [(Tensor(np.ones((4, 600)), ms.float32), Tensor(np.zeros(4), ms.int32))], 1, 1)
        seen.append(list(sizes))
        sizes.clear()
    collectives._broadcast = kept
    return seen


def copied(group):
    """How many arrays a save reads on this rank."""
    model, reads = ranks.driver_of(ranks.network_of()), []
    kept = training_state.as_array
    training_state.as_array = lambda parameter: reads.append(1) or kept(parameter)
    ranks.train(model, ranks.even_data(group)[:2], 2, 1, checkpointer=Checkpointer(FOLDER / "copied"))
    training_state.as_array = kept
    return len(reads)


def of_any_text(group):
    """Texts of other lengths come whole; ranks that agree send one message of a fixed size."""
    text = "x" * (5 + 70_000 * group.rank)
    texts = agreement._exchanged(text, group)
    return [[len(item) for item in texts], agreement._exchanged("equal", group)]


@ms.jit_class
class Noise:
    def __init__(self):
        self.normal = ops.StandardNormal(seed=1)

    def __call__(self, gradients, norm):
        return [gradient + self.normal(gradient.shape) for gradient in gradients]


def staged(group):
    """Noise of one seed in a stage, without and with a ZeroOptimizer."""
    network = Half()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 0.1), stages=[Noise()], check="off")
    model.train_process(2, [micro_batch(group.rank + 1.0)] * 4, N, report=(), ckpt_path=None)
    other = Half()
    sharded = ZeroOptimizer(lambda parameters: nn.SGD(parameters, 0.1), [other.w])
    return [
        network.w.asnumpy().tolist(),
        error_of(lambda: GradientAccumulation(other, None, sharded, stages=[Noise()])),
    ]


def run_scenarios(group):
    on_host = ranks.on_host
    return {
        "settings": on_host(settings_that_differ, group),
        "folders": on_host(folders_per_machine, group),
        "drifted": on_host(drifted, group),
        "uneven": uneven(group),
        "resized": [on_host(resized, group), on_host(resized, group, sync_every_micro_batch=True)],
        "reductions": [on_host(reductions, group), on_host(reductions, group, sync_every_micro_batch=True)],
        "stepped": on_host(stepped, group),
        "apart": on_host(apart, group),
        "loop resumed": on_host(loop_resumed, group),
        "model": on_host(model_stopped, group),
        "model evaluated": on_host(model_evaluated, group),
        "left out": on_host(left_out, group),
        "sent": on_host(sent, group),
        "copied": on_host(copied, group),
        "texts": of_any_text(group),
        "staged": on_host(staged, group),
    }
