"""Is the learning rate in the records the one that is used?"""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops
from mindspore.experimental import optim
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from helpers import Recorder, Slope, micro_batch, seen_gradient, slope_driver
from ms_accum import GradientAccumulation, ZeroOptimizer
from ms_accum.network.optimizers import LearningRate
from ways import Trained


def parameters():
    return [Parameter(Tensor(np.ones(2), ms.float32), name=f"w{number}") for number in range(2)]


def grouped(*rates):
    return [{"params": [parameter], "lr": rate} for parameter, rate in zip(parameters(), rates)]


OPTIMIZERS = {
    "number": lambda: nn.SGD(parameters(), 0.5),
    "list": lambda: nn.Momentum(parameters(), [0.5, 0.25], 0.9),
    "schedule": lambda: nn.Adam(parameters(), nn.ExponentialDecayLR(0.5, 0.5, 1)),
    "groups": lambda: nn.SGD(grouped(0.5, 0.1), 0.2),
    "groups of lists": lambda: nn.SGD(grouped([0.5, 0.25], [0.1, 0.1]), 0.2),
    "experimental": lambda: optim.SGD(parameters(), lr=0.5),
    "experimental groups": lambda: optim.Adam(grouped(0.5, 0.1), lr=0.2),
    "mint": lambda: mint.optim.SGD(parameters(), lr=0.5),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_learning_rate(kind):
    optimizer = OPTIMIZERS[kind]()
    rate = LearningRate(optimizer)
    assert rate() == 0.5
    assert rate() == 0.5  # reading is no update
    optimizer((Tensor(np.ones(2), ms.float32),) * 2)
    assert rate() == (0.25 if kind in ("list", "schedule", "groups of lists") else 0.5)


def test_learning_rate_follows_a_scheduler():
    optimizer = optim.SGD(parameters(), lr=0.5)
    scheduler = optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    scheduler.step()
    assert LearningRate(optimizer)() == 0.25


class Changes(Recorder):
    """A reporter that sets another learning rate after each update, as users of newer optimizers may try to."""

    def __init__(self, optimizer, how):
        super().__init__()
        self.optimizer, self.how = optimizer, how

    def update(self, record):
        super().update(record)
        self.how(self.optimizer, 0.25)


def replaced(optimizer, rate):
    optimizer.param_groups[0]["lr"] = rate


def replaced_by_a_parameter(optimizer, rate):
    optimizer.param_groups[0]["lr"] = Parameter(Tensor(rate, ms.float32), name="rate")


def assigned(optimizer, rate):
    optimizer.param_groups[0]["lr"].set_data(Tensor(rate, ms.float32))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("how", [replaced, replaced_by_a_parameter, assigned])
@pytest.mark.parametrize("window", [1, 2])
def test_recorded_rate_is_the_one_used(how, window):
    """The gradient is 1, so that each update moves by the rate."""
    network = Slope()
    optimizer = optim.SGD([network.w], lr=0.5)
    reporter = Changes(optimizer, how)
    moved = []
    reporter.watch = lambda: moved.append(-float(network.w.asnumpy()[0]))
    model = GradientAccumulation(network, None, optimizer)
    model.train_process(1, [micro_batch(1.0)] * 4 * window, window, report=(reporter,), ckpt_path=None)
    used = np.diff([0.0, *moved])
    assert [record.lr for record in reporter.records] == pytest.approx(used.tolist())


@pytest.mark.usefixtures("eager")
def test_recorded_rate_of_a_tail_is_the_one_used():
    """It ends without another micro-batch, in a call of its own."""
    model, recorder = slope_driver([0.5, 0.25]), Recorder()
    model.train_process(1, [micro_batch(1.0)] * 3, 2, report=(recorder,), ckpt_path=None)
    assert [record.lr for record in recorder.records] == [0.5, 0.25] and seen_gradient(model) == [0.75]


def test_rate_is_nan_if_optimizer_computes_its_own():
    network = Slope(4)
    assert math.isnan(LearningRate(nn.AdaFactor([network.w]))())
    assert LearningRate(nn.AdaFactor([network.w], 0.5, relative_step=False))() == 0.5


class Advances(nn.Optimizer):
    """Plain SGD whose `get_lr` advances its step, as MindSpore's own did up to 2.1, and MindCV's do."""

    def get_lr(self):
        rate = self.learning_rate(self.global_step).reshape(())
        ops.assign_add(self.global_step, self.global_step_increase_tensor)
        return rate

    def construct(self, gradients):
        rate = self.get_lr()
        for parameter, gradient in zip(self.parameters, gradients):
            ops.assign_sub(parameter, rate * gradient)
        return rate


RATES = [0.5, 0.25, 0.125]


def trained_to_the_end(way, window):
    """Train with as many rates as there are updates; the gradient is 1, so the weight is minus the sum of the rates."""
    trained = Trained(way, Slope(), window, make=lambda weights: Advances(RATES, weights))
    trained.train([micro_batch(1.0)] * window * len(RATES))
    return trained


@pytest.mark.parametrize(("way", "window"), [("driver", 1), ("driver", 2), ("accumulator", 2)])
def test_schedule_advanced_by_get_lr_steps_once_per_update(way, window):
    trained = trained_to_the_end(way, window)
    assert trained.weights.tolist() == [-sum(RATES)]
    assert trained.optimizer.global_step.asnumpy().tolist() == [len(RATES)]
    if way == "driver":
        assert [record.lr for record in trained.recorder.records] == RATES


class Counts(LearningRateSchedule):
    """A schedule of the user's that counts its calls."""

    def __init__(self):
        super().__init__()
        self.calls = Parameter(Tensor(0, ms.int32), name="calls")

    def construct(self, global_step):
        rate = 1.0 / (2.0 + ops.cast(self.calls, ms.float32) + ops.cast(global_step, ms.float32))
        return ops.depend(rate, ops.assign_add(self.calls, 1))


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("zero", [False, True])
def test_schedule_that_may_change_itself_is_not_run(zero):
    schedule = Counts()
    if zero:
        optimizer = ZeroOptimizer(lambda parts: nn.Momentum(parts, schedule, 0.9), parameters(), group=None)
    else:
        optimizer = nn.SGD([{"params": parameters(), "lr": schedule}], 0.1)
    assert math.isnan(LearningRate(optimizer)()) and int(schedule.calls) == 0


@pytest.mark.usefixtures("eager")
def test_lars_returns_rate_of_its_optimizer():
    assert LearningRate(nn.LARS(nn.Momentum(parameters(), 0.5, 0.9)))() == 0.5
