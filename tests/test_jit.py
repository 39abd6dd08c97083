"""An Accumulator in each way in which MindSpore compiles a step."""

from __future__ import annotations

import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from helpers import Slope
from ms_accum import Accumulator
from reference import miss
from running import run_python


def make_step(window, **options):
    """Return an Accumulator, and a step that returns its counters."""
    network = Slope()
    accumulator = Accumulator(nn.SGD([network.w], 1.0), window, reduction="mean")
    grad_fn = ms.value_and_grad(network, None, accumulator.optimizer.parameters)

    @ms.jit(**options)
    def step(x):
        loss, grads = grad_fn(x)
        accumulator(grads, x.shape[0])
        return (accumulator.updated, accumulator.updates, accumulator.micro_batches), loss

    return network, accumulator, step


BYTECODE = pytest.mark.skipif(sys.version_info >= (3, 12), reason="MindSpore raises Unsupported")


@pytest.mark.parametrize(
    ("window", "options"),
    [(1, {"fullgraph": True}), pytest.param(2, {"capture_mode": "bytecode"}, marks=BYTECODE), (2, {})],
)
def test_counters_read_inside_step_are_current(window, options):
    network, accumulator, step = make_step(window, **options)
    for number in range(4):
        inside = [int(counter) for counter in step(Tensor([[1.0 + number]], ms.float32))[0]]
        assert inside == [int(each) for each in (accumulator.updated, accumulator.updates, accumulator.micro_batches)]
        assert inside == [window == 1 or number in (1, 3), (number + 1) // window, (number + 1) % window]
    assert network.w.asnumpy()[0] == -10.0 / window


def test_trace_capture_mode_is_rejected(tmp_path):
    """In a separate process: one in which a trace has failed does not end cleanly."""
    program = """
import mindspore as ms
from mindspore import Tensor, nn
from helpers import Slope
from ms_accum import Accumulator, GradientAccumulation, TrainForwardBackward, TrainOptim

ms.set_context(mode=ms.PYNATIVE_MODE)
network = Slope()
optimizer = nn.SGD([network.w], 1.0)
grad_sum = optimizer.parameters.clone("sum", "zeros")
cells = [lambda x: Accumulator(optimizer, 2)((x,)), TrainForwardBackward(network, optimizer, grad_sum)]
for made in (*cells, lambda x: TrainOptim(optimizer, grad_sum)()):
    try:
        ms.jit(lambda x: made(x), capture_mode="trace")(Tensor([1.0], ms.float32))
    except RuntimeError as error:
        print(error)
try:  # MindSpore is still tracing
    model = GradientAccumulation(network, None, optimizer, check="off")
    model.train_process(1, [(Tensor([[1.0]], ms.float32),)], 1, report=(), ckpt_path=None)
except RuntimeError as error:
    print(error)
print(network.w.asnumpy(), grad_sum[0].asnumpy(), flush=True)
"""
    (tmp_path / "program.py").write_text(program)  # MindSpore compiles functions of files only
    done = run_python("program.py", cwd=tmp_path)
    *messages, last = done.stdout.splitlines()
    assert [line[: line.index(" the step")] for line in messages] == [
        f"For '{owner}'," for owner in ("Accumulator", "TrainForwardBackward", "TrainOptim", "GradientAccumulation")
    ], done.stderr
    assert all("compiled by ms.jit without capture_mode='trace'" in line for line in messages)
    assert all(line.endswith("left MindSpore tracing: restart the process.") for line in messages)
    assert last == "[0.] [0.]"


@pytest.mark.slow
def test_dynamic_shapes_work_without_own_operators(monkeypatch, rng):
    """With them MindSpore fails: it does not know the shapes of gradients."""
    monkeypatch.setenv("MS_ACCUM_NATIVE", "0")
    start = rng.randn(2, 3).astype(np.float32)
    network = nn.Dense(3, 2, weight_init=Tensor(start), has_bias=False)
    accumulator = Accumulator(nn.SGD([network.weight], 0.1), 2, reduction="mean")
    grad_fn = ms.value_and_grad(nn.WithLossCell(network, nn.MSELoss()), None, accumulator.optimizer.parameters)

    @ms.jit(dynamic=1)
    def step(x, y):
        loss, grads = grad_fn(x, y)
        return ops.depend(loss, accumulator(grads, x.shape[0]))

    columns, expected = rng.randn(13, 3), start.astype(np.float64)
    for rows in np.split(columns, [4, 7, 9]):
        step(Tensor(rows, ms.float32), Tensor(rows[:, :2], ms.float32))
    for window in columns[:7], columns[7:]:
        expected = expected - 0.1 * (window @ expected.T - window[:, :2]).T @ window / len(window)
    assert miss([network.weight.asnumpy()], [expected], 1e-5) <= 1
    assert miss([start], [expected], 1e-5) >= 100


def test_strict_jit_syntax_compiles():
    """With the setting that rejects Python code that MindSpore can't compile."""
    ms.set_context(jit_syntax_level=ms.STRICT)
    try:
        network, accumulator, step = make_step(2)
        for value in (1.0, 2.0):
            step(Tensor([[value]], ms.float32))
        assert network.w.asnumpy()[0] == -1.5 and np.isfinite(accumulator.grad_norm)
    finally:
        ms.set_context(jit_syntax_level=ms.LAX)
