"""Checks on this device what ms_accum promises: python -m ms_accum.selftest [--device_target Ascend]

Each check trains a few micro-batches, and returns the largest error. What is expected comes from NumPy, or from plain
MindSpore with one large batch, never from ms_accum.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

os.environ.setdefault("GLOG_v", "3")  # MindSpore's errors only; it reads this when it is imported

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn, ops
from mindspore.train import Model

from . import __version__
from ._check import first_words, one_line
from .accumulator import Accumulator
from .driver import GradientAccumulation
from .engine.ema import Ema
from .model_step import AccumulatedTrainStep
from .network.parameters import as_array
from .ranks.group import Group, own_group
from .saving.checkpointer import Checkpointer, Stopped
from .training.model_callbacks import FlushTail

OK, FAILED, NOT_RUN = "ok", "FAILED", "not run"
ROWS, WINDOW = (8, 5, 8, 5, 8), 3
"""tuple[int], rows of micro-batches: uneven, and the last window is shorter than the others."""
FLOAT32, ADAM, HALF = 1e-5, 1e-4, 3e-2
_SINGLE: Any = {"check": "off", "group": None}
Batch = tuple[np.ndarray, ...]


class NotHere(Exception):
    """Raised when plain MindSpore does not run something on this device."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks, print a text for an issue with a line for each, and return the exit code: 1 if one has failed."""
    parser = argparse.ArgumentParser("python -m ms_accum.selftest", description=__doc__.partition(":")[0] + ".")
    text = "the device; auto is the default of this MindSpore (default: auto)"
    parser.add_argument("--device_target", choices=("auto", "CPU", "GPU", "Ascend"), default="auto", help=text)
    target, default = parser.parse_args(argv).device_target, ms.get_context("device_target")
    if target not in ("auto", default):
        try:
            ms.set_device(target)
        except Exception:
            parser.error(f"argument --device_target: {target} is not available here, {default} is")
    group = own_group()
    if group.rank != 0:  # rank 0 prints for all
        sys.stdout = open(os.devnull, "w", encoding="utf-8")
    facts = f"ms_accum {__version__}, {ms.get_context('device_target')}, mindspore {ms.__version__}, "
    facts += f"numpy {np.__version__}, python {platform.python_version()}, {platform.platform()}, ranks {group.size}"
    print("To report the result, paste this into an issue:\n\n```text", facts, sep="\n")
    print(f"{'check':46}{'error':>9}{'at most':>9}{'time':>9}", flush=True)
    checks = checks_of(group)
    failed = [name for name, check, tolerance in checks if run_check(name, check, tolerance) == FAILED]
    print("```", flush=True)
    if failed:
        print(f"error: {len(failed)} of {len(checks)} checks failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def checks_of(group: Group) -> list[tuple[str, Callable[[], float], float]]:
    """Return the checks: the name, a function that returns the error, and the largest error that passes."""
    checks: list[tuple[str, Callable[[], float], float]] = [
        ("equal to one large batch: uneven rows, a tail", partial(error_of, drive), FLOAT32),
        ("the same in graph mode", graph_mode, FLOAT32),
        ("the same in Model", partial(error_of, fit), FLOAT32),
        ("the same with an Accumulator, and Adam", partial(error_of, accumulate, make=nn.Adam), ADAM),
        ("the same in float16", partial(error_of, drive, ms.float16), HALF),
        ("the same in bfloat16", partial(error_of, drive, ms.bfloat16), 2 * HALF),
        ("clip_norm, and a schedule by update", clip_and_schedule, FLOAT32),
        ("NaN: a window or a micro-batch is left out", not_finite, FLOAT32),
        ("loss scale with overflows, an average", scale_and_average, HALF),
        ("resumed inside a window: bytes that differ", resume, 0.0),
    ]
    return checks + ([("ranks: equal to one process", partial(ranks, group), FLOAT32)] if group.size > 1 else [])


def run_check(name: str, check: Callable[[], float], tolerance: float) -> str:
    """Run a check, print its line, and return its status: it has failed, too, if it raises an error."""
    began, error, note = time.perf_counter(), None, ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = check()
        status = OK if error <= tolerance else FAILED  # NaN is not
    except NotHere as reason:
        status, note = NOT_RUN, f": {one_line(reason)}"
    except Exception as reason:
        status, note = FAILED, f": {type(reason).__name__}: {one_line(first_words(str(reason)))}"
    shown, seconds = "-" if error is None else f"{error:.1e}", time.perf_counter() - began
    print(f"{name:46}{shown:>9}{tolerance:>9.0e}{seconds:7.1f} s  {status}{note}", flush=True)
    return status


# A network of two layers, trained in several ways


def network_of(dtype: Any = ms.float32) -> nn.Cell:
    """Return a network that begins with the same weights each time."""
    random = np.random.RandomState(2)
    layers = [nn.Dense(*shape, Tensor(random.randn(*shape[::-1]), ms.float32), "zeros") for shape in ((6, 8), (8, 3))]
    return nn.SequentialCell(layers[0].to_float(dtype), nn.ReLU(), layers[1].to_float(dtype))


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


def step_of(network: nn.Cell, optimizer: nn.Optimizer, end: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return a compiled step that gives the gradients of a batch, and its rows, to `end`."""

    def forward(x: Any, y: Any) -> Any:
        return loss_of(network(x), y)

    gradients = ms.value_and_grad(forward, None, optimizer.parameters)

    @ms.jit
    def step(x: Any, y: Any) -> Any:
        loss, grads = gradients(x, y)
        return ops.depend(loss, end(grads, x.shape[0]))

    return step


def accumulate(network: nn.Cell, optimizer: nn.Optimizer, batches: Sequence[Batch]) -> None:
    """Train in a loop of one's own."""
    accumulator = Accumulator(optimizer, WINDOW, reduction="mean", group=None)
    step = step_of(network, optimizer, accumulator)
    for batch in batches:
        step(*map(Tensor, batch))
    accumulator.flush()


def large_batches(network: nn.Cell, optimizer: nn.Optimizer, batches: Sequence[Batch], window: int = WINDOW) -> None:
    """Train with plain MindSpore, with each window as one batch."""

    def update(grads: Any, rows: Any) -> Any:
        return optimizer(grads)

    step = step_of(network, optimizer, update)
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
    window = WINDOW * group.size
    batches = batches_of(([8, 5] * group.size + [5, 8] * group.size)[: 2 * window])
    batches = batches[: len(batches) // window * window]
    expected, network = network_of(), network_of()
    large_batches(expected, momentum(expected.trainable_params(), 0.1), batches, window)
    drive(network, momentum(network.trainable_params(), 0.1), batches[group.rank :: group.size], group="auto")
    return relative(weights(network), weights(expected), weights(network_of()))


# A network with one Parameter, whose gradient is the mean of its rows


def slope(gradients: Any, window: int, *, rate: Any = 1.0, dtype: Any = ms.float32, **options: Any) -> tuple[Any, Any]:
    """Return the driver and the network, trained on a micro-batch of two rows for each gradient."""
    network = nn.Dense(2, 1, "zeros", has_bias=False).to_float(dtype)
    optimizer = nn.SGD(network.trainable_params(), rate)

    def loss(product: Any) -> Any:
        return ops.mean(ops.cast(product, ms.float32))

    model = GradientAccumulation(network, loss, optimizer, **{**_SINGLE, **options})
    rows = np.array([[[-0.5], [0.5]]]) + np.asarray(gradients, np.float64)[:, None]
    model.train_process(1, [(Tensor(x, ms.float32),) for x in rows], window, report=(), ckpt_path=None)
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
    model, network = slope([[2.0, 1.0]] * 12, 2, dtype=ms.float16, loss_scale=scaler, ema=ema)
    lowered = float(model.loss_scale) == 2.0 ** (18 - model.overflows)
    if not model.overflows or model.overflows + model.updates != 6 or not lowered:
        return np.inf
    average = 1.0
    for step in range(2, model.updates + 1):
        average = 0.75 * average + 0.25 * step
    with ema.applied():
        return relative(weights(network), -average * np.array([2.0, 1.0]))


if __name__ == "__main__":
    sys.exit(main())
