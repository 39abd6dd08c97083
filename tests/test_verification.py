"""`verify` diagnoses why gradients of micro-batches differ from the large batch's."""

from __future__ import annotations

import re
from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import several_terms
from helpers import cross_entropy, mutate
from ms_accum import freeze_batch_norm, replace_dropout, verify
from ms_accum.loss.objective import Weight
from ms_accum.verification import _sizes, _Trial

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


def cross_entropy_weighting_class_2(output, labels):
    """A mean by weights that the driver can't know."""
    counts = 1.0 + ops.cast(labels == 2, ms.float32) * 20
    return ops.sum(ops.cross_entropy(output, labels, reduction="none") * counts) / ops.sum(counts)


def coupled(output, labels):
    return -ops.mean(ops.diag(ops.log_softmax(ops.matmul(output, output.T), 1)))


def batch_statistics_norm():
    return nn.BatchNorm1d(16, use_batch_statistics=True)


def binary_cross_entropy(output, labels):
    return ops.binary_cross_entropy_with_logits(output, ops.cast(ops.one_hot(labels, CLASSES), ms.float32))


def coupled_pair(output, labels):
    return ops.square(ops.mean(output * ops.cast(labels + 1, ms.float32))) + ops.mean(output)


def squares_weighting_class_2(output, labels):
    weights = 1.0 + 20.0 * ops.cast(labels == 2, ms.float32)
    return ops.sum(ops.square(output - 1.0) * weights) / ops.sum(weights)


class Two(nn.Cell):
    """A network of very few parameters."""

    def __init__(self, number=2):
        super().__init__()
        self.number, self.w = number, Parameter(Tensor(np.ones(number), ms.float32), name="w")

    def construct(self, x):
        return ops.sum(x[:, : self.number] * self.w, 1)


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


@pytest.mark.host
@pytest.mark.parametrize("steps", [2, 3, 4, 12])
def test_gradients_agree(steps):
    result = verify(dense(), cross_entropy(), batch(), steps)
    assert result.ok and result.diagnosis == "The gradients agree." and len(result.table) == 4
    assert max(difference for _, _, difference in result.table) < 1e-4 and min(norm for _, norm, _ in result.table) > 0


@pytest.mark.graph
def test_gradients_agree_in_graph_mode():
    test_gradients_agree(3)


FAULTS = {
    "sum": (dense, lambda: summed, {}, "The loss sums over rows .*: use reduction='sum'"),
    "mean": (dense, cross_entropy, {"reduction": "sum"}, "The loss averages over rows .*: use reduction='mean'"),
    "weights": (
        dense,
        lambda: cross_entropy_weighting_class_2,
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
    "BatchNorm of the batch": (
        lambda: dense(batch_statistics_norm()),
        cross_entropy,
        {},
        "^BatchNorm normalizes .* batch_to",
    ),
    "a sum": (dense, lambda: cross_entropy("sum"), {}, "The loss sums over rows .*: use reduction='sum'"),
    "a sum by a function": (dense, lambda: partial(ops.cross_entropy, reduction="sum"), {}, "The loss sums over rows"),
    "a sum and Dropout": (
        lambda: dense(nn.Dropout(p=0.5)),
        lambda: summed,
        {},
        "The loss sums over rows .*: use reduc",
    ),
    "coupled, few parameters": (Two, lambda: coupled_pair, {}, "The loss couples the rows"),
    "coupled, few parameters, summed": (Two, lambda: coupled_pair, {"reduction": "sum"}, "The loss couples the rows"),
    "coupled, one parameter": (
        lambda: Two(1),
        lambda: coupled_pair,
        {},
        "The network has too few parameters to say more",
    ),
    "weights, few parameters": (
        Two,
        lambda: squares_weighting_class_2,
        {},
        "The weights are not what the loss averages over",
    ),
    "BCE outside graphs": (
        dense,
        lambda: binary_cross_entropy,
        {},
        "its backward is wrong here, as that of BCEWithLogitsLoss",
    ),
    "random": (Noisy, cross_entropy, {}, "The gradient of one batch differs from run to run"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_in_user_network_is_diagnosed(fault):
    make, loss, options, diagnosis = FAULTS[fault]
    result = verify(make(), loss(), batch(), 4, **options)
    assert not result.ok and re.search(diagnosis, result.diagnosis), result


IN_GRAPH_MODE = ("BatchNorm",)  # the others are slow
NO_GRAPH = "BCE outside graphs"  # what MindSpore does wrongly outside graphs only


@pytest.mark.graph
@pytest.mark.parametrize(
    "fault",
    [
        *IN_GRAPH_MODE,
        *(pytest.param(name, marks=pytest.mark.slow) for name in FAULTS if name not in (*IN_GRAPH_MODE, NO_GRAPH)),
    ],
)
def test_fault_in_user_network_is_diagnosed_in_graph_mode(fault):
    test_fault_in_user_network_is_diagnosed(fault)


@pytest.mark.slow
@pytest.mark.graph
def test_pynative_only_fault_is_absent_in_graph_mode():
    make, loss, options, _ = FAULTS[NO_GRAPH]
    assert verify(make(), loss(), batch(), 4, **options).ok


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_matching_reduction_agrees(reduction):
    loss = cross_entropy() if reduction == "mean" else summed
    assert verify(dense(), loss, batch(), 4, reduction=reduction).ok


def test_missing_division_is_diagnosed(monkeypatch):
    mutate(monkeypatch, "no division")
    result = verify(dense(), cross_entropy(), batch(), 4)
    assert not result.ok and "times the large batch's: the window is divided wrongly" in result.diagnosis


def test_ignored_weights_are_diagnosed(monkeypatch):
    monkeypatch.setattr(Weight, "of", lambda self, micro_batch: 1.0)
    result = verify(dense(), cross_entropy(), batch(), 4)
    assert not result.ok and re.search("the window is divided wrongly|The weights are not", result.diagnosis)


def test_nan_is_diagnosed():
    x, y = batch()
    result = verify(dense(), cross_entropy(), (x * float("nan"), y), 4)
    assert not result.ok and result.diagnosis.startswith("A gradient is not finite")


def test_frozen_batch_norm_agrees():
    assert verify(freeze_batch_norm(dense(nn.BatchNorm1d(16))), cross_entropy(), batch(), 4).ok


@pytest.mark.host
@pytest.mark.parametrize("training", [True, False])
def test_network_is_restored(training):
    network = dense(nn.BatchNorm1d(16), nn.Dropout(p=0.5)).set_train(training)
    before = [parameter.asnumpy().copy() for parameter in network.get_parameters()]
    verify(network, cross_entropy(), batch(), 3)
    assert all((parameter.asnumpy() == b).all() for parameter, b in zip(network.get_parameters(), before))
    assert {cell.training for _, cell in network.cells_and_names()} == {training}


def test_table_is_truncated():
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


def test_network_returning_its_loss():
    assert verify(OwnLoss(), None, batch()[0], 4).ok
    assert verify(OwnLoss(), None, [batch()[0].asnumpy()], 4).ok


@pytest.mark.parametrize(
    ("steps", "rows", "message"),
    [
        (1, 24, "must be from 2 to 12"),
        (13, 24, "from 2 to 12"),
        (0, 24, "an int >= 1"),
        (2, 2, "from 2 to 1"),
        (14, 26, "from 2 to 13"),
    ],
)
def test_invalid_number_of_micro_batches_is_rejected(steps, rows, message):
    with pytest.raises(ValueError, match=f"For 'verify', 'gradient_accumulation_steps' must be .*{message[8:]}"):
        verify(dense(), cross_entropy(), batch(rows), steps)


def test_number_of_micro_batches_and_shortest_is_last():
    for rows, steps in [(rows, steps) for steps in range(2, 61) for rows in range(2 * steps - 1, 120)]:  # noqa: B020
        sizes = _sizes(rows, steps)
        assert len(sizes) == steps and sum(sizes) == rows and 1 <= sizes[-1] < min(sizes[:-1])
        assert len(set(sizes)) <= 3  # each is compiled


def test_micro_batch_sizes():
    assert [_sizes(24, 4), _sizes(14, 2), _sizes(10, 4)] == [[7, 7, 7, 3], [8, 6], [3, 3, 3, 1]]
    assert [_sizes(8, 4), _sizes(9, 4)] == [[3, 2, 2, 1], [3, 3, 2, 1]]


@pytest.mark.parametrize("steps", [2, 4])
def test_network_is_run_on_requested_micro_batches(steps):
    rows = []

    def counted(x, y):
        rows.append(x.shape[0])
        return x.shape[0]

    assert verify(dense(), cross_entropy(), batch(8), steps, weight=counted).ok
    assert rows == [8, *_sizes(8, steps)]


def test_columns_with_different_rows_are_rejected():
    with pytest.raises(ValueError, match=r"For 'verify', 'batch' must be columns with the same .*, but got \[8, 24\]"):
        verify(dense(), cross_entropy(), (batch()[0], batch(8)[1]), 2)


def compared(output, labels):
    return ops.cross_entropy(ops.matmul(output, output.T), labels)


IN_ORDER, MIXED = np.arange(12), np.random.RandomState(1).permutation(12)


@pytest.mark.slow
@pytest.mark.graph
@pytest.mark.parametrize("labels", [MIXED, pytest.param(IN_ORDER, marks=pytest.mark.slow)], ids=["mixed", "in order"])
def test_row_index_labels_are_diagnosed(labels):
    result = verify(dense(), compared, (batch(12)[0], Tensor(labels, ms.int32)), 3)
    assert not result.ok and "can't: the loss couples the rows of a batch, which the labels number" in result.diagnosis
    assert "Use CoupledLoss." in result.diagnosis and "\n" not in result.diagnosis and len(result.table) == 4


def test_network_with_fixed_batch_size_is_diagnosed():
    class Fixed(Noisy):
        def construct(self, x):
            if x.shape[0] != 24:
                raise ValueError("24 rows")
            return self.dense(x)

    result = verify(Fixed(), cross_entropy(), batch(), 4)
    assert not result.ok and "accepts one batch size only, or the loss couples" in result.diagnosis


def test_kink_is_not_taken_for_cause(monkeypatch):
    """Without BatchNorm and Dropout a ReLU near 0 may still move the gradient of one parameter by more than 0.001."""
    both = _Trial._both

    def moved(self, off=()):
        expected, gradients = both(self, off)
        return expected, [gradients[0] * 1.004, *gradients[1:]] if off else gradients

    monkeypatch.setattr(_Trial, "_both", moved)
    result = verify(dense(nn.BatchNorm1d(16), nn.Dropout(p=0.5)), cross_entropy(), batch(), 4)
    assert re.search("^BatchNorm .* Random layers", result.diagnosis)


# Losses of several terms


class Added(several_terms.SumOfLoss):
    """Three terms behind one number."""


class WithoutSize(several_terms.Loss):
    """Two terms that add up also if the batch is one micro-batch."""

    def construct(self, logits, labels):
        terms = super().construct(logits, labels)
        return {"ce": terms["ce"], "entropy": terms["entropy"]}


def tokens(x, y):
    return (y >= 0).sum()


def rows_and_labels():
    return tuple(np.concatenate(parts) for parts in zip(*several_terms.data_of((4, 2, 5, 3, 1, 6))))


@pytest.mark.parametrize("weight", [None, tokens], ids=["rows", "tokens"])
def test_several_terms_behind_one_weight_are_named(weight):
    result = verify(several_terms.Net(), Added(), rows_and_labels(), 3, weight=weight)
    assert not result.ok and "seems to be a sum of several terms" in result.diagnosis


def test_terms_with_their_own_divisors_agree():
    weight = {"ce": tokens, "entropy": "rows"}
    assert verify(several_terms.Net(), WithoutSize(), rows_and_labels(), 3, weight=weight).ok


def test_term_with_a_wrong_divisor_is_named():
    result = verify(several_terms.Net(), WithoutSize(), rows_and_labels(), 3, weight={"ce": "rows", "entropy": "rows"})
    assert not result.ok and re.search(r"average over: 'ce' is off by 0\.\d+\. ", result.diagnosis)
