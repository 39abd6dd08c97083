"""Helpers that several test files share."""

from __future__ import annotations

import time
from pathlib import Path

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.dataset import GeneratorDataset
from mindspore.train import Callback

from ms_accum import GradientAccumulation


class Slope(nn.Cell):
    """The mean over rows of w * x, as its own loss: the gradient is the mean of x for each w."""

    def __init__(self, columns=1, dtype=ms.float32):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(columns), dtype), name="w")

    def construct(self, x):
        return ops.mean(ops.sum(x * self.w, 1))


def cross_entropy(reduction="mean"):
    """Return the loss that compiles in half the time of `nn.CrossEntropyLoss`; every row counts."""
    return nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction=reduction)


def micro_batch(*values, rows=1):
    """Return a micro-batch of one column whose `rows` rows all are `values`."""
    return (Tensor(np.tile(np.array(values, np.float32), (rows, 1))),)


class Recorder(Callback):
    """Keeps the records, and for each one the result of `watch`."""

    def __init__(self, watch=lambda: None):
        self.watch, self.records, self.seen = watch, [], []
        self.planned, self.closed = None, False

    def on_train_begin(self, run_context):
        self.planned = run_context.original_args().planned

    def on_train_step_end(self, run_context):
        self.update(run_context.original_args().record)

    def update(self, record):
        self.records.append(record)
        self.seen.append(self.watch())

    def __exit__(self, *error):
        self.closed = True


class Losses(Callback):
    """Keeps what `Model` shows as the loss, after each micro-batch, in a list."""

    def __init__(self, seen=None):
        self.seen = [] if seen is None else seen

    def on_train_step_end(self, run_context):
        self.seen.append(float(run_context.original_args().net_outputs.asnumpy()))


def slope_driver(lr=1.0, columns=1, dtype=ms.float32, **options):
    """Return a driver of Slope with plain SGD from 0: with lr 1, minus the weight is the gradient seen."""
    network = Slope(columns, dtype)
    return GradientAccumulation(network, None, nn.SGD([network.w], lr), **options)


def seen_gradient(model):
    return -model._network.w.asnumpy()


def run(model, dataset, mini_steps=None, epochs=1, watch=lambda: None, **options):
    """Train without a checkpoint and return the Recorder."""
    recorder = Recorder(watch)
    model.train_process(epochs, dataset, mini_steps, report=(recorder,), ckpt_path=None, **options)
    return recorder


def values(parameters):
    return [parameter.asnumpy().copy() for parameter in parameters]


def restore(parameters, arrays):
    for parameter, array in zip(parameters, arrays):
        ops.assign(parameter, Tensor(array))  # a compiled jit function does not see set_data


def forward_of(network, loss_fn):
    def forward(x, y):
        return loss_fn(network(x), y)

    return forward


def rows_of(x, y):
    return x.shape[0]


def compiled_step(network, loss_fn, accumulator, optimizer, weight=rows_of):
    """Return the functional pattern: a compiled step that weights by rows, or otherwise."""
    grad_fn = ms.value_and_grad(forward_of(network, loss_fn), None, optimizer.parameters)

    @ms.jit
    def train_step(x, y):
        loss, grads = grad_fn(x, y)
        return ops.depend(loss, accumulator(grads, weight(x, y)))

    return train_step


def batches(rng, rows, features=6, classes=3):
    """Return a micro-batch for each of `rows`: random features and labels."""
    return [
        (
            Tensor(rng.randn(count, features).astype(np.float32)),
            Tensor(rng.randint(0, classes, count).astype(np.int32)),
        )
        for count in rows
    ]


def dataset(micro_batches):
    """Return micro-batches as a data set of MindSpore's."""
    rows = [tuple(column.asnumpy() for column in columns) for columns in micro_batches]
    return GeneratorDataset(rows, [f"column{number}" for number in range(len(rows[0]))], shuffle=False)


def joined(micro_batches):
    """Return several micro-batches as one."""
    return tuple(Tensor(np.concatenate([column.asnumpy() for column in columns])) for columns in zip(*micro_batches))


def has_stage(kind, boundary):
    """Return whether the end of a window has a stage of this class."""
    return any(isinstance(stage, kind) for stage in boundary.stages)


def gone(process):
    """Wait for the end of a process that is not a child; return whether it ended within 5 seconds."""
    for _ in range(50):
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False
