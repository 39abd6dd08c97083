"""Is what is measured right?"""

from __future__ import annotations

import math

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn

from ms_accum import evaluate
from ms_accum.loss.reductions import check_loss, loss_reduction
from ms_accum.training.window import WindowLoss


def loss_of(*terms, summing=False):
    loss = WindowLoss(summing)
    for value, weight in terms:
        loss.add(Tensor(value, ms.float32), weight, int(weight))
    return loss


def test_the_mean_is_weighted():
    loss = loss_of((1.0, 8), (2.0, 8), (7.0, 4))
    assert loss.mean == pytest.approx((8 + 16 + 28) / 20, abs=1e-12)
    assert loss.samples == 20


def test_losses_that_sum_count_once_each():
    assert loss_of((8.0, 8), (16.0, 8), (28.0, 4), summing=True).mean == pytest.approx(52 / 20, abs=1e-12)


def test_sums_are_carried_in_float64():
    terms = [(1e-3, 1)] * 1000 + [(1e8, 1)]
    assert loss_of(*terms).mean == pytest.approx((1000 * float(np.float32(1e-3)) + 1e8) / 1001, rel=1e-12)


def test_an_empty_window_has_no_loss():
    loss = loss_of((1.0, 8))
    loss.clear()
    assert math.isnan(loss.mean)
    assert loss.samples == 0


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (nn.CrossEntropyLoss(), "mean"),
        (nn.CrossEntropyLoss(reduction="sum"), "sum"),
        (nn.CrossEntropyLoss(reduction="none"), "none"),
        (nn.MSELoss(), "mean"),
        (nn.L1Loss(reduction="sum"), "sum"),
        (nn.SoftmaxCrossEntropyWithLogits(sparse=True), "none"),
        (nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean"), "mean"),
        (nn.NLLLoss(reduction="sum"), "sum"),
        (nn.BCEWithLogitsLoss(), "mean"),
        (mint.nn.BCEWithLogitsLoss(), "mean"),
        (mint.nn.BCEWithLogitsLoss(reduction="sum"), "sum"),
        (mint.nn.BCEWithLogitsLoss(reduction="none"), "none"),
        (mint.nn.BCELoss(reduction="sum"), "sum"),
        (nn.FocalLoss(reduction="sum"), "sum"),
        (nn.SmoothL1Loss(reduction="sum"), "sum"),
        (abs, None),
        (None, None),
    ],
)
def test_the_reduction_of_a_loss(loss, reduction):
    assert loss_reduction(loss) == reduction


def test_losses_that_go_with_the_reduction():
    assert check_loss("X", nn.CrossEntropyLoss(), "mean") == "mean"
    assert check_loss("X", nn.CrossEntropyLoss(), "sum") == "mean"  # the tutorial's sum of means
    assert check_loss("X", nn.CrossEntropyLoss(reduction="sum"), "sum") == "sum"
    with pytest.raises(ValueError, match="For 'X', 'reduction' must be 'sum' for a loss that sums, but got 'mean'"):
        check_loss("X", nn.CrossEntropyLoss(reduction="sum"), "mean")


class OneHot(nn.Cell):
    """Guess the class that the image is."""

    def __init__(self):
        super().__init__()
        self.modes = []

    def construct(self, x):
        return ms.ops.one_hot(x, 4, Tensor(1.0, ms.float32), Tensor(0.0, ms.float32))

    def set_train(self, mode=True):
        self.modes.append(mode)
        return super().set_train(mode)


def test_evaluate_counts_every_sample():
    data = [
        (Tensor([0, 1, 2], ms.int32), Tensor([0, 1, 3], ms.int32)),
        (np.array([3], np.int32), np.array([3], np.int32)),
    ]
    assert evaluate(OneHot(), data) == (3, 4)


@pytest.mark.parametrize("training", [True, False])
def test_evaluate_leaves_the_training_mode_as_it_was(training):
    network = OneHot().set_train(training)
    evaluate(network, [(Tensor([0], ms.int32), Tensor([0], ms.int32))])
    assert network.modes == [training, False] and network.training is training


def test_evaluate_without_dropout():
    network = nn.SequentialCell(nn.Dropout(p=0.9))
    scores = Tensor(np.tile(np.arange(50), (200, 1)), ms.float32)
    network.set_train()
    assert evaluate(network, [(scores, Tensor(np.full(200, 49), ms.int32))]) == (200, 200)


@pytest.mark.parametrize("shape", [(4, 1), (4, 2)])
def test_labels_of_another_shape_are_refused_not_broadcast(shape):
    network = nn.Dense(3, 2)
    batch = (np.ones((4, 3), np.float32), np.zeros(shape, np.int32))
    with pytest.raises(ValueError, match=r"labels must have the shape \(4,\), but got"):
        evaluate(network, [batch])


@pytest.mark.parametrize("loss", [nn.KLDivLoss, nn.MultiMarginLoss, nn.SoftMarginLoss, nn.MSELoss, nn.CrossEntropyLoss])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_that_tell_it_in_different_places(loss, reduction):
    assert loss_reduction(loss(reduction=reduction)) == reduction
