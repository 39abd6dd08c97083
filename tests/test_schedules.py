"""Learning rates for a larger effective batch."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import nn

from helpers import Slope, micro_batch, run, values
from ms_accum import GradientAccumulation, scale_learning_rate


@pytest.mark.parametrize(("rule", "factor"), [("linear", 4.0), ("sqrt", 2.0)])
def test_numbers_lists_and_tuples_are_scaled(rule, factor):
    assert scale_learning_rate(0.1, 32, 128, rule) == pytest.approx(0.1 * factor)
    assert scale_learning_rate(1, 32, 128, rule) == factor
    assert scale_learning_rate([0.5, 0.25], 32, 128, rule) == [0.5 * factor, 0.25 * factor]
    assert scale_learning_rate((0.5, 0.25), 32, 128, rule) == (0.5 * factor, 0.25 * factor)


@pytest.mark.usefixtures("eager")
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
        ((float("nan"), 32, 64), ValueError, "'lr' must be a finite number > 0, but got nan"),
        ((0.1, 0, 64), ValueError, "'base_batch' must be an int >= 1, but got 0"),
        ((0.1, 32, 64, "cubic"), ValueError, "'rule' must be one of 'linear', 'sqrt', but got 'cubic'"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, error, match):
    with pytest.raises(error, match=f"For 'scale_learning_rate', {match}"):
        scale_learning_rate(*arguments)
