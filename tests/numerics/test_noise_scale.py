"""Is the estimate of the gradient noise scale the known one where that is known?"""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.train import Model

from helpers import Recorder
from ms_accum import AccumulatedTrainStep, Accumulator, FlushTail, GradientAccumulation, NoiseScale
from test_train_step import dataset

D, SIGMA = 6, 2.0
AIM = np.linspace(0.5, 1.5, D).astype(np.float32)
# Half the squared error of a linear model at 0: a row's gradient is r x with r = AIM x + SIGMA e, so
# |G|^2 = |AIM|^2, and the trace of its variance is (D + 1) |AIM|^2 + D SIGMA^2.
KNOWN = D + 1 + D * SIGMA**2 / float(AIM @ AIM)


class Linear(nn.Cell):
    """Half the mean squared error of a linear model, as its own loss."""

    def __init__(self, summing=False):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros((D, 1)), ms.float32), name="w")
        self.summing = summing

    def construct(self, x, y):
        squares = ops.square(ops.matmul(x, self.w) - y) / 2
        return ops.sum(squares) if self.summing else ops.mean(squares)


def rows_of(rng, rows):
    x = rng.randn(rows, D).astype(np.float32)
    y = x @ AIM + SIGMA * rng.randn(rows).astype(np.float32)
    return Tensor(x), Tensor(y.reshape(-1, 1))


def data(rows, seed=2):
    rng = np.random.RandomState(seed)
    return [rows_of(rng, count) for count in rows]


def estimate(rows, window, noise=None, summing=False, scaled=1.0, **options):
    noise = noise or NoiseScale(every=1, decay=0.9999)
    network = Linear(summing)
    options = {"reduction": "sum" if summing else "mean", "check": "off", "noise_scale": noise, **options}
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1e-9, loss_scale=scaled), **options)
    model.train_process(1, data(rows), window, report=(), ckpt_path=None)
    return noise


def by_numpy(rows, window, decay=0.9999, unbiased=True):
    """The estimate from the gradients of a window's first micro-batch and of the window, which are known at 0."""
    variance = square = 0.0
    given = data(rows)
    for begin in range(0, len(rows), window):
        gradients = [-(x.asnumpy() * y.asnumpy()).astype(np.float64) for x, y in given[begin : begin + window]]
        few, many = len(gradients[0]), sum(map(len, gradients))
        small, large = (np.sum(np.mean(each, axis=0) ** 2) for each in (gradients[0], np.concatenate(gradients)))
        variance = decay * variance + (small - large) / (1 / few - 1 / many)
        square = decay * square + ((many * large - few * small) / (many - few) if unbiased else large)
    return variance / square


@pytest.mark.parametrize("rows", [[4] * 4, [2, 7, 3]], ids=["even", "uneven"])
def test_the_formula_gives_that_of_linear_regression(rows):
    """And the plain ratio, which is the mutant, does not."""
    assert by_numpy(rows * 1500, len(rows)) == pytest.approx(KNOWN, rel=0.1)
    assert abs(by_numpy(rows * 1500, len(rows), unbiased=False) - KNOWN) > 0.3 * KNOWN


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"summing": True}], ids=["mean", "sum"])
def test_it_is_that_of_linear_regression(options):
    noise = estimate([4] * 4 * 1500, 4, **options)
    assert noise.samples == 1500 and noise.rows == pytest.approx(KNOWN, rel=0.1)


@pytest.mark.host
@pytest.mark.parametrize("options", [{}, {"summing": True}, {"loss_scale": 64}, {"clip_norm": 0.1},
                                     {"loss_scale": amp.DynamicLossScaler(8.0, 2, 50)}, {"nonfinite": "skip_micro"},
                                     {"scaled": 32.0}],
                         ids=["mean", "sum", "scaled", "clipped", "dynamic", "skipping", "by optimizer"])  # fmt: skip
def test_it_is_the_formula(options):
    noise = estimate([4] * 4 * 30, 4, **options)
    assert noise.samples == 30 and noise.rows == pytest.approx(by_numpy([4] * 4 * 30, 4), rel=1e-4)


@pytest.mark.host
def test_uneven_micro_batches():
    assert estimate([2, 7, 3] * 30, 3).rows == pytest.approx(by_numpy([2, 7, 3] * 30, 3), rel=1e-4)


@pytest.mark.parametrize("wait", [True, False], ids=["together", "one by one"])
def test_in_graphs_up_to_eight_micro_batches_are_run_together(wait):
    noise = estimate([4] * 4 * 30, 4, wait=wait)
    assert noise.rows == pytest.approx(by_numpy([4] * 4 * 30, 4), rel=1e-4) and noise.samples == 30


@pytest.mark.host
def test_every_so_many_windows_are_sampled():
    assert [estimate([4] * 40, 4, NoiseScale(every=each)).samples for each in (1, 3, 10, 99)] == [10, 4, 1, 1]
    assert estimate([4] * 40, 1, NoiseScale(every=1)).samples == 0


@pytest.mark.host
def test_training_is_the_same():
    def weights(noise):
        network, recorder = Linear(), Recorder()
        model = GradientAccumulation(network, None, nn.Momentum([network.w], 0.01, 0.9), check="off", noise_scale=noise)
        model.train_process(1, data([4] * 22), 4, report=recorder, ckpt_path=None)
        return network.w.asnumpy().tolist()

    assert weights(NoiseScale(every=2)) == weights(None)


@pytest.mark.host
def test_a_window_that_is_skipped_does_not_count():
    rows = data([4] * 8)
    rows[1] = (Tensor(np.full((4, D), np.nan, np.float32)), rows[1][1])
    noise, network = NoiseScale(every=1), Linear()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1e-9), check="off", noise_scale=noise)
    model.train_process(1, rows, 4, report=(), ckpt_path=None)
    assert (noise.samples, model.skipped) == (1, 1)


@pytest.mark.host
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loop_of_ones_own(reduction):
    noise, network, rows = NoiseScale(every=1, decay=0.9999), Linear(), data([4] * 4 * 30)
    optimizer = nn.SGD([network.w], 1e-9)
    accumulator = Accumulator(optimizer, 4, reduction=reduction, loss_scale=8)
    share = 4 if reduction == "sum" else 1

    def forward(x, y):
        return accumulator.scale(network(x, y) / share)

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters)
    for x, y in rows:
        grads = grad_fn(x, y)[1]
        accumulator(grads) if reduction == "sum" else accumulator(grads, 4)
        noise.observe(accumulator, 4)
    assert noise.samples == 30
    assert noise.rows == pytest.approx(by_numpy([4] * 4 * 30, 4), rel=1e-4)


@pytest.mark.host
def test_model():
    noise, network = NoiseScale(every=1, decay=0.9999), Linear()
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 1e-9), 4, check="off")
    Model(step).train(1, dataset(data([4] * 4 * 30)), callbacks=[FlushTail(), noise], dataset_sink_mode=False)
    assert noise.samples == 30
    assert noise.rows == pytest.approx(by_numpy([4] * 4 * 30, 4), rel=1e-4)
    with pytest.raises(TypeError, match="'network' must be an AccumulatedTrainStep of Model"):
        Model(network, optimizer=nn.SGD([network.w], 1e-9)).train(1, dataset(data([4])), callbacks=noise)


@pytest.mark.host
def test_the_advice():
    assert NoiseScale().advice.startswith("no estimate: no window with several")
    noise = estimate([4] * 4 * 30, 4)
    assert noise.advice.startswith(f"about {noise.rows:,.0f} rows (windows had 16 rows)")
    noise._variance = -1.0
    assert math.isnan(noise.rows) and noise.advice.startswith("no estimate from 30 windows: more samples")


@pytest.mark.host
@pytest.mark.parametrize("arguments", [(0,), (1.5,), (1, 1.0), (1, -0.1), (1, "0.9")])
def test_refused(arguments):
    with pytest.raises((TypeError, ValueError), match="For 'NoiseScale', '(every|decay)' must be"):
        NoiseScale(*arguments)
    with pytest.raises(TypeError, match="'noise_scale' must be a NoiseScale, but got int"):
        estimate([4], 1, noise=3)
