"""Is the loss of a window the weighted mean of its micro-batches' losses?"""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor

from ms_accum.training.window_loss import WindowLoss


def loss_of(*terms, summing=False):
    loss = WindowLoss(summing)
    for value, weight in terms:
        loss.add(Tensor(value, ms.float32), weight, int(weight))
    return loss


def test_mean_is_weighted():
    loss = loss_of((1.0, 8), (2.0, 8), (7.0, 4))
    assert loss.mean == pytest.approx((8 + 16 + 28) / 20, abs=1e-12)
    assert loss.samples == 20


def test_batch_in_which_nothing_counts_is_left_out():
    assert loss_of((1.0, 8), (math.nan, 0), (2.0, 8)).mean == 1.5


def test_summed_losses_are_not_weighted():
    assert loss_of((8.0, 8), (16.0, 8), (28.0, 4), summing=True).mean == pytest.approx(52 / 20, abs=1e-12)


def test_sums_are_in_float64():
    terms = [(1e-3, 1)] * 1000 + [(1e8, 1)]
    assert loss_of(*terms).mean == pytest.approx((1000 * float(np.float32(1e-3)) + 1e8) / 1001, rel=1e-12)


def test_mean_of_an_empty_window_is_nan():
    loss = loss_of((1.0, 8))
    loss.clear()
    assert math.isnan(loss.mean)
    assert loss.samples == 0
