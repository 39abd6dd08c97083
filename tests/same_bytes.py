"""Compare the results of two trees of ms_accum: python tests/same_bytes.py OLD NEW [--only NAME] [--mutant] [--default]

OLD and NEW are folders that contain ms_accum. Each case is a small training program that imports public names only. It
runs in a process of its own with each tree. All Parameters of the network and the optimizer, the number of updates, and
the losses of the windows must be equal, to the last bit. With --mutant NEW trains with a slightly larger learning rate,
which must be found in all cases. Both run in graph mode; with --default NEW runs in MindSpore's default mode, compiled.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from functools import partial
from itertools import count
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))  # after PYTHONPATH, which names the tree of a case

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.experimental import optim
from mindspore.train import Callback, Model

import ms_accum
from ms_accum import (
    AccumulatedTrainStep,
    Accumulator,
    Checkpointer,
    CoupledLoss,
    Ema,
    FlushTail,
    GradientAccumulation,
    ResumableLoop,
    SaveStates,
    Stopped,
    TrainClear,
    TrainForwardBackward,
    TrainOptim,
    ZeroOptimizer,
    own_group,
    replace_dropout,
)

MUTATION = "SAME_BYTES_MUTATION"  # the environment variable with what is added to the learning rate
DEFAULT = "MS_ACCUM_SAME_BYTES_DEFAULT"
RATE = 0.1 + float(os.environ.get(MUTATION, "0"))
EVEN = [8] * 8
UNEVEN = [8, 8, 5, 8, 8, 8, 5, 3]
RANKS = 2
SHOWN = 20  # the number of differences that are listed

# Parts of the programs


def data_of(rows, shape=(6,)):
    """Return a micro-batch for each of `rows`: random features and labels."""
    rng = np.random.RandomState(3)
    return [
        (
            Tensor(rng.randn(number, *shape).astype(np.float32)),
            Tensor(rng.randint(0, 10, number).astype(np.int32)),
        )
        for number in rows
    ]


def with_nan(micro_batches):
    """Return micro-batches of which the second contains a NaN."""
    x, y = micro_batches[1]
    x = x.asnumpy()
    x[0, 0] = np.nan
    return [micro_batches[0], (Tensor(x), y), *micro_batches[2:]]


def with_masks(micro_batches):
    """Return micro-batches with more and more masked labels; those of the last one are all masked."""
    numbers = range(1, len(micro_batches) + 1)
    return [(x, Tensor(np.where(np.arange(len(y)) < n, -1, y.asnumpy()))) for n, (x, y) in zip(numbers, micro_batches)]


def labels(x, y):
    """Return the number of labels that are not masked."""
    return (y >= 0).sum()


def dataset_of(micro_batches):
    """Return a data set of MindSpore."""
    rows = [tuple(column.asnumpy() for column in columns) for columns in micro_batches]
    return GeneratorDataset(rows, ["x", "y"], shuffle=False)


def dense():
    return nn.SequentialCell(nn.Flatten(), nn.Dense(6, 5), nn.ReLU(), nn.Dense(5, 10))


def convolution():
    layers = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2, 2), nn.Flatten(), nn.Dense(64, 10)
    return nn.SequentialCell(*layers)


def dropout():
    return nn.SequentialCell(nn.Dense(6, 16), nn.Dropout(p=0.5), nn.ReLU(), nn.Dense(16, 10))


def counted_dropout():
    network = dropout()
    replace_dropout(network)
    return network


def half():
    return amp.auto_mixed_precision(dense(), "O2")


def cross_entropy(reduction="mean"):
    return nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction=reduction)


def alike(outputs, y):
    """A loss that compares all rows of a window."""
    same = ops.cast(ops.expand_dims(y, 1) == y, ms.float32)
    return ops.mean(ops.matmul(outputs, ops.transpose(outputs, (1, 0))) * (1 - 2 * same))


def momentum(parameters, **options):
    return nn.Momentum(parameters, RATE, 0.9, **options)


def adam(parameters):
    return nn.Adam(parameters, RATE / 10, weight_decay=0.01)


def groups_of(parameters):
    weights = [parameter for parameter in parameters if parameter.name.endswith("weight")]
    others = [parameter for parameter in parameters if not parameter.name.endswith("weight")]
    return [{"params": others, "lr": RATE / 2}, {"params": weights, "weight_decay": 0.1}]


def momentum_with_groups(parameters):
    return momentum(groups_of(parameters))


def adam_with_groups(parameters):
    return nn.AdamWeightDecay(groups_of(parameters), nn.exponential_decay_lr(RATE, 0.9, 100, 1, 1))


def zero(make):
    return partial(ZeroOptimizer, make)


def dynamic(scale=2.0**24):
    """Return a loss scale with which float16 overflows in the first windows."""
    return amp.DynamicLossScaler(scale, 2**4, 2)


def stop_after(micro_batches):
    calls = count(1)
    return lambda: next(calls) == micro_batches


def result_of(network, optimizer, updates, losses, **more):
    """Return what must be equal; `more` as numbers."""
    parameters = {parameter.name: parameter for parameter in (*network.get_parameters(), *optimizer.get_parameters())}
    digests = {name: hashlib.sha256(parameters[name].asnumpy().tobytes()).hexdigest() for name in sorted(parameters)}
    return {"parameters": digests, "updates": updates, "losses": [repr(loss) for loss in losses], **more}


class Watch(Callback):
    """Keeps what is visible at the end of each step, which is a window in the driver, and of each evaluation."""

    def __init__(self):
        self.losses, self.norms, self.results = [], [], []

    def on_train_step_end(self, run_context):
        arguments = run_context.original_args()
        self.losses.append(float(np.asarray(arguments.net_outputs)))
        if record := arguments.get("record"):
            self.norms.append([repr(record.grad_norm), repr(record.lr), record.samples, record.skipped])

    def on_train_epoch_end(self, run_context):
        self.results.append(repr(run_context.original_args().get("eval_results")))


# The programs


def driver(data=None, mini_steps=4, *, of=dense, loss_fn=None, by=momentum, mode=None, train=None, **options):
    """Train by GradientAccumulation."""
    ms.set_context(mode=mode_of_case() if mode is None else mode)
    network, watch = of(), Watch()
    optimizer = by(network.trainable_params())
    if "scheduler" in options:
        options["scheduler"] = options["scheduler"](optimizer)
    loss_fn = loss_fn or cross_entropy(options.get("reduction", "mean"))
    model = GradientAccumulation(network, loss_fn, optimizer, **options)
    data = data_of(EVEN) if data is None else data
    model.train_process(2, data, mini_steps, report=(), callbacks=watch, ckpt_path=None, **(train or {}))
    more = {"flushed": model.flush(), "skipped": model.skipped, "overflows": model.overflows}
    more |= {"left out": model.left_out, "scale": model.loss_scale}
    if model.ema is not None:
        with model.ema.applied():
            more["average"] = result_of(network, optimizer, 0, ())["parameters"]
    return result_of(network, optimizer, model.updates, watch.losses, norms=watch.norms, results=watch.results, **more)


def cells(*, weighted=False, sens=1.0, data=None, of=dense, **options):
    """Train by the three Cells, called by hand."""
    network = of()
    optimizer = momentum(network.trainable_params(), loss_scale=sens)
    grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
    weight_sum = Parameter(Tensor(0.0, ms.float32), name="weight_sum", requires_grad=False) if weighted else None
    with_loss = nn.WithLossCell(network, cross_entropy())
    forward_backward = TrainForwardBackward(with_loss, optimizer, grad_sum, sens, weight_sum=weight_sum)
    update = TrainOptim(optimizer, grad_sum, weight_sum=weight_sum, **options)
    clear = TrainClear(grad_sum, weight_sum=weight_sum)
    losses, norms, updates = [], [], 0
    for number, micro_batch in enumerate(data_of(UNEVEN) * 2 if data is None else data * 2, 1):
        losses.append(float(forward_backward(*micro_batch).asnumpy()))
        if number % 4 == 0:
            updated, norm = update()
            updates += bool(updated)
            norms.append(repr(float(norm.asnumpy())))
            clear()
    return result_of(network, optimizer, updates, losses, norms=norms)


class OwnLoop:
    """A training loop with a compiled step and an Accumulator."""

    def __init__(self, accumulate_step=4, *, by=momentum, of=dense, **options):
        self.network, self.losses = of(), []
        self.optimizer = optimizer = by(self.network.trainable_params())
        if "network" in inspect.signature(Accumulator).parameters:  # an older tree looks for the network itself
            options = {**options, "network": self.network}
        self.accumulator = accumulator = Accumulator(optimizer, accumulate_step, **options)
        network, loss_fn, weighs = self.network, cross_entropy(), options.get("reduction") == "mean"

        def forward(x, y):
            loss = loss_fn(network(x), y)
            return accumulator.scale(loss), loss

        grad_fn = ms.value_and_grad(forward, None, optimizer.parameters, has_aux=True)

        @ms.jit
        def step(x, y):
            (_, loss), grads = grad_fn(x, y)
            updated = accumulator(grads, x.shape[0]) if weighs else accumulator(grads)
            return ops.depend(loss, updated)

        self.step = step

    def train(self, data):
        for _ in range(2):
            for micro_batch in data:
                self.losses.append(float(self.step(*micro_batch).asnumpy()))
            self.accumulator.flush()
        return self.result()

    def train_resumable(self, data, states):
        with ResumableLoop(states, self.network, self.accumulator) as loop:
            for epoch in range(loop.epoch, 3):
                for number in range(loop.batches + 1, len(data) + 1):
                    self.losses.append(float(self.step(*data[number - 1]).asnumpy()))
                    loop.after_micro_batch(epoch, number)
                self.accumulator.flush()
                loop.after_micro_batch(epoch + 1, 0)
        return self.result()

    def result(self):
        own = self.accumulator
        counts = {"skipped": int(own.skipped), "overflows": own.overflows, "left out": own.left_out}
        more = {**counts, "norm": repr(float(own.grad_norm)), "scale": own.loss_scale}
        return result_of(self.network, self.optimizer, int(own.updates), self.losses, **more)


def accumulator(accumulate_step=4, *, data=None, **options):
    """Train by an Accumulator."""
    return OwnLoop(accumulate_step, **options).train(data_of(UNEVEN) if data is None else data)


def train_step(*, data=None, states=None, steps=3, **options):
    """Train by an AccumulatedTrainStep in MindSpore's Model."""
    network, watch = dense(), Watch()
    optimizer, dataset = momentum(network.trainable_params()), dataset_of(data_of(UNEVEN) if data is None else data)
    step = AccumulatedTrainStep((network, cross_entropy()), optimizer, steps, **options)
    callbacks, initial_epoch = [watch, FlushTail()], 0
    if states is not None:
        callbacks.append(SaveStates(states, step, dataset))
        initial_epoch = callbacks[-1].initial_epoch
    Model(step).train(2, dataset, callbacks=callbacks, initial_epoch=initial_epoch)
    more = {"skipped": step.skipped, "left out": step.left_out, "norm": repr(step.grad_norm)}
    if step.ema is not None:
        with step.ema.applied():
            more["average"] = result_of(network, optimizer, 0, ())["parameters"]
    return result_of(network, optimizer, step.updates, watch.losses, **more)


def resumed(train):
    """Stop inside a window of the first epoch, then resume with a new network; `train` gets the checkpointer."""
    with contextlib.suppress(Stopped):
        train(Checkpointer("states", stop=stop_after(6)))
        raise RuntimeError("The run did not stop.")
    return train(Checkpointer("states", resume="auto"))


def own_data():
    """Return the micro-batches of this rank."""
    group = own_group()
    return data_of(UNEVEN + UNEVEN)[group.rank :: group.size]


# The cases, each a function that returns what must be equal

IN_STEP = {"sync_every_micro_batch": True}
IMAGES = (1, 8, 8)
CASES = {
    "driver": driver,
    "driver uneven": lambda: driver(data_of(UNEVEN)),
    "driver large window": lambda: driver(data_of(EVEN * 3), 12),
    "driver tail flush": lambda: driver(data_of(UNEVEN), 3),
    "driver tail carry": lambda: driver(data_of(UNEVEN), 3, tail="carry"),
    "driver tail drop": lambda: driver(data_of(UNEVEN), 3, tail="drop"),
    "driver window of 1": lambda: driver(data_of(UNEVEN), 1),
    "driver sizes": lambda: driver(data_of(UNEVEN), {0: 1, 3: 2, 4: 4}),
    "driver micro_batch_size": lambda: driver(data_of(UNEVEN), None, train={"micro_batch_size": 3}),
    "driver sum": lambda: driver(data_of(UNEVEN), reduction="sum"),
    "driver clip": lambda: driver(data_of(UNEVEN), clip_norm=0.1),
    "driver masks": lambda: driver(
        with_masks(data_of(EVEN)), loss_fn=nn.CrossEntropyLoss(ignore_index=-1), weight=labels
    ),
    "driver default weight": lambda: driver(with_masks(data_of(EVEN)), loss_fn=nn.CrossEntropyLoss(ignore_index=-1)),
    "driver skip_micro": lambda: driver(with_nan(data_of(UNEVEN)), nonfinite="skip_micro"),
    "driver skip_window": lambda: driver(with_nan(data_of(UNEVEN))),
    "driver loss scale": lambda: driver(of=half, loss_scale=dynamic()),
    "driver float16": lambda: driver(data_of(UNEVEN), of=half, loss_scale=1024.0),
    "driver ema": lambda: driver(ema=Ema(0.9, warm_up=2), train={"valid_dataset": data_of(UNEVEN), "metrics": {"acc"}}),
    "driver adam": lambda: driver(by=adam),
    "driver momentum with groups": lambda: driver(by=momentum_with_groups),
    "driver adam with groups": lambda: driver(by=adam_with_groups),
    "driver scheduler": lambda: driver(
        by=lambda parameters: optim.SGD(parameters, RATE), scheduler=lambda own: optim.lr_scheduler.StepLR(own, 2, 0.5)
    ),
    "driver coupled": lambda: driver(data_of(UNEVEN), loss_fn=CoupledLoss(alike)),
    "driver convolution": lambda: driver(data_of(EVEN, IMAGES), of=convolution),
    "driver dropout": lambda: driver(of=dropout),
    "driver counted dropout": lambda: driver(of=counted_dropout),
    "driver pynative": lambda: driver(data_of(UNEVEN), 3, mode=ms.PYNATIVE_MODE),
    "driver pynative clip": lambda: driver(data_of(UNEVEN), 3, mode=ms.PYNATIVE_MODE, clip_norm=0.1, by=adam),
    "driver resumed": lambda: resumed(
        lambda states: driver(data_of(UNEVEN), train={"checkpointer": states}, ema=Ema(0.9), clip_norm=0.1)
    ),
    "cells": cells,
    "cells weighted": lambda: cells(weighted=True, clip_norm=0.1),
    "cells sens": lambda: cells(weighted=True, sens=8.0),
    "accumulator sum": accumulator,
    "accumulator mean": lambda: accumulator(reduction="mean", clip_norm=0.1),
    "accumulator flush": lambda: accumulator(3, reduction="mean", by=adam),
    "accumulator window of 1": lambda: accumulator(1, reduction="mean"),
    "accumulator sizes": lambda: accumulator({0: 1, 3: 2, 4: 4}, reduction="mean"),
    "accumulator skip_micro": lambda: accumulator(
        data=with_nan(data_of(UNEVEN)), reduction="mean", nonfinite="skip_micro"
    ),
    "accumulator loss scale": lambda: accumulator(data=data_of(EVEN), of=half, loss_scale=dynamic()),
    "accumulator resumed": lambda: resumed(
        lambda states: OwnLoop(reduction="mean").train_resumable(data_of(UNEVEN), states)
    ),
    "step": train_step,
    "step ema": lambda: train_step(ema=Ema(0.9), clip_norm=0.1),
    "step skip_micro": lambda: train_step(data=with_nan(data_of(UNEVEN)), nonfinite="skip_micro"),
    "step resumed": lambda: resumed(lambda states: train_step(states=states, steps=4)),
}
CASES_OF_RANKS = {
    "ranks driver": lambda: driver(own_data(), 3, clip_norm=0.1),
    "ranks driver in step": lambda: driver(own_data(), 3, **IN_STEP),
    "ranks driver zero": lambda: driver(own_data(), 3, by=zero(adam)),
    "ranks driver zero in step": lambda: driver(own_data(), 3, by=zero(adam), clip_norm=0.1, **IN_STEP),
    "ranks accumulator": lambda: accumulator(3, data=own_data(), reduction="mean"),
}


def mode_of_case():
    return ms.PYNATIVE_MODE if DEFAULT in os.environ else ms.GRAPH_MODE


def run_case(name):
    """Run a case in this process, and write what it returns to a file in the working directory."""
    ms.set_context(mode=mode_of_case())
    rank = own_group().rank if name in CASES_OF_RANKS else 0
    ms.set_seed(1)
    result = {**CASES, **CASES_OF_RANKS}[name]()
    tree = Path(ms_accum.__file__).parents[1]
    Path(f"{rank}.json").write_text(json.dumps({"tree": str(tree), **result}), encoding="utf-8")


# The comparison


class Side:
    """A case that runs with one of the trees.

    Args:
        name (str): that of the case.
        tree (Path): contains ms_accum.
        folder (Path): an empty folder, in which it runs.
        mutation (float): what is added to the learning rate.
        default (bool): whether it runs in MindSpore's default mode.
    """

    def __init__(self, name, tree, folder, mutation=0.0, default=False):
        self._tree, self._folder, self._ranks = tree, folder, RANKS if name in CASES_OF_RANKS else 1
        launcher = ["-m", "ms_accum.launch", f"--nproc={RANKS}", "--log_dir=logs"] if self._ranks > 1 else []
        command = [sys.executable, *launcher, str(Path(__file__).resolve()), "--case", name]
        environment = {"GLOG_v": "3", **os.environ, "PYTHONPATH": str(tree), MUTATION: repr(mutation)}
        environment |= {DEFAULT: "1"} if default else {}
        environment |= {"MS_JIT": "0"} if "pynative" in name else {}  # operator by operator
        with (folder / "output.txt").open("w") as output:
            self._process = subprocess.Popen(command, cwd=folder, env=environment, stdout=output, stderr=output)

    def wait(self):
        self._process.wait()

    def results(self):
        """Return the results of all ranks; a RuntimeError if the case failed."""
        if self._process.returncode:
            lines = (self._folder / "output.txt").read_text(encoding="utf-8", errors="replace").split("\n")
            raise RuntimeError("\n".join(["", *lines[-30:]]))
        results = [json.loads((self._folder / f"{rank}.json").read_text("utf-8")) for rank in range(self._ranks)]
        for result in results:
            if Path(result.pop("tree")) != self._tree:
                raise RuntimeError(f"ms_accum is not that of {self._tree}")
        return results


def differences(old, new):
    """Return the names of the results that differ, with those of the Parameters."""
    names = []
    for name in sorted({*old, *new}):
        ours, theirs = old.get(name), new.get(name)
        if isinstance(ours, dict) and isinstance(theirs, dict):
            names += [f"{name} {inner}" for inner in differences(ours, theirs)]
        elif ours != theirs:
            names.append(name)
    return names


def compare(name, old, new, mutation, default):
    """Run a case with both trees at the same time, and return what differs."""
    with tempfile.TemporaryDirectory() as folder:
        folders = [Path(folder) / side for side in ("old", "new")]
        for path in folders:
            path.mkdir()
        sides = [Side(name, old, folders[0]), Side(name, new, folders[1], mutation, default)]
        for side in sides:
            side.wait()  # before the folder is removed, also if one fails
        try:
            results = [side.results() for side in sides]
        except RuntimeError as error:
            return [f"it failed: {error}"]
    pairs = enumerate(zip(*results))
    return [f"{result} on rank {rank}" if rank else result for rank, pair in pairs for result in differences(*pair)]


def build(tree):
    """Build the operators in C++ of a tree that is no installation."""
    setup = tree / "setup.py"
    if setup.is_file() and "Extension(" in setup.read_text("utf-8") and not [*tree.glob("ms_accum/_native*.so")]:
        subprocess.run([sys.executable, "setup.py", "-q", "build_ext", "--inplace"], cwd=tree, check=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("trees", nargs="*", type=Path, metavar="tree", help="OLD and NEW, folders with ms_accum")
    parser.add_argument("--only", default="", metavar="NAME", help="run only the cases whose names contain this")
    parser.add_argument("--mutant", action="store_true", help="let NEW train with a larger learning rate")
    parser.add_argument("--default", action="store_true", help="let NEW run in MindSpore's default mode")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.case:
        run_case(arguments.case)
        return 0
    if len(arguments.trees) != 2 or not all((tree / "ms_accum" / "__init__.py").is_file() for tree in arguments.trees):
        parser.error("'OLD NEW' must be two folders that contain ms_accum")
    old, new = (tree.resolve() for tree in arguments.trees)
    build(old)
    build(new)
    names = [name for name in (*CASES, *CASES_OF_RANKS) if arguments.only in name]
    if not names:
        parser.error(f"'--only' must be in one of {', '.join((*CASES, *CASES_OF_RANKS))}, but got {arguments.only}")
    equal = 0
    for name in names:
        differing = compare(name, old, new, 1e-7 if arguments.mutant else 0.0, arguments.default)
        equal += not differing
        shown = ", ".join(differing[:SHOWN]) + (f" and {len(differing) - SHOWN} more" if len(differing) > SHOWN else "")
        print(f"{name:30}{'DIFFERENT: ' + shown if differing else 'equal'}", flush=True)
    print(f"{equal} of {len(names)} cases are equal")
    return int(equal < len(names))


if __name__ == "__main__":
    sys.exit(main())
