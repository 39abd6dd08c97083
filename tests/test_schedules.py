"""Learning rates for a larger effective batch."""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from helpers import Slope, micro_batch, run, values
from ms_accum import GradientAccumulation, scale_learning_rate


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_numbers_lists_and_tuples_are_scaled(rule, factor):
    assert scale_learning_rate(0.1, 32, 128, rule) == pytest.approx(0.1 * factor)
    assert scale_learning_rate(1, 32, 128, rule) == factor
    assert scale_learning_rate([0.5, 0.25], 32, 128, rule) == [0.5 * factor, 0.25 * factor]
    assert scale_learning_rate((0.5, 0.25), 32, 128, rule) == (0.5 * factor, 0.25 * factor)


def test_smaller_batch_gives_smaller_rate():
    assert scale_learning_rate(0.4, 128, 32) == 0.1
    assert scale_learning_rate(0.4, 128, 128) == 0.4
    assert scale_learning_rate(0.4, 64, 96, rule="sqrt") == pytest.approx(0.4 * math.sqrt(1.5))


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_schedules_are_scaled(rule, factor):
    schedule = nn.CosineDecayLR(0.01, 0.1, 10)
    scaled = scale_learning_rate(schedule, 32, 128, rule)
    for update in (0, 3, 10):
        step = Tensor(update, ms.int32)
        assert float(scaled(step).asnumpy()) == pytest.approx(factor * float(schedule(step).asnumpy()), rel=1e-6)


@pytest.mark.host
@pytest.mark.parametrize(
    ("lr", "rates"),
    [
        (0.125, [0.5] * 3),
        ([0.125, 0.25, 0.5], [0.5, 1.0, 2.0]),
        (nn.ExponentialDecayLR(0.125, 0.5, 1), [0.5, 0.25, 0.125]),
    ],
    ids=["number", "list", "schedule"],
)
def test_optimizer_accepts_scaled_rate(lr, rates):
    network = Slope()
    optimizer = nn.SGD([network.w], scale_learning_rate(lr, 32, 128))
    model = GradientAccumulation(network, None, optimizer)
    recorder = run(model, [micro_batch(1)] * 6, 2, watch=lambda: values([network.w])[0][0])
    assert [record.lr for record in recorder.records] == pytest.approx(rates, rel=1e-6)
    assert recorder.seen == pytest.approx(-np.cumsum(rates), rel=1e-6)


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        (("0.1", 32, 64), TypeError, "'lr' must be a number > 0, but got '0.1'"),
        ((0.0, 32, 64), ValueError, "'lr' must be a finite number > 0, but got 0.0"),
        ((float("nan"), 32, 64), ValueError, "'lr' must be a finite number > 0, but got nan"),
        ((0.1, 0, 64), ValueError, "'base_batch' must be an int >= 1, but got 0"),
        ((0.1, 32, 1.5), TypeError, "'batch' must be an int >= 1, but got 1.5"),
        ((0.1, 32, 64, "cubic"), ValueError, "'rule' must be one of 'linear', 'sqrt', but got 'cubic'"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, error, match):
    with pytest.raises(error, match=f"For 'scale_learning_rate', {match}"):
        scale_learning_rate(*arguments)
