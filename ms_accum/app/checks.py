"""The checks of the self-test: what ms_accum promises, measured on this device.

Each check is a small function that trains a few micro-batches, and returns the largest error and its tolerance. What is
expected comes from NumPy, or from plain MindSpore with one large batch, never from ms_accum.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, mint, nn, ops
from mindspore.experimental import optim
from mindspore.train import Model

try:
    from mindspore.graph import api
except ImportError:  # before MindSpore 2.9
    from mindspore.common import api

from .. import _check, native
from ..accumulator import Accumulator
from ..driver import GradientAccumulation
from ..engine.coupled import CoupledLoss
from ..engine.ema import Ema
from ..loss.first_micro_batch import without_logs
from ..model_step import AccumulatedTrainStep, FlushTail
from ..network import tree
from ..network.kernels import NativeKernels
from ..network.optimizers import inner_of
from ..network.parameters import as_array
from ..network.restoring import synchronously
from ..ranks.group import Group, gather_arrays
from ..ranks.zero import ZeroOptimizer
from ..saving.checkpointer import Checkpointer, Stopped

EXACT, ROUNDED, HALF, BFLOAT = 0.0, 1e-5, 1e-2, 5e-2
"""float, tolerances: no error, that of float32, of float16, and of bfloat16; relative to the largest change."""
_MOMENTS = 1e-4  # optimizers divide by roots of small numbers
_WEIGHTS = (1.0, 3.0)
_RATES = (1.0, 0.5, 0.25, 0.125)
_ROUNDS, _WINDOWS, _SIZE = 5, 16, 4  # of the comparison of speeds


class NotHere(Exception):
    """Raised when plain MindSpore, without ms_accum, does not run something on this device."""


class Measured(NamedTuple):
    """What a check has found: it is passed if the error is not above the tolerance."""

    error: float | None
    """The largest error; None if nothing is compared."""
    tolerance: float | None
    note: str = ""
    details: Mapping[str, str] = {}
    """More results by name."""

    @property
    def passed(self) -> bool:
        """bool, whether the error is not above the tolerance. NaN is above."""
        return self.error is None or self.tolerance is None or self.error <= self.tolerance


class Check(NamedTuple):
    """One promise."""

    name: str
    run: Callable[..., Measured]
    """Measures it; a check of several processes gets the group."""


# Data and networks


class _Classifier(nn.Cell):
    """Two layers, which begin with the same weights each time."""

    def __init__(self, dtype: Any = ms.float32):
        super().__init__()
        rng = np.random.RandomState(2)
        self.hidden = nn.Dense(6, 8, Tensor(rng.randn(8, 6).astype(np.float32)))
        self.out = nn.Dense(8, 3, Tensor(rng.randn(3, 8).astype(np.float32)))
        self.hidden.bias.set_data(Tensor(np.zeros(8, np.float32)))
        self.out.bias.set_data(Tensor(np.zeros(3, np.float32)))
        if dtype != ms.float32:
            self.hidden.to_float(dtype)
            self.out.to_float(dtype)

    def construct(self, x: Any) -> Any:
        return ops.cast(self.out(ops.relu(self.hidden(x))), ms.float32)


class _Convolutions(nn.Cell):
    """A convolution, pooling and a layer that classifies images of 8 x 8."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.RandomState(4)
        self.convolution = nn.Conv2d(1, 4, 3, weight_init=Tensor(rng.randn(4, 1, 3, 3).astype(np.float32)))
        self.pool = nn.MaxPool2d(2, 2)
        self.out = nn.Dense(64, 3, Tensor(rng.randn(3, 64).astype(np.float32)), "zeros")

    def construct(self, x: Any) -> Any:
        features = self.pool(ops.relu(self.convolution(x)))
        return self.out(ops.reshape(features, (x.shape[0], 64)))


class _Slope(nn.Cell):
    """The mean over rows of w * x, as its own loss: the gradient is the mean of x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(2, np.float32)), name="w")

    def construct(self, x: Any) -> Any:
        return ops.mean(ops.sum(x * self.w, 1))


class _Half(nn.Cell):
    """The same in float16: the gradient overflows above 65504."""

    def __init__(self) -> None:
        super().__init__()
        self.w = Parameter(Tensor(np.zeros(2, np.float32)), name="w")

    def construct(self, x: Any) -> Any:
        products = ops.cast(x, ms.float16) * ops.cast(self.w, ms.float16)
        return ops.mean(ops.sum(ops.cast(products, ms.float32), 1))


class _Table(nn.Cell):
    """The mean over rows of x times the row of a table that was looked up: the gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.EmbeddingLookup(6, 2, param_init="zeros")

    def construct(self, numbers: Any, x: Any) -> Any:
        return ops.mean(ops.sum(self.table(numbers) * x, 1))


def _batches(rows: Sequence[int], *shape: int) -> list[tuple]:
    """Return a micro-batch for each of `rows`: random features and labels of three classes."""
    rng = np.random.RandomState(3)
    shape = shape or (6,)
    return [
        (
            Tensor(rng.randn(count, *shape).astype(np.float32)),
            Tensor(rng.randint(0, 3, count).astype(np.int32)),
        )
        for count in rows
    ]


def _slopes(*gradients: Sequence[float], rows: int = 2) -> list[tuple]:
    """Return micro-batches for `_Slope` with these gradients, whose rows differ."""
    spread = np.linspace(-0.5, 0.5, rows, dtype=np.float32)[:, None]
    return [(Tensor(np.asarray(gradient, np.float32) + spread),) for gradient in gradients]


def _joined(batches: Sequence[tuple]) -> tuple:
    """Return several micro-batches as one."""
    return tuple(Tensor(np.concatenate([as_array(column) for column in columns])) for columns in zip(*batches))


def _loss_fn() -> nn.Cell:
    return nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")


def _momentum(network: nn.Cell) -> nn.Cell:
    return nn.Momentum(network.trainable_params(), 0.1, 0.9)


def _sgd(network: nn.Cell, rate: Any = 1.0) -> nn.Cell:
    return nn.SGD(network.trainable_params(), rate)


# Training and comparing


def _drive(network: nn.Cell, optimizer: Any, batches: Sequence[tuple], window: Any, **options: Any) -> Any:
    """Train with the driver, in this process alone; return it."""
    run = {name: options.pop(name) for name in ("checkpointer",) if name in options}
    epochs = options.pop("epochs", 1)
    loss_fn = options.pop("loss_fn", None)
    model = GradientAccumulation(network, loss_fn, optimizer, **{"check": "off", "group": None, **options})
    model.train_process(epochs, batches, window, report=(), ckpt_path=None, **run)
    return model


def _classify(rows: Sequence[int], window: Any, dtype: Any = ms.float32, **options: Any) -> nn.Cell:
    """Return a `_Classifier` that the driver has trained."""
    network = _Classifier(dtype)
    _drive(network, _momentum(network), _batches(rows), window, loss_fn=_loss_fn(), **options)
    return network


def _gradients_of(network: nn.Cell, loss_fn: Any, optimizer: Any) -> Callable:
    """Return a function that returns the loss and the gradients of a micro-batch."""

    def forward(x: Any, y: Any) -> Any:
        return loss_fn(network(x), y)

    return ms.value_and_grad(forward, None, optimizer.parameters)


def _step_of(network: nn.Cell, loss_fn: Any, optimizer: Any) -> Callable:
    """Return a function that makes an update of plain MindSpore."""
    gradients = _gradients_of(network, loss_fn, optimizer)

    def step(x: Any, y: Any) -> Any:
        loss, grads = gradients(x, y)
        return ops.depend(loss, optimizer(grads))

    return step


def _accumulating_step(network: nn.Cell, optimizer: Any, accumulator: Accumulator) -> Callable:
    """Return the functional pattern, in which rows are the weight."""
    gradients = _gradients_of(network, _loss_fn(), optimizer)

    def step(x: Any, y: Any) -> Any:
        loss, grads = gradients(x, y)
        return ops.depend(loss, accumulator(grads, x.shape[0]))

    return step


def _train_plain(network: nn.Cell, windows: Sequence[Sequence[tuple]]) -> nn.Cell:
    """Train with plain MindSpore, with each window as one large batch."""
    step = _step_of(network, _loss_fn(), _momentum(network))
    for window in windows:
        step(*_joined(window))
    return network


def _split(batches: Sequence[tuple], window: int) -> list[Sequence[tuple]]:
    return [batches[start : start + window] for start in range(0, len(batches), window)]


def _classify_plain(rows: Sequence[int], window: int, dtype: Any = ms.float32) -> nn.Cell:
    """Return a `_Classifier` that plain MindSpore has trained with large batches."""
    return _train_plain(_Classifier(dtype), _split(_batches(rows), window))


def _values(network: nn.Cell) -> list[np.ndarray]:
    return [as_array(parameter).astype(np.float64) for parameter in network.trainable_params()]


def _error(actual: Sequence[np.ndarray], expected: Sequence[np.ndarray], start: Sequence[np.ndarray]) -> float:
    """Return the largest difference, relative to the largest change that is expected. NaN is infinitely wrong."""
    largest = max(float(np.abs(new - old).max()) for new, old in zip(expected, start))
    errors = [float(np.abs(got - wanted).max()) for got, wanted in zip(actual, expected)]
    error = max(errors) / largest if np.isfinite(errors).all() else np.inf
    return float(error)


def _compare(network: nn.Cell, expected: nn.Cell, tolerance: float = ROUNDED, note: str = "") -> Measured:
    """Compare two `_Classifier`s, or `_Convolutions`, after training."""
    return Measured(_error(_values(network), _values(expected), _values(type(network)())), tolerance, note)


def _compare_slope(
    w: Any, expected: Any, counts: Mapping[str, tuple[Any, Any]], tolerance: float = ROUNDED
) -> Measured:
    """Compare the weights of a `_Slope`, and counters by name: what they are and what they must be."""
    wrong = [f"{name} is {got}, not {wanted}" for name, (got, wanted) in counts.items() if got != wanted]
    error = _error([as_array(w).astype(np.float64)], [np.asarray(expected)], [np.zeros(np.shape(expected))])
    return Measured(np.inf if wrong else error, tolerance, "; ".join(wrong))


@contextmanager
def _graph_mode() -> Iterator[None]:
    mode = ms.get_context("mode")
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        yield
    finally:
        ms.set_context(mode=mode)


@contextmanager
def _not_here() -> Iterator[None]:
    """Convert errors of plain MindSpore inside the block to `NotHere`."""
    try:
        with without_logs():
            yield
    except Exception as error:
        raise NotHere(reason_of(error)) from error


def forget_recording() -> None:
    """End the recording of gradients, which MindSpore continues after an error outside a graph."""
    api._pynative_executor.clear_res()


def reason_of(error: BaseException) -> str:
    """Return the message of an error as one short line."""
    text = re.sub(r"^For '[\w.]+', ", "", _check.first_words(str(error)).strip())
    return _check.one_line(text, 160) or type(error).__name__


# Equality with one large batch


def check_float32() -> Measured:
    """Compare two windows of four micro-batches with two large batches."""
    rows = [8] * 8
    return _compare(_classify(rows, 4, check="first"), _classify_plain(rows, 4))


def _check_type(dtype: Any, tolerance: float) -> Measured:
    rows = [8] * 8
    with _not_here(), synchronously():
        _Classifier(dtype)(_batches(rows[:1])[0][0]).asnumpy()
    with _not_here():
        expected = _classify_plain(rows, 4, dtype)
        _values(expected)  # waits for the device
    return _compare(_classify(rows, 4, dtype), expected, tolerance)


def check_float16() -> Measured:
    """The same with layers in float16."""
    return _check_type(ms.float16, HALF)


def check_bfloat16() -> Measured:
    """The same with layers in bfloat16."""
    return _check_type(ms.bfloat16, BFLOAT)


_UNEVEN = (8, 5, 8, 5)


def check_uneven_and_tail(**options: Any) -> Measured:
    """Compare micro-batches of 8 and 5 rows, and a short last window."""
    return _compare(_classify(_UNEVEN, 3, **options), _classify_plain(_UNEVEN, 3))


def check_graph_mode() -> Measured:
    """The same in MindSpore's graph mode."""
    with _graph_mode():
        network = _classify(_UNEVEN, 3)
    return _compare(network, _classify_plain(_UNEVEN, 3))


def check_not_compiled() -> Measured:
    """The same operator by operator."""
    return check_uneven_and_tail(compile=False)


def check_model() -> Measured:
    """The same in MindSpore's `Model`, from a data set of MindSpore's."""
    network = _Classifier()
    columns = [tuple(map(as_array, batch)) for batch in _batches(_UNEVEN)]
    dataset = ms.dataset.GeneratorDataset(columns, ["x", "y"], shuffle=False)
    options: Any = {"gradient_accumulation_steps": 3, "check": "off", "group": None}
    step = AccumulatedTrainStep((network, _loss_fn()), _momentum(network), **options)
    Model(step).train(1, dataset, callbacks=FlushTail(), dataset_sink_mode=False)
    return _compare(network, _classify_plain(_UNEVEN, 3))


def check_accumulator(compiled: bool) -> Measured:
    """The same in a loop of the user's, with a compiled step or without."""
    network = _Classifier()
    optimizer = _momentum(network)
    accumulator = Accumulator(optimizer, 3, reduction="mean", group=None)
    step = _accumulating_step(network, optimizer, accumulator)
    step = ms.jit(step) if compiled else step
    for batch in _batches(_UNEVEN):
        step(*batch)
    accumulator.flush()
    return _compare(network, _classify_plain(_UNEVEN, 3))


# What is done with a window's gradient


def check_clip_norm() -> Measured:
    """Compare a window whose gradient is clipped, and one whose gradient is not, with NumPy."""
    gradients = np.array([[6.0, 0.0], [0.0, 8.0], [0.3, 0.0], [0.0, 0.4]])
    network = _Slope()
    _drive(network, _sgd(network), _slopes(*gradients), 2, clip_norm=1.0)
    large, small = gradients[:2].mean(0), gradients[2:].mean(0)
    return _compare_slope(network.w, -(large / np.linalg.norm(large) + small), {})


def check_schedule() -> Measured:
    """Compare three updates with rates that change at each update, not at each micro-batch."""
    gradients = np.array([[2.0, 1.0], [4.0, -1.0], [-3.0, 5.0], [1.0, 1.0], [7.0, 2.0]])
    network = _Slope()
    optimizer = _sgd(network, list(_RATES))
    _drive(network, optimizer, _slopes(*gradients), 2)
    means = [gradients[:2].mean(0), gradients[2:4].mean(0), gradients[4]]
    expected = -sum(rate * mean for rate, mean in zip(_RATES, means))
    return _compare_slope(network.w, expected, {"global_step": (int(as_array(optimizer.global_step)[0]), 3)})


_WITH_NAN = ([2.0, 1.0], [np.nan, 1.0], [4.0, -1.0], [6.0, 3.0])


def check_skip_window() -> Measured:
    """A window with NaN is skipped; the next one is as if it had not been there."""
    network = _Slope()
    model = _drive(network, _sgd(network), _slopes(*_WITH_NAN), 2)
    return _compare_slope(network.w, [-5.0, -1.0], {"updates": (model.updates, 1), "skipped": (model.skipped, 1)})


def check_skip_micro() -> Measured:
    """Only the micro-batch with NaN is left out."""
    network = _Slope()
    model = _drive(network, _sgd(network), _slopes(*_WITH_NAN), 2, nonfinite="skip_micro")
    return _compare_slope(network.w, [-7.0, -2.0], {"updates": (model.updates, 2), "left out": (model.left_out, 1)})


def check_raise() -> Measured:
    """An error ends the run before the weights change."""
    network, raised = _Slope(), False
    try:
        _drive(network, _sgd(network), _slopes(*_WITH_NAN), 2, nonfinite="raise")
    except FloatingPointError:
        raised = True
    error = float(np.abs(as_array(network.w)).max())
    return Measured(error if raised else np.inf, EXACT, "" if raised else "no error was raised")


def check_ema() -> Measured:
    """The average of the weights after three updates, by NumPy."""
    gradients = np.array([[2.0, 1.0], [4.0, -1.0], [-3.0, 5.0], [1.0, 1.0], [7.0, 2.0]])
    network, ema = _Slope(), Ema(0.75)
    _drive(network, _sgd(network), _slopes(*gradients), 2, ema=ema)
    weights = -np.cumsum([gradients[:2].mean(0), gradients[2:4].mean(0), gradients[4]], 0)
    expected = weights[0]
    for weight in weights[1:]:
        expected = 0.75 * expected + 0.25 * weight
    with ema.applied():
        averages = Tensor(as_array(network.w).copy())
    return _compare_slope(averages, expected, {"updates": (ema.updates, 3)})


def check_loss_scale() -> Measured:
    """Gradients in float16 overflow until the scale is small enough; the other windows are exact."""
    gradients = [[2.0, 1.0]] * 10
    network = _Half()
    scaler = amp.DynamicLossScaler(2.0**18, 2, 1000)
    with _not_here(), synchronously():
        network(_slopes(*gradients[:1])[0][0]).asnumpy()
    model = _drive(network, _sgd(network), _slopes(*gradients), 2, loss_scale=scaler)
    overflows = model.overflows
    counts = {"overflows": (1 <= overflows <= 4, True), "updates": (model.updates, 5 - overflows)}
    counts["loss scale"] = (model.loss_scale, 2.0 ** (18 - overflows))
    result = _compare_slope(network.w, np.multiply([-2.0, -1.0], max(5 - overflows, 1)), counts, HALF)
    return result._replace(note=result.note or f"{_check.quantity(overflows, 'overflow')}, then 2^{18 - overflows}")


def check_resume(**options: Any) -> Measured:
    """A run that stops inside a window, and is resumed by new objects, ends with the bytes of one that did not stop."""

    def train(folder: str, **states: Any) -> list[bytes]:
        network = _Classifier()
        optimizer = _momentum(network)
        data, checkpointer = _batches([8] * 7), Checkpointer(folder, **states)
        _drive(network, optimizer, data, 3, epochs=2, loss_fn=_loss_fn(), checkpointer=checkpointer, **options)
        return [as_array(parameter).tobytes() for parameter in optimizer.get_parameters()]

    with tempfile.TemporaryDirectory() as folder:
        expected = train(f"{folder}/whole")
        calls = iter(range(100))
        try:
            train(f"{folder}/stopped", stop=lambda: next(calls) >= 4)
            return Measured(np.inf, EXACT, "the run did not stop")
        except Stopped:
            actual = train(f"{folder}/stopped", resume="auto")
    different = sum(old != new for before, after in zip(expected, actual) for old, new in zip(before, after))
    return Measured(float(different), EXACT, f"{different} bytes differ" if different else "")


def check_resume_in_graph_mode() -> Measured:
    """The same in graph mode."""
    with _graph_mode():
        return check_resume()


def check_sparse() -> Measured:
    """The gradient of a looked-up table, in which numbers repeat, by NumPy."""
    rng = np.random.RandomState(5)
    rows = [(np.array(numbers, np.int32), rng.randn(len(numbers), 2)) for numbers in ([1, 1, 4], [4, 0, 1])]
    network = _Table()
    batches = [(Tensor(numbers), Tensor(x.astype(np.float32))) for numbers, x in rows]
    _drive(network, _sgd(network), batches, 2)
    expected = np.zeros((6, 2))
    for numbers, x in rows:
        np.subtract.at(expected, numbers, x / 6)
    return _compare_slope(network.table.embedding_table, expected, {})


# More of them, with --full


def check_convolutions() -> Measured:
    """Compare a convolution and pooling with large batches."""
    network, batches = _Convolutions(), _batches([8, 8, 5], 1, 8, 8)
    _drive(network, _momentum(network), batches, 3, loss_fn=_loss_fn())
    # Some devices convolve in less than float32.
    return _compare(network, _train_plain(_Convolutions(), [batches]), 10 * ROUNDED)


def check_sum() -> Measured:
    """The sum of gradients instead of their mean."""
    network = _Slope()
    model = _drive(network, _sgd(network), _slopes([2.0, 1.0], [4.0, -1.0], [1.0, 1.0]), 2, reduction="sum")
    return _compare_slope(network.w, [-7.0, -1.0], {"updates": (model.updates, 2)})


def check_carry() -> Measured:
    """The tail of an epoch is continued in the next one."""
    network = _Slope()
    batches = _slopes([2.0, 1.0], [4.0, -1.0], [-3.0, 5.0])
    model = _drive(network, _sgd(network), batches, 2, epochs=2, tail="carry")
    gradients = np.array([[2.0, 1.0], [4.0, -1.0], [-3.0, 5.0]])
    return _compare_slope(network.w, -gradients.sum(0), {"updates": (model.updates, 3)})


def check_growing_window() -> Measured:
    """A window of one micro-batch, then of two."""
    network = _Slope()
    batches = _slopes([2.0, 1.0], [4.0, -1.0], [6.0, 3.0])
    model = _drive(network, _sgd(network), batches, {0: 1, 1: 2})
    return _compare_slope(network.w, [-7.0, -2.0], {"updates": (model.updates, 2)})


def _pairs(x: Any, y: Any) -> Any:
    """A loss that compares each row with all others."""
    scores = ops.matmul(x, ops.transpose(x, (1, 0))) * 0.1
    return ops.mean(ops.square(scores - ops.cast(ops.reshape(y, (-1, 1)), ms.float32)))


def check_coupled() -> Measured:
    """A loss that compares rows gets the gradient of the large batch."""
    batches = _batches([4, 4, 4])
    network = _Classifier()
    _drive(network, _momentum(network), batches, 3, loss_fn=CoupledLoss(_pairs))
    expected = _Classifier()
    _step_of(expected, _pairs, _momentum(expected))(*_joined(batches))
    return _compare(network, expected)


def _two_terms(scores: Any, labels: Any) -> Any:
    """Return the mean over the rows that have a label above 0, and the mean of all squares."""
    labeled = ops.cast(labels > 0, ms.float32)
    losses = nn.SoftmaxCrossEntropyWithLogits(sparse=True)(scores, labels)
    return {"labeled": ops.sum(losses * labeled) / ops.sum(labeled), "size": ops.mean(ops.square(scores))}


def _sum_of_terms(scores: Any, labels: Any) -> Any:
    terms = _two_terms(scores, labels)
    return terms["labeled"] + 0.5 * terms["size"]


def check_terms() -> Measured:
    """Each term of a loss is divided by its own number over the window: equal to the sum of terms of one batch."""
    batches = _batches([4, 8, 6])
    weight = {"labeled": lambda x, labels: (labels > 0).sum(), "size": "rows"}
    network = _Classifier()
    options = {"loss_fn": _two_terms, "weight": weight, "coefficients": {"size": 0.5}}
    _drive(network, _momentum(network), batches, 3, **options)
    expected = _Classifier()
    _step_of(expected, _sum_of_terms, _momentum(expected))(*_joined(batches))
    return _compare(network, expected)


# Optimizers, operators, cost

OPTIMIZERS: Mapping[str, Callable] = {
    "nn.SGD": lambda p: nn.SGD(p, 0.1, momentum=0.9),
    "nn.Momentum": lambda p: nn.Momentum(p, 0.1, 0.9),
    "nn.Adam": lambda p: nn.Adam(p, 0.1),
    "nn.AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.1),
    "nn.RMSProp": lambda p: nn.RMSProp(p, 0.1),
    "nn.Adagrad": lambda p: nn.Adagrad(p, learning_rate=0.1),
    "nn.FTRL": lambda p: nn.FTRL(p, learning_rate=0.1),
    "nn.AdaFactor": lambda p: nn.AdaFactor(p, 0.1, scale_parameter=False, relative_step=False),
    "nn.Lamb": lambda p: nn.Lamb(p, 0.1),
    "nn.LARS": lambda p: nn.LARS(nn.Momentum(p, 0.1, 0.9)),
    "experimental.SGD": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
    "experimental.Adam": lambda p: optim.Adam(p, lr=0.1),
    "experimental.AdamW": lambda p: optim.AdamW(p, lr=0.1),
    "mint.SGD": lambda p: mint.optim.SGD(p, 0.1),
    "mint.Adam": lambda p: mint.optim.Adam(p, 0.1),
    "mint.AdamW": lambda p: mint.optim.AdamW(p, 0.1),
}
MORE_OPTIMIZERS: Mapping[str, Callable] = {
    "nn.LazyAdam": lambda p: nn.LazyAdam(p, 0.1),
    "nn.AdamOffload": lambda p: nn.AdamOffload(p, 0.1),
    "nn.ASGD": lambda p: nn.ASGD(p, 0.1),
    "nn.Rprop": lambda p: nn.Rprop(p, 0.1),
    "nn.ProximalAdagrad": lambda p: nn.ProximalAdagrad(p, learning_rate=0.1),
    "nn.AdaMax": lambda p: nn.AdaMax(p, 0.1),
    "nn.Adadelta": lambda p: nn.Adadelta(p, 0.1),
    "experimental.ASGD": lambda p: optim.ASGD(p, lr=0.1),
    "experimental.Adadelta": lambda p: optim.Adadelta(p, lr=0.1),
    "experimental.Adagrad": lambda p: optim.Adagrad(p, lr=0.1),
    "experimental.Adamax": lambda p: optim.Adamax(p, lr=0.1),
    "experimental.NAdam": lambda p: optim.NAdam(p, lr=0.1),
    "experimental.RAdam": lambda p: optim.RAdam(p, lr=0.1),
    "experimental.RMSprop": lambda p: optim.RMSprop(p, lr=0.1),
    "experimental.Rprop": lambda p: optim.Rprop(p, lr=0.1),
}
_STARTS = (np.array([[1.0, -2.0, 0.5], [3.0, 0.25, -1.0]]), np.array([0.5, -1.5]))


def _parameters() -> list[Parameter]:
    return [Parameter(Tensor(start.astype(np.float32)), name=f"p{n}") for n, start in enumerate(_STARTS)]


def _gradients() -> list[tuple]:
    rng = np.random.RandomState(6)
    return [tuple(rng.randn(*start.shape).astype(np.float32) for start in _STARTS) for _ in range(4)]


def _updated_plain(make: Callable) -> list[np.ndarray]:
    """Return the parameters after two updates of plain MindSpore with the mean gradients of two windows."""
    optimizer = make(_parameters())

    @ms.jit
    def update(*grads: Any) -> Any:
        return optimizer(grads)

    for first, second in zip(_gradients()[::2], _gradients()[1::2]):
        total = sum(_WEIGHTS)
        update(*(Tensor((_WEIGHTS[0] * a + _WEIGHTS[1] * b) / total, ms.float32) for a, b in zip(first, second)))
    return [as_array(parameter).astype(np.float64) for parameter in inner_of(optimizer).parameters]


def _updated(make: Callable) -> list[np.ndarray]:
    """Return the parameters after two windows of the Accumulator."""
    optimizer = make(_parameters())
    accumulator = Accumulator(optimizer, 2, reduction="mean", group=None)
    for number, grads in enumerate(_gradients()):
        accumulator(tuple(map(Tensor, grads)), _WEIGHTS[number % 2])
    return [as_array(parameter).astype(np.float64) for parameter in optimizer.parameters]


def _try_optimizer(make: Callable) -> tuple[float, str]:
    """Return the error of an optimizer, 0 if it does not run, and what to print about it."""
    problem, actual = "", list(_STARTS)
    try:
        with without_logs():
            actual = _updated(make)
    except Exception as error:
        problem = reason_of(error)
        if isinstance(error, ValueError) and str(error).startswith("For 'Accumulator', "):  # before it ran
            return 0.0, f"rejected: {problem}"
    try:
        with without_logs():
            expected = _updated_plain(make)
    except Exception as error:
        return 0.0, f"MindSpore: {reason_of(error)}"
    if not any(np.abs(after - before).max() for after, before in zip(expected, _STARTS)):
        return 0.0, "MindSpore: it changes nothing"
    wrong = np.inf if problem else _error(actual, expected, _STARTS)
    return wrong, "ok" if wrong <= _MOMENTS else problem or f"wrong by {wrong:.1e}"


def check_optimizers(makers: Mapping[str, Callable] = OPTIMIZERS) -> Measured:
    """Compare two windows of the Accumulator with two updates of plain MindSpore, for each optimizer."""
    tried = {name: _try_optimizer(make) for name, make in makers.items()}
    details = {name: text for name, (_, text) in tried.items()}
    run = sum(text == "ok" for text in details.values())
    wrong = [name for name, (error, _) in tried.items() if error > _MOMENTS]
    note = f"{run} of {len(tried)} run" + (f", not right: {', '.join(wrong)}" if wrong else "")
    return Measured(max(error for error, _ in tried.values()), _MOMENTS, note, details)


def _in_place(name: str, x: Parameter, *arguments: Any) -> Any:
    """Run an in-place method in a graph, where alone it works on CPU; return the Parameter."""
    graph = ms.jit(_multiplied if name == "mul_" else _copied)
    graph(x, *arguments)
    return x


def _multiplied(x: Any, factor: Any) -> Any:
    return ops.depend(x, x.mul_(factor))


def _copied(x: Any, other: Any) -> Any:
    return ops.depend(x, x.copy_(other))


def _operators() -> dict[str, tuple[Callable[[], Any], Any]]:
    """Return the operators that ms_accum calls on this device, by name: a call, and its result by NumPy."""
    a, b = np.array([[1.0, -2.0], [4.0, 3.0]], np.float32), np.array([[2.0, 5.0], [-1.0, 0.0]], np.float32)
    x, y, bad = Tensor(a), Tensor(b), Tensor([1.0, np.nan, np.inf], ms.float32)
    yes, no = Tensor([True, False]), Tensor([True, True])
    numbers = Tensor([6, 5], ms.int32)
    moments = [Tensor([value, value], ms.float32) for value in (1, 2, 0, 4)]  # scale, shift, mean and variance
    logits = np.log1p(np.exp(-np.abs(a))) + np.maximum(a, 0)

    def parameter() -> Parameter:
        return Parameter(Tensor(a), name="x")

    calls: dict[str, tuple[Callable[[], Any], Any]] = {
        "BatchNorm": (
            lambda: ops.BatchNorm(is_training=False, epsilon=1e-5)(x, *moments)[0],
            a / np.sqrt(4 + 1e-5) + 2,
        ),
        "MulNoNan": (lambda: tree.no_nan(bad, Tensor(0.0, ms.float32)), np.zeros(3)),
        "addn": (lambda: ops.addn([x, y, y]), a + 2 * b),
        "assign": (lambda: ops.assign(parameter(), y), b),
        "assign_add": (lambda: ops.assign_add(parameter(), y), a + b),
        "assign_sub": (lambda: ops.assign_sub(parameter(), y), a - b),
        "binary_cross_entropy_with_logits": (
            lambda: ops.binary_cross_entropy_with_logits(
                x, ops.zeros_like(x), ops.ones_like(x), ops.ones_like(x), reduction="none"
            ),
            logits,
        ),
        "bitwise_right_shift": (lambda: ops.bitwise_right_shift(numbers, Tensor(1, ms.int32)), [3, 2]),
        "bitwise_xor": (lambda: ops.bitwise_xor(numbers, Tensor(3, ms.int32)), [5, 6]),
        "cast": (lambda: ops.cast(x, ms.int32), a),
        "cat": (lambda: ops.cat((x, y)), np.concatenate((a, b))),
        "gather": (lambda: ops.gather(x, Tensor([1, 1], ms.int32), 0), a[[1, 1]]),
        "isfinite": (lambda: ops.isfinite(bad), [True, False, False]),
        "logical_and": (lambda: ops.logical_and(yes, no), [True, False]),
        "logical_not": (lambda: ops.logical_not(yes), [False, True]),
        "logical_or": (lambda: ops.logical_or(yes, no), [True, True]),
        "matmul": (lambda: ops.matmul(x, y), a @ b),
        "maximum": (lambda: ops.maximum(x, y), np.maximum(a, b)),
        "mean": (lambda: ops.mean(x), 1.5),
        "minimum": (lambda: ops.minimum(x, y), np.minimum(a, b)),
        "pow": (lambda: ops.pow(x, Tensor(2, ms.int32)), a**2),
        "ones_like": (lambda: ops.ones_like(x), np.ones((2, 2))),
        "relu": (lambda: ops.relu(x), np.maximum(a, 0)),
        "reshape": (lambda: ops.reshape(x, (4,)), a.ravel()),
        "sqrt": (lambda: ops.sqrt(ops.square(x)), np.abs(a)),
        "square": (lambda: ops.square(x), a**2),
        "stack": (lambda: ops.stack((x, y)), np.stack((a, b))),
        "sum": (lambda: ops.sum(x, 1), a.sum(1)),
        "mint.sum": (lambda: mint.sum(mint.sum(x, 1)), a.sum()),
        "unsorted_segment_sum": (lambda: ops.unsorted_segment_sum(x, Tensor([1, 1], ms.int32), 2), [[0, 0], [5, 1]]),
        "unstack": (lambda: ops.unstack(x)[1], a[1]),
        "where": (lambda: ops.where(yes, Tensor(1.0, ms.float32), Tensor(2.0, ms.float32)), [1, 2]),
        "zeros": (lambda: ops.zeros((2, 2), ms.float32), np.zeros((2, 2))),
        "zeros_like": (lambda: ops.zeros_like(x), np.zeros((2, 2))),
    }
    device = ms.get_context("device_target")
    if device == "CPU":
        calls["cdist"] = (lambda: ops.cdist(x, ops.zeros((1, 2), ms.float32)), np.linalg.norm(a, axis=1)[:, None])
    library = native.library()
    if library is not None:
        norm = NativeKernels(library).norm
        calls["Custom"] = (lambda: norm((x, y)), np.sqrt((a**2).sum() + (b**2).sum()))
    if tree.has_in_place():
        calls["Tensor.mul_"] = (lambda: _in_place("mul_", parameter(), Tensor(3.0, ms.float32)), 3 * a)
        calls["Tensor.copy_"] = (lambda: _in_place("copy_", parameter(), y), b)
    return calls


def check_operators() -> Measured:
    """Run each operator that ms_accum calls once, and compare it with NumPy."""
    details, errors = {}, []
    calls = _operators()
    for name, (call, expected) in calls.items():
        try:
            with synchronously():
                actual = np.asarray(as_array(call()), np.float64)
            error = float(np.abs(actual - np.asarray(expected, np.float64)).max(initial=0.0))
            errors.append(error if error <= ROUNDED else np.inf)
            details[name] = "ok" if error <= ROUNDED else f"wrong by {error:.1e}"
        except Exception as error:
            errors.append(np.inf)
            details[name] = f"missing: {reason_of(error)}"
    missing = [name for name, text in details.items() if text != "ok"]
    note = f"not right: {', '.join(missing)}" if missing else f"{len(calls)} of {len(calls)} run"
    return Measured(max(errors), ROUNDED, note, details)


class _Wide(nn.Cell):
    """The network whose speed is measured: 670,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(784, 512), nn.ReLU(), nn.Dense(512, 512), nn.ReLU(), nn.Dense(512, 10))

    def construct(self, x: Any) -> Any:
        return self.layers(x)


def measure_cost() -> Measured:
    """Measure milliseconds of a micro-batch: with an update for each in plain MindSpore, in the driver, and in a step.

    Nothing is asserted about these. The three take turns, and the fastest round counts.
    """
    batch = tuple(column for column in _batches([32], 784)[0])
    batches = [batch] * (_WINDOWS * _SIZE)
    plain_network, driven, stepped = _Wide(), _Wide(), _Wide()
    plain = ms.jit(_step_of(plain_network, _loss_fn(), _momentum(plain_network)))
    model = GradientAccumulation(driven, _loss_fn(), _momentum(driven), check="off", group=None)
    optimizer = _momentum(stepped)
    accumulator = Accumulator(optimizer, _SIZE, reduction="mean", group=None)
    step = ms.jit(_accumulating_step(stepped, optimizer, accumulator))

    def loop(train: Callable) -> None:
        for x, y in batches:
            loss = train(x, y)
        loss.asnumpy()

    ways = {
        "plain MindSpore": partial(loop, plain),
        "driver": partial(model.train_process, 1, batches, _SIZE, report=(), ckpt_path=None),
        "Accumulator": partial(loop, step),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(_ROUNDS + 1):  # the first one compiles
        for name, run in ways.items():
            began = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - began)
    times = {name: 1000 * min(measured) / len(batches) for name, measured in seconds.items()}
    plain_ms = times["plain MindSpore"]
    details = {
        name: f"{ms_each:.2f} ms a micro-batch, {ms_each / plain_ms:.2f} of plain" for name, ms_each in times.items()
    }
    return Measured(None, None, "MLP, 32 rows, N=4; plain MindSpore updates for each", details)


# Several processes


def _batches_of_rank(batches: Sequence[tuple], group: Group) -> Sequence[tuple]:
    return batches[group.rank :: group.size]


def _spread(network: nn.Cell, group: Group) -> float:
    """Return the number of bytes in which the weights of the ranks differ from those of rank 0."""
    content = np.frombuffer(b"".join(as_array(p).tobytes() for p in network.trainable_params()), np.uint8)
    arrays = gather_arrays(content, group)
    return float(sum((array != arrays[0]).sum() for array in arrays))


def check_sum_over_ranks(group: Group, make: Callable = _momentum, **options: Any) -> Measured:
    """Uneven shards of two windows give what one process gets with all rows; then the ranks' weights are equal."""
    batches = _batches(([8, 5] * group.size + [5, 8] * group.size)[: 4 * group.size])
    network = _Classifier()
    model = GradientAccumulation(network, _loss_fn(), make(network), check="off", **options)
    model.train_process(1, list(_batches_of_rank(batches, group)), 2, report=(), ckpt_path=None)
    result = _compare(network, _train_plain(_Classifier(), _split(batches, 2 * group.size)))
    different = _spread(network, group)
    return result if not different else Measured(np.inf, ROUNDED, f"{different:.0f} bytes differ between ranks")


def check_accumulator_on_ranks(group: Group) -> Measured:
    """The same with an Accumulator in a compiled step."""
    batches = _batches([8, 5] * (2 * group.size))
    network = _Classifier()
    optimizer = _momentum(network)
    accumulator = Accumulator(optimizer, 2, reduction="mean", network=network)
    step = ms.jit(_accumulating_step(network, optimizer, accumulator))
    for batch in _batches_of_rank(batches, group):
        step(*batch)
    accumulator.flush()
    return _compare(network, _train_plain(_Classifier(), _split(batches, 2 * group.size)))


def check_nan_on_one_rank(group: Group) -> Measured:
    """NaN on the last rank lets all ranks skip that window."""
    last = group.rank == group.size - 1
    network = _Slope()
    batches = _slopes([np.nan if last else 2.0, 1.0], [4.0 + group.rank, -1.0])
    model = GradientAccumulation(network, None, _sgd(network), check="off")
    model.train_process(1, batches, 1, report=(), ckpt_path=None)
    expected = [-(4.0 + (group.size - 1) / 2), 1.0]
    return _compare_slope(network.w, expected, {"updates": (model.updates, 1), "skipped": (model.skipped, 1)})


def _sharded(network: nn.Cell) -> ZeroOptimizer:
    return ZeroOptimizer(lambda parameters: nn.Momentum(parameters, 0.1, 0.9), network.trainable_params())


CHECKS = (
    Check("float32: equal to one large batch", check_float32),
    Check("float16: equal to one large batch", check_float16),
    Check("bfloat16: equal to one large batch", check_bfloat16),
    Check("uneven micro-batches and a tail", check_uneven_and_tail),
    Check("the same in graph mode", check_graph_mode),
    Check("the same with compile=False", check_not_compiled),
    Check("the same in Model", check_model),
    Check("Accumulator in a compiled step", partial(check_accumulator, True)),
    Check("Accumulator in a plain loop", partial(check_accumulator, False)),
    Check("clip_norm", check_clip_norm),
    Check("learning-rate schedule", check_schedule),
    Check("NaN: skip_window", check_skip_window),
    Check("NaN: skip_micro", check_skip_micro),
    Check("NaN: raise", check_raise),
    Check("Ema", check_ema),
    Check("loss scale, with overflows", check_loss_scale),
    Check("resume inside a window", check_resume),
    Check("sparse gradients", check_sparse),
    Check("a loss of several terms", check_terms),
    Check("optimizers", check_optimizers),
    Check("operators", check_operators),
    Check("cost", measure_cost),
)
"""tuple[Check], those of a run without flags."""

MORE_CHECKS = (
    Check("convolution and pooling", check_convolutions),
    Check("reduction='sum'", check_sum),
    Check("tail='carry'", check_carry),
    Check("a growing window", check_growing_window),
    Check("CoupledLoss", check_coupled),
    Check("resume in graph mode", check_resume_in_graph_mode),
    Check("more optimizers", partial(check_optimizers, MORE_OPTIMIZERS)),
)
"""tuple[Check], those that --full adds."""

RANK_CHECKS = (
    Check("ranks: equal to one process", check_sum_over_ranks),
    Check("ranks: NaN on one rank", check_nan_on_one_rank),
)
"""tuple[Check], those with several processes."""

MORE_RANK_CHECKS = (
    Check("ranks: Accumulator", check_accumulator_on_ranks),
    Check("ranks: ZeRO-1", partial(check_sum_over_ranks, make=_sharded)),
)
"""tuple[Check], those that --full adds with several processes."""
