"""Does `verify` say why the gradients of micro-batches differ from the large batch's?"""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from helpers import cross_entropy, mutate
from ms_accum import freeze_batch_norm, replace_dropout, verify
from ms_accum.loss.weights import Weight

pytestmark = pytest.mark.host
CLASSES = 3


def batch(rows=24):
    x = np.random.RandomState(1).randn(rows, 6).astype(np.float32)
    return Tensor(x), Tensor(np.sort(np.arange(rows) % CLASSES), ms.int32)  # micro-batches have other classes


def dense(*layers):
    ms.set_seed(1)
    return nn.SequentialCell(nn.Dense(6, 16), *layers, nn.ReLU(), nn.Dense(16, CLASSES))


def summed(output, labels):
    return ops.cross_entropy(output, labels, reduction="sum")


def of_class_2_twice(output, labels):
    """A mean by weights that the driver can't know."""
    counts = 1.0 + ops.cast(labels == 2, ms.float32) * 20
    return ops.sum(ops.cross_entropy(output, labels, reduction="none") * counts) / ops.sum(counts)


def coupled(output, labels):
    return -ops.mean(ops.diag(ops.log_softmax(ops.matmul(output, output.T), 1)))


class Noisy(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(6, CLASSES)

    def construct(self, x):
        return self.dense(x + Tensor(np.random.randn(*x.shape), ms.float32))


class Pooling(nn.Cell):
    """A network that mixes rows, without a layer of a known kind."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(6, CLASSES)

    def construct(self, x):
        return self.dense(x - ops.mean(x, 0))


@pytest.mark.modes
@pytest.mark.parametrize("steps", [2, 3, 4, 12])
def test_gradients_agree(steps):
    found = verify(dense(), cross_entropy(), batch(), steps)
    assert found.ok and found.diagnosis == "The gradients agree." and len(found.table) == 4
    assert max(difference for _, _, difference in found.table) < 1e-4 and min(norm for _, norm, _ in found.table) > 0


@pytest.mark.graph
def test_gradients_agree_in_graph_mode():
    test_gradients_agree(3)


FAULTS = {
    "sum": (dense, lambda: summed, {}, "The loss sums over rows .*: use reduction='sum'"),
    "mean": (dense, cross_entropy, {"reduction": "sum"}, "The loss averages over rows .*: use reduction='mean'"),
    "weights": (
        dense,
        lambda: of_class_2_twice,
        {},
        "The weights are not what the loss averages over: .* Give 'weight'",
    ),
    "a wrong weight": (dense, cross_entropy, {"weight": 1.0}, "The weights are not what the loss averages over"),
    "coupled": (dense, lambda: coupled, {}, "The loss couples the rows of a batch: .* Use CoupledLoss"),
    "mixed rows": (Pooling, cross_entropy, {}, "The loss couples the rows"),
    "BatchNorm": (lambda: dense(nn.BatchNorm1d(16)), cross_entropy, {}, "^BatchNorm normalizes .* batch_to_group_norm"),
    "Dropout": (lambda: dense(nn.Dropout(p=0.5)), cross_entropy, {}, "^Random layers draw other masks"),
    "CountedDropout": (lambda: replace_dropout(dense(nn.Dropout(p=0.5))), cross_entropy, {}, "^Random layers draw"),
    "both": (lambda: dense(nn.BatchNorm1d(16), nn.Dropout(p=0.5)), cross_entropy, {}, "^BatchNorm .* Random layers"),
    "random": (Noisy, cross_entropy, {}, "The gradient of one batch differs from run to run"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_users_network_is_named(fault):
    make, loss, options, diagnosis = FAULTS[fault]
    found = verify(make(), loss(), batch(), 4, **options)
    assert not found.ok and re.search(diagnosis, found.diagnosis), found


IN_GRAPH_MODE = ("sum", "coupled", "BatchNorm", "Dropout")  # a case of each kind of diagnosis


@pytest.mark.graph
@pytest.mark.parametrize(
    "fault",
    [*IN_GRAPH_MODE, *(pytest.param(each, marks=pytest.mark.slow) for each in FAULTS if each not in IN_GRAPH_MODE)],
)
def test_a_fault_is_named_in_graph_mode(fault):
    test_a_fault_in_the_users_network_is_named(fault)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_sum_is_right_where_it_is_said(reduction):
    loss = cross_entropy() if reduction == "mean" else summed
    assert verify(dense(), loss, batch(), 4, reduction=reduction).ok


def test_a_fault_of_ours_is_named(monkeypatch):
    mutate(monkeypatch, "no division")
    found = verify(dense(), cross_entropy(), batch(), 4)
    assert not found.ok and "times the large batch's: the window is divided wrongly" in found.diagnosis


def test_weights_that_are_forgotten_are_named(monkeypatch):
    monkeypatch.setattr(Weight, "counted", lambda self, micro_batch: 1.0)
    found = verify(dense(), cross_entropy(), batch(), 4)
    assert not found.ok and re.search("the window is divided wrongly|The weights are not", found.diagnosis)


def test_nan_is_named():
    x, y = batch()
    found = verify(dense(), cross_entropy(), (x * float("nan"), y), 4)
    assert not found.ok and found.diagnosis.startswith("A gradient is not finite")


def test_a_frozen_batch_norm_agrees():
    assert verify(freeze_batch_norm(dense(nn.BatchNorm1d(16))), cross_entropy(), batch(), 4).ok


@pytest.mark.modes
@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_left_as_it_was(training):
    network = dense(nn.BatchNorm1d(16), nn.Dropout(p=0.5)).set_train(training)
    before = [each.asnumpy().copy() for each in network.get_parameters()]
    verify(network, cross_entropy(), batch(), 3)
    assert all((each.asnumpy() == b).all() for each, b in zip(network.get_parameters(), before))
    assert {cell.training for _, cell in network.cells_and_names()} == {training}


def test_the_table_is_small():
    network = nn.SequentialCell(*[nn.Dense(6, 6) for _ in range(9)])
    text = str(verify(network, cross_entropy(), (batch()[0], batch()[1]), 3))
    lines = text.splitlines()
    assert len(lines) == 11 and lines[0].split() == ["parameter", "norm", "difference"]
    assert lines[-2:] == ["... and 10 parameters with smaller differences", "The gradients agree."]


class OwnLoss(nn.Cell):
    def __init__(self):
        super().__init__()
        self.w = Parameter(Tensor(np.ones(6), ms.float32), name="w")

    def construct(self, x):
        return ops.mean(ops.square(ops.sum(x * self.w, 1)))


def test_a_network_that_returns_its_loss():
    assert verify(OwnLoss(), None, batch()[0], 4).ok
    assert verify(OwnLoss(), None, [batch()[0].asnumpy()], 4).ok


@pytest.mark.parametrize(
    ("steps", "rows", "message"),
    [(1, 24, "must be from 2 to 12"), (13, 24, "from 2 to 12"), (0, 24, "an int >= 1"), (2, 2, "from 2 to 2")],
)
def test_refused(steps, rows, message):
    with pytest.raises(ValueError, match=f"For 'verify', 'gradient_accumulation_steps' must be .*{message[8:]}"):
        verify(dense(), cross_entropy(), batch(rows), steps)
