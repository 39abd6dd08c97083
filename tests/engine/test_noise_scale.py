"""Does the estimate of the gradient noise scale match the known value?"""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.train import Model

from helpers import Recorder, mutate
from ms_accum import (
    AccumulatedTrainStep,
    Accumulator,
    Checkpointer,
    CheckpointError,
    FlushTail,
    GradientAccumulation,
    NoiseScale,
    ResumableLoop,
    SaveStates,
    Stopped,
)
from runs import stop_after
from test_model_step import dataset

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
    micro_batches = data(rows)
    for begin in range(0, len(rows), window):
        gradients = [-(x.asnumpy() * y.asnumpy()).astype(np.float64) for x, y in micro_batches[begin : begin + window]]
        few, many = len(gradients[0]), sum(map(len, gradients))
        small, large = (np.sum(np.mean(rows, axis=0) ** 2) for rows in (gradients[0], np.concatenate(gradients)))
        variance = decay * variance + (small - large) / (1 / few - 1 / many)
        square = decay * square + ((many * large - few * small) / (many - few) if unbiased else large)
    return variance / square


@pytest.mark.parametrize("rows", [[4] * 4, [2, 7, 3]], ids=["even", "uneven"])
def test_formula_gives_known_noise_scale_of_linear_regression(rows):
    """And the plain ratio, which is the mutant, does not."""
    assert by_numpy(rows * 1500, len(rows)) == pytest.approx(KNOWN, rel=0.1)
    assert abs(by_numpy(rows * 1500, len(rows), unbiased=False) - KNOWN) > 0.3 * KNOWN


@pytest.mark.host
@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"summing": True}], ids=["mean", "sum"])
def test_estimate_matches_known_noise_scale_of_linear_regression(options):
    noise = estimate([4] * 4 * 1500, 4, **options)
    assert noise.samples == 1500 and noise.rows == pytest.approx(KNOWN, rel=0.1)


@pytest.mark.host
@pytest.mark.parametrize("options", [{}, {"summing": True}, {"loss_scale": 64}, {"clip_norm": 0.1},
                                     {"loss_scale": amp.DynamicLossScaler(8.0, 2, 50)}, {"nonfinite": "skip_micro"},
                                     {"scaled": 32.0}],
                         ids=["mean", "sum", "scaled", "clipped", "dynamic", "skipping", "by optimizer"])  # fmt: skip
def test_estimate_matches_formula(options):
    noise = estimate([4] * 4 * 30, 4, **options)
    assert noise.samples == 30 and noise.rows == pytest.approx(by_numpy([4] * 4 * 30, 4), rel=1e-4)


@pytest.mark.host
def test_estimate_with_uneven_micro_batches():
    assert estimate([2, 7, 3] * 30, 3).rows == pytest.approx(by_numpy([2, 7, 3] * 30, 3), rel=1e-4)


def test_estimate_in_graph_mode():
    noise = estimate([4] * 4 * 30, 4)
    assert noise.rows == pytest.approx(by_numpy([4] * 4 * 30, 4), rel=1e-4) and noise.samples == 30


@pytest.mark.host
def test_number_of_sampled_windows():
    assert [estimate([4] * 40, 4, NoiseScale(every=every)).samples for every in (1, 3, 10, 99)] == [10, 4, 1, 1]
    assert estimate([4] * 40, 1, NoiseScale(every=1)).samples == 0


@pytest.mark.host
def test_estimating_does_not_change_training():
    def weights(noise):
        network, recorder = Linear(), Recorder()
        model = GradientAccumulation(network, None, nn.Momentum([network.w], 0.01, 0.9), check="off", noise_scale=noise)
        model.train_process(1, data([4] * 22), 4, report=recorder, ckpt_path=None)
        return network.w.asnumpy().tolist()

    assert weights(NoiseScale(every=2)) == weights(None)


@pytest.mark.host
def test_skipped_window_is_not_sampled():
    rows = data([4] * 8)
    rows[1] = (Tensor(np.full((4, D), np.nan, np.float32)), rows[1][1])
    noise, network = NoiseScale(every=1), Linear()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 1e-9), check="off", noise_scale=noise)
    model.train_process(1, rows, 4, report=(), ckpt_path=None)
    assert (noise.samples, model.skipped) == (1, 1)


def observed_by_hand(reduction, compiled):
    """Return the estimate of a loop of the user's own, whose step is compiled or not."""
    noise, network = NoiseScale(every=1, decay=0.9999), Linear()
    optimizer = nn.SGD([network.w], 1e-9)
    accumulator = Accumulator(optimizer, 4, reduction=reduction, loss_scale=8)
    share = 4 if reduction == "sum" else 1

    def forward(x, y):
        return accumulator.scale(network(x, y) / share)

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters)

    def step(x, y):
        grads = grad_fn(x, y)[1]
        return accumulator(grads) if reduction == "sum" else accumulator(grads, 4)

    run = ms.jit(step) if compiled else step
    for x, y in data([4] * 4 * 30):
        run(x, y)
        noise.observe(accumulator, 4)
    return noise


@pytest.mark.host
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_estimate_in_custom_loop(reduction):
    noise = observed_by_hand(reduction, compiled=False)
    assert noise.samples == 30
    assert noise.rows == pytest.approx(by_numpy([4] * 4 * 30, 4), rel=1e-4)


@pytest.mark.parametrize("reduction", ["mean", pytest.param("sum", marks=pytest.mark.slow)])
def test_estimate_in_compiled_step(reduction):
    noise = observed_by_hand(reduction, compiled=True)
    assert noise.samples == 30
    assert noise.rows == pytest.approx(by_numpy([4] * 4 * 30, 4), rel=1e-4)


@pytest.mark.slow
def test_estimate_from_sums_that_are_not_emptied_is_detected(monkeypatch):
    mutate(monkeypatch, "no clear")
    expected = by_numpy([4] * 4 * 30, 4)
    assert not abs(observed_by_hand("mean", compiled=True).rows - expected) <= 100 * 1e-4 * expected  # or NaN


def bad_at(*numbers):
    """Return 30 windows of 4 micro-batches; those with these numbers in every second window are NaN."""
    rows = data([4] * 4 * 30)
    for number in (8 * window + number for window in range(15) for number in numbers):
        rows[number] = (rows[number][0] * math.nan, rows[number][1])
    return rows


def observed(rows, reduction):
    network, noise = Linear(), NoiseScale(every=1, decay=0.9999)
    accumulator = Accumulator(nn.SGD([network.w], 1e-9), 4, reduction=reduction, nonfinite="skip_micro")
    grad_fn = ms.value_and_grad(network, None, accumulator.optimizer.parameters)
    for x, y in rows:
        grads = grad_fn(x, y)[1]
        accumulator(tuple(gradient / 4 for gradient in grads)) if reduction == "sum" else accumulator(grads, 4)
        noise.observe(accumulator, 4)
    return noise


@pytest.mark.host
@pytest.mark.parametrize("numbers", [(0, 3), *(pytest.param((at,), marks=pytest.mark.slow) for at in (0, 2, 3))])
@pytest.mark.parametrize("way", ["mean", pytest.param("sum", marks=pytest.mark.slow), "Model", "driver"])
def test_window_with_left_out_micro_batch_is_not_sampled(way, numbers):
    rows, network = bad_at(*numbers), Linear()
    noise = NoiseScale(every=1, decay=0.9999)
    options = {"check": "off", "nonfinite": "skip_micro"}
    if way == "Model":
        step = AccumulatedTrainStep(network, nn.SGD([network.w], 1e-9), 4, **options)
        Model(step).train(1, dataset(rows), callbacks=[FlushTail(), noise], dataset_sink_mode=False)
    elif way == "driver":
        model = GradientAccumulation(network, None, nn.SGD([network.w], 1e-9), noise_scale=noise, **options)
        model.train_process(1, rows, 4, report=(), ckpt_path=None)
    else:
        noise = observed(rows, way)
    whole = [x for number, x in enumerate(data([4] * 4 * 30)) if number // 4 % 2]
    expected, of_whole = NoiseScale(every=1, decay=0.9999), Linear()
    model = GradientAccumulation(of_whole, None, nn.SGD([of_whole.w], 1e-9), noise_scale=expected, check="off")
    model.train_process(1, whole, 4, report=(), ckpt_path=None)
    assert noise.samples == expected.samples == 15
    assert noise.rows == pytest.approx(expected.rows, rel=1e-4)


@pytest.mark.host
def test_estimate_as_callback_of_model():
    noise, network = NoiseScale(every=1, decay=0.9999), Linear()
    step = AccumulatedTrainStep(network, nn.SGD([network.w], 1e-9), 4, check="off")
    Model(step).train(1, dataset(data([4] * 4 * 30)), callbacks=[FlushTail(), noise], dataset_sink_mode=False)
    assert noise.samples == 30
    assert noise.rows == pytest.approx(by_numpy([4] * 4 * 30, 4), rel=1e-4)
    with pytest.raises(TypeError, match="'network' must be an AccumulatedTrainStep of Model"):
        Model(network, optimizer=nn.SGD([network.w], 1e-9)).train(1, dataset(data([4])), callbacks=noise)


# A resumed run gives the same advice as an uninterrupted one


UNEVEN = [2, 7, 3, 4, 4, 5, 1, 6, 3, 4, 2]  # windows of 3 and a tail; every second one is sampled


class ByDriver:
    def __init__(self, noise=True, **options):
        network = Linear()
        self.noise = NoiseScale(every=2, decay=0.5) if noise else None
        options = {"check": "off", "noise_scale": self.noise, **options}
        self.model = GradientAccumulation(network, None, nn.SGD([network.w], 1e-9), **options)

    def train(self, folder, **options):
        states = Checkpointer(folder, resume="auto", **options)
        self.model.train_process(2, data(UNEVEN), 3, report=(), ckpt_path=None, checkpointer=states)
        return self.noise


class ByModel:
    first = True

    def __init__(self, noise=True):
        network = Linear()
        self.noise = NoiseScale(every=2, decay=0.5) if noise else None
        self.step = AccumulatedTrainStep(network, nn.SGD([network.w], 1e-9), 3, check="off")

    def train(self, folder, **options):
        rows = dataset(data(UNEVEN))
        states = SaveStates(Checkpointer(folder, resume="auto", **options), self.step, rows)
        seen = [each for each in (self.noise,) if each is not None]
        callbacks = [FlushTail(), *(seen if self.first else ()), states, *(() if self.first else seen)]
        done = {"initial_epoch": states.initial_epoch, "dataset_sink_mode": False}
        Model(self.step).train(2, rows, callbacks=callbacks, **done)
        return self.noise


class ByHand:
    def __init__(self, noise=True):
        self.network = Linear()
        self.noise = NoiseScale(every=2, decay=0.5) if noise else None
        self.accumulator = Accumulator(nn.SGD([self.network.w], 1e-9), 3, reduction="mean")
        self.grad_fn = ms.value_and_grad(self.network, None, self.accumulator.optimizer.parameters)

    def train(self, folder, **options):
        states = Checkpointer(folder, resume="auto", **options)
        with ResumableLoop(states, self.network, self.accumulator, noise_scale=self.noise) as loop:
            for epoch in range(loop.epoch, 3):
                for number, (x, y) in enumerate(data(UNEVEN), 1):
                    if number > loop.batches:
                        self.accumulator(self.grad_fn(x, y)[1], x.shape[0])
                        if self.noise is not None:
                            self.noise.observe(self.accumulator, x.shape[0])
                        loop.after_micro_batch(epoch, number)
                self.accumulator.flush()
                loop.after_micro_batch(epoch + 1, 0)
        return self.noise


def stopped_and_resumed(make, folder, *stops):
    for stop in stops:
        with pytest.raises(Stopped):
            make().train(folder, stop=stop_after(stop))
    return make().train(folder)


@pytest.mark.host
@pytest.mark.filterwarnings("ignore:For 'SaveStates', the resumed run stopped before the end of epoch")
@pytest.mark.parametrize("make", [ByDriver, ByModel, ByHand])
@pytest.mark.parametrize("stops", [(7, 16), pytest.param(range(1, 2 * len(UNEVEN)), marks=pytest.mark.slow)], ids=str)
def test_resumed_estimate_is_the_same(make, stops, tmp_path):
    expected = make().train(tmp_path / "never stopped")
    assert expected.samples >= 3 and expected.state["variance"]
    for stop in stops:
        found = stopped_and_resumed(make, tmp_path / str(stop), stop)
        assert (found.state, found.advice) == (expected.state, expected.advice)
    assert stopped_and_resumed(make, tmp_path / "again", 5, 9).state == expected.state


@pytest.mark.host
@pytest.mark.parametrize("forgotten", ["variance", "square", "samples", "windows", "first"])
def test_missing_part_of_state_is_detected(forgotten, tmp_path, monkeypatch):
    """After micro-batch 7, the first of a window that is sampled."""
    expected, load, anew = ByDriver().train(tmp_path / "never stopped"), NoiseScale.load, NoiseScale(every=2).state
    monkeypatch.setattr(NoiseScale, "load", lambda self, saved: load(self, {**saved, forgotten: anew[forgotten]}))
    assert stopped_and_resumed(ByDriver, tmp_path / "stopped", 7).state != expected.state


@pytest.mark.host
def test_other_settings_are_rejected_or_restart_estimate(tmp_path):
    with pytest.raises(Stopped):
        ByDriver().train(tmp_path, stop=stop_after(8))
    for other in (NoiseScale(every=3, decay=0.5), None):
        with pytest.raises(CheckpointError, match="noise_scale was .* and is"):
            ByDriver(noise_scale=other).train(tmp_path)
    anew = NoiseScale(every=3, decay=0.5)
    ByDriver(noise_scale=anew).train(tmp_path, allow_config_change=True)
    assert anew.samples == 1  # the fourth of the 6 windows that were left, of which the first was open
    with pytest.raises(CheckpointError, match="noise_scale was .* and is None"):
        ByHand(noise=False).train(tmp_path)


@pytest.mark.host
@pytest.mark.filterwarnings("ignore:For 'SaveStates', the resumed run stopped before the end of epoch")
def test_resume_without_saved_estimate_warns(tmp_path):
    with pytest.raises(Stopped):
        ByModel(noise=False).train(tmp_path, stop=stop_after(8))
    with pytest.warns(RuntimeWarning, match="The noise scale restarts in a resumed run: the training state has none"):
        ByModel().train(tmp_path)
    late = ByModel()
    late.first = False
    with pytest.raises(
        ValueError, match="'callbacks' must be NoiseScale first, but got it last. A state would be saved"
    ):
        late.train(tmp_path / "another")


@pytest.mark.host
@pytest.mark.parametrize("way", ["driver", "accumulator"])
def test_first_micro_batch_of_weight_0_is_not_sampled(way):
    """The estimate divided by its weight, 0."""
    noise, network, rows = NoiseScale(every=1), Linear(), data([4] * 8)
    weights = iter([0.0, 1.0, 1.0, 1.0] * 2)
    if way == "driver":
        options = {"weight": lambda x, y: next(weights), "check": "off", "noise_scale": noise}
        model = GradientAccumulation(network, None, nn.SGD([network.w], 1e-9), **options)
        model.train_process(1, rows, 4, report=(), ckpt_path=None)
    else:
        accumulator = Accumulator(nn.SGD([network.w], 1e-9), 4, reduction="mean")
        grad_fn = ms.value_and_grad(network, None, accumulator.optimizer.parameters)
        for columns in rows:
            accumulator(grad_fn(*columns)[1], next(weights))
            noise.observe(accumulator, 4)
    assert noise.samples == 0 and noise.advice.startswith("no estimate")


@pytest.mark.host
def test_advice():
    assert NoiseScale().advice.startswith("no estimate: no window with several")
    noise = estimate([4] * 4 * 30, 4)
    assert noise.advice.startswith(f"about {noise.rows:,.0f} rows (windows had 16 rows)")
    noise._variance = -1.0
    assert math.isnan(noise.rows) and noise.advice.startswith("no estimate from 30 windows: more samples")


@pytest.mark.host
@pytest.mark.parametrize("arguments", [(0,), (1.5,), (1, 1.0), (1, -0.1), (1, "0.9")])
def test_invalid_arguments_are_rejected(arguments):
    with pytest.raises((TypeError, ValueError), match="For 'NoiseScale', '(every|decay)' must be"):
        NoiseScale(*arguments)
    with pytest.raises(TypeError, match="'noise_scale' must be a NoiseScale, but got int"):
        estimate([4], 1, noise=3)
