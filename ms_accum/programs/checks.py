"""The checks of the self-test: what ms_accum promises, measured on this device.

Each trains a few micro-batches, and returns the largest error. What is expected comes from NumPy, or from plain
MindSpore with one large batch, never from ms_accum.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.train import Model

from .._check import first_words
from ..accumulator import Accumulator
from ..driver import GradientAccumulation
from ..engine.ema import Ema
from ..model_step import AccumulatedTrainStep
from ..network.parameters import as_array
from ..ranks.group import Group
from ..saving.checkpointer import Checkpointer, Stopped
from ..training.model_callbacks import FlushTail

ROWS, WINDOW = (8, 5, 8, 5, 8), 3
"""tuple[int], rows of micro-batches: uneven, and the last window is shorter than the others."""
FLOAT32, ADAM, HALF = 1e-5, 1e-4, 3e-2
_SINGLE: Any = {"check": "off", "group": None}
Batch = tuple[np.ndarray, np.ndarray]


class NotHere(Exception):
    """Raised when plain MindSpore does not run something on this device."""


def checks_of(group: Group) -> list[tuple[str, Callable[[], float], float]]:
    """Return the checks: the name, a function that returns the error, and the largest error that passes."""
    checks: list[tuple[str, Callable[[], float], float]] = [
        ("equal to one large batch: uneven rows, a tail", lambda: error_of(drive), FLOAT32),
        ("the same in graph mode", graph_mode, FLOAT32),
        ("the same in Model", lambda: error_of(fit), FLOAT32),
        ("the same with an Accumulator, and Adam", lambda: error_of(accumulate, make=nn.Adam), ADAM),
        ("the same in float16", lambda: error_of(drive, ms.float16), HALF),
        ("the same in bfloat16", lambda: error_of(drive, ms.bfloat16), 2 * HALF),
        ("clip_norm, and a schedule by update", clip_and_schedule, FLOAT32),
        ("NaN: a window or a micro-batch is left out", not_finite, FLOAT32),
        ("loss scale with overflows, an average", scale_and_average, HALF),
        ("resumed inside a window: bytes that differ", resume, 0.0),
    ]
    if group.size > 1:
        checks.append(("ranks: equal to one process", partial(ranks, group), FLOAT32))
    return checks


# A network of two layers, trained in several ways


def network_of(dtype: Any = ms.float32) -> nn.Cell:
    """Return a network that begins with the same weights each time."""
    random = np.random.RandomState(2)
    layers = [
        nn.Dense(6, 8, Tensor(random.randn(8, 6), ms.float32)),
        nn.Dense(8, 3, Tensor(random.randn(3, 8), ms.float32)),
    ]
    for layer in layers:
        layer.bias.set_data(Tensor(np.zeros(layer.bias.shape), ms.float32))
        layer.to_float(dtype)
    return nn.SequentialCell(layers[0], nn.ReLU(), layers[1])


def loss_of(scores: Any, labels: Any) -> Any:
    """Return the mean cross entropy."""
    return ops.cross_entropy(ops.cast(scores, ms.float32), labels)


def momentum(parameters: list, rate: float) -> nn.Optimizer:
    """Return the optimizer of most checks."""
    return nn.Momentum(parameters, rate, 0.9)


def batches_of(rows: Sequence[int]) -> list[Batch]:
    """Return micro-batches of random features, and labels of three classes."""
    random = np.random.RandomState(3)
    return [(random.randn(count, 6).astype(np.float32), random.randint(0, 3, count).astype(np.int32)) for count in rows]


def drive(network: nn.Cell, optimizer: nn.Optimizer, batches: Sequence[Batch], **options: Any) -> None:
    """Train with the driver."""
    model = GradientAccumulation(network, loss_of, optimizer, **{**_SINGLE, **options})
    model.train_process(1, [tuple(map(Tensor, batch)) for batch in batches], WINDOW, report=(), ckpt_path=None)


def fit(network: nn.Cell, optimizer: nn.Optimizer, batches: Sequence[Batch]) -> None:
    """Train in MindSpore's `Model`."""
    dataset = ms.dataset.GeneratorDataset(batches, ["x", "y"], shuffle=False)
    step = AccumulatedTrainStep((network, loss_of), optimizer, gradient_accumulation_steps=WINDOW, **_SINGLE)
    Model(step).train(1, dataset, callbacks=FlushTail(), dataset_sink_mode=False)


def gradients_of(network: nn.Cell, optimizer: nn.Optimizer) -> Callable[..., Any]:
    """Return a function that returns the loss and the gradients of a batch."""

    def forward(x: Any, y: Any) -> Any:
        return loss_of(network(x), y)

    return ms.value_and_grad(forward, None, optimizer.parameters)


def accumulate(network: nn.Cell, optimizer: nn.Optimizer, batches: Sequence[Batch]) -> None:
    """Train in a loop of one's own."""
    accumulator = Accumulator(optimizer, WINDOW, reduction="mean", group=None)
    gradients = gradients_of(network, optimizer)

    @ms.jit
    def step(x: Any, y: Any) -> Any:
        loss, grads = gradients(x, y)
        return ops.depend(loss, accumulator(grads, x.shape[0]))

    for batch in batches:
        step(*map(Tensor, batch))
    accumulator.flush()


def large_batches(network: nn.Cell, optimizer: nn.Optimizer, batches: Sequence[Batch], window: int = WINDOW) -> None:
    """Train with plain MindSpore, with each window as one batch."""
    gradients = gradients_of(network, optimizer)

    @ms.jit
    def step(x: Any, y: Any) -> Any:
        loss, grads = gradients(x, y)
        return ops.depend(loss, optimizer(grads))

    for start in range(0, len(batches), window):
        step(*(Tensor(np.concatenate(column)) for column in zip(*batches[start : start + window])))


def weights(network: nn.Cell) -> np.ndarray:
    """Return all weights as one vector."""
    return np.concatenate([as_array(parameter).ravel().astype(np.float64) for parameter in network.trainable_params()])


def error_of(train: Callable[..., None], dtype: Any = ms.float32, make: Callable = momentum) -> float:
    """Return the error of a way to train, compared with large batches."""
    expected, network = network_of(dtype), network_of(dtype)
    try:
        large_batches(expected, make(expected.trainable_params(), 0.1), batches_of(ROWS))
        weights(expected)  # waits for the device
    except (RuntimeError, TypeError, ValueError) as error:
        if dtype == ms.float32:
            raise
        raise NotHere(f"MindSpore: {first_words(str(error))}") from error
    train(network, make(network.trainable_params(), 0.1), batches_of(ROWS))
    return relative(weights(network), weights(expected), weights(network_of()))


def relative(actual: np.ndarray, expected: np.ndarray, start: Any = 0.0) -> float:
    """Return the largest difference, relative to the largest change that is expected."""
    return float(np.abs(actual - expected).max() / np.abs(expected - start).max())


def graph_mode() -> float:
    """Return the error of the driver in MindSpore's graph mode."""
    mode = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        return error_of(drive)
    finally:
        ms.set_context(mode=mode)


# A network with one Parameter, whose gradient is the mean of its rows


class Slope(nn.Cell):
    """The mean over the rows of w * x, in float16 where `half`, as its own loss."""

    def __init__(self, half: bool = False):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(2), ms.float32), name="w")
        self.dtype = ms.float16 if half else ms.float32

    def construct(self, x: Any) -> Any:
        return ops.mean(ops.cast(ops.sum(ops.cast(x, self.dtype) * ops.cast(self.w, self.dtype), 1), ms.float32))


def slope(gradients: Any, window: int, *, rate: Any = 1.0, half: bool = False, **options: Any) -> tuple[Any, Slope]:
    """Return the driver and the network, trained on a micro-batch of two rows for each gradient."""
    network = Slope(half)
    model = GradientAccumulation(network, None, nn.SGD(network.trainable_params(), rate), **{**_SINGLE, **options})
    rows = np.array([[[-0.5], [0.5]]]) + np.asarray(gradients, np.float64)[:, None]
    batches = [(Tensor(x, ms.float32),) for x in rows]
    model.train_process(1, batches, window, report=(), ckpt_path=None)
    return model, network


def clip_and_schedule() -> float:
    """Return the error of windows of which one is clipped, with rates that change at each update."""
    gradients = np.array([[6.0, 0.0], [0.0, 8.0], [0.3, 0.0], [0.0, 0.4], [0.5, 0.5]])
    _, network = slope(gradients, 2, rate=[1.0, 0.5, 0.25], clip_norm=1.0)
    means = np.array([gradients[:2].mean(0), gradients[2:4].mean(0), gradients[4]])
    means[0] /= np.linalg.norm(means[0])
    return relative(weights(network), -(np.array([[1.0], [0.5], [0.25]]) * means).sum(0))


def not_finite() -> float:
    """Return the error when a window with NaN, or only its micro-batch, is left out, and counted."""
    gradients = [[2.0, 1.0], [np.nan, 1.0], [4.0, -1.0], [6.0, 3.0]]
    model, network = slope(gradients, 2)
    other, network_of_other = slope(gradients, 2, nonfinite="skip_micro")
    if (model.updates, model.skipped, other.updates, other.left_out) != (1, 1, 2, 1):
        return np.inf
    return max(relative(weights(network), np.array([-5, -1])), relative(weights(network_of_other), np.array([-7, -2])))


def scale_and_average() -> float:
    """Return the error in float16, where the loss scale is lowered until nothing overflows, of the averaged weights."""
    ema, scaler = Ema(0.75), amp.DynamicLossScaler(2.0**18, 2, 1000)
    model, network = slope([[2.0, 1.0]] * 12, 2, half=True, loss_scale=scaler, ema=ema)
    if (
        model.overflows + model.updates != 6
        or not model.overflows
        or float(model.loss_scale) != 2.0 ** (18 - model.overflows)
    ):
        return np.inf
    average, steps = 1.0, np.arange(2, model.updates + 1)
    for step in steps:
        average = 0.75 * average + 0.25 * step
    with ema.applied():
        return relative(weights(network), -average * np.array([2.0, 1.0]))


def resume() -> float:
    """Return the number of bytes that differ after a stop inside a window, compared with a run without a stop."""

    def train(folder: str, **states: Any) -> bytes:
        network = network_of()
        optimizer = momentum(network.trainable_params(), 0.1)
        model = GradientAccumulation(network, loss_of, optimizer, **_SINGLE)
        data = [tuple(map(Tensor, batch)) for batch in batches_of([8] * 7)]
        model.train_process(2, data, WINDOW, report=(), ckpt_path=None, checkpointer=Checkpointer(folder, **states))
        return b"".join(as_array(parameter).tobytes() for parameter in optimizer.get_parameters())

    with tempfile.TemporaryDirectory() as folder:
        expected, calls = train(f"{folder}/complete"), iter(range(100))
        try:
            train(f"{folder}/stopped", stop=lambda: next(calls) >= 4)
            return np.inf
        except Stopped:
            actual = train(f"{folder}/stopped", resume="auto")
    return float(sum(old != new for old, new in zip(expected, actual)))


def ranks(group: Group) -> float:
    """Return the error of uneven shards on several ranks, compared with one process that has all rows."""
    batches = batches_of(([8, 5] * group.size + [5, 8] * group.size)[: 2 * WINDOW * group.size])
    batches = batches[: len(batches) // (WINDOW * group.size) * WINDOW * group.size]
    expected, network = network_of(), network_of()
    large_batches(expected, momentum(expected.trainable_params(), 0.1), batches, WINDOW * group.size)
    drive(network, momentum(network.trainable_params(), 0.1), batches[group.rank :: group.size], group="auto")
    return relative(weights(network), weights(expected), weights(network_of()))
