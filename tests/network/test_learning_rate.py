"""Is the learning rate that is shown the one that is used?"""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn
from mindspore.experimental import optim

from helpers import Recorder, Slope, micro_batch
from ms_accum import GradientAccumulation
from ms_accum.network.learning_rate import LearningRate


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
    assert rate() == 0.5  # to look is no update
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


@pytest.mark.modes
@pytest.mark.parametrize("how", [replaced, replaced_by_a_parameter, assigned])
@pytest.mark.parametrize("window", [1, 2])
def test_what_is_recorded_was_used(how, window):
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


def test_an_optimizer_that_sets_its_own_has_none_to_show():
    network = Slope(4)
    assert math.isnan(LearningRate(nn.AdaFactor([network.w]))())
    assert LearningRate(nn.AdaFactor([network.w], 0.5, relative_step=False))() == 0.5


def test_the_first_group_is_the_users():
    first, second = parameters()
    groups = [{"params": [first], "lr": 0.5}, {"params": [second], "lr": 0.1}, {"order_params": [second, first]}]
    assert LearningRate(nn.SGD(groups, 0.2))() == 0.5
