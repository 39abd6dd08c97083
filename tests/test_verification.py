"""`verify` tells whether the gradient of micro-batches is the large batch's, and the cause where it is certain."""

from __future__ import annotations

import re

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import several_terms
from helpers import cross_entropy
from ms_accum import GradientAccumulation, verify
from ms_accum.network.generators import random_state
from ms_accum.verification import _split

pytestmark = pytest.mark.usefixtures("eager")
CLASSES = 3


def batch(rows=24):
    x = np.random.RandomState(1).randn(rows, 6).astype(np.float32)
    return Tensor(x), Tensor(np.sort(np.arange(rows) % CLASSES), ms.int32)  # micro-batches have other classes


def dense(*layers):
    ms.set_seed(1)
    return nn.SequentialCell(nn.Dense(6, 16), *layers, nn.ReLU(), nn.Dense(16, CLASSES))


def summed(output, labels):
    return ops.cross_entropy(output, labels, reduction="sum")


def ignoring(output, labels):
    """A mean over the labels that are not class 0, which the driver can't know."""
    return ops.cross_entropy(output, labels, ignore_index=0)


def masked(output, labels):
    """A mean over the labels that are not below 0."""
    return ops.cross_entropy(output, labels, ignore_index=-1)


def weighting_class_2(output, labels):
    """A mean by weights that nobody can guess."""
    counts = 1.0 + ops.cast(labels == 2, ms.float32) * 20
    return ops.sum(ops.cross_entropy(output, labels, reduction="none") * counts) / ops.sum(counts)


def coupled(output, labels):
    return -ops.mean(ops.diag(ops.log_softmax(ops.matmul(output, output.T), 1)))


def binary_cross_entropy(output, labels):
    return ops.binary_cross_entropy_with_logits(output, ops.cast(ops.one_hot(labels, CLASSES), ms.float32))


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


@pytest.mark.parametrize("steps", [2, 3, 4, 12])
def test_gradients_agree(steps):
    result = verify(dense(), cross_entropy(), batch(), steps)
    assert result.ok and result.diagnosis == "The gradients agree." and len(result.table) == 4
    assert max(difference for _, _, difference in result.table) < 1e-4 and min(norm for _, norm, _ in result.table) > 0


def test_table_is_that_of_plain_gradients():
    network = dense()
    gradients = ms.grad(lambda x, y: cross_entropy()(network(x), y), None, network.trainable_params())(*batch())
    result = verify(network, cross_entropy(), batch(), 3)
    assert [name for name, _, _ in result.table] == [parameter.name for parameter in network.trainable_params()]
    norms = [np.linalg.norm(gradient.asnumpy()) for gradient in gradients]
    np.testing.assert_allclose([norm for _, norm, _ in result.table], norms, rtol=1e-5)


UNCERTAIN = "No cause is certain."
FAULTS = {
    "mean": (dense, cross_entropy, {"reduction": "sum"}, "With reduction='mean' and weight=None the gradients agree."),
    "a wrong weight": (dense, cross_entropy, {"weight": 1.0}, "With weight=None the gradients agree."),
    "labels that do not count": (
        dense,
        lambda: ignoring,
        {},
        "With weight=lambda *columns: (columns[1] != 0).sum() the gradients agree.",
    ),
    "BatchNorm": (lambda: dense(nn.BatchNorm1d(16)), cross_entropy, {}, "BatchNorm normalizes each micro-batch"),
    "Dropout": (lambda: dense(nn.Dropout(p=0.5)), cross_entropy, {}, "Random layers draw other masks"),
    "a wrong weight and Dropout": (
        lambda: dense(nn.Dropout(p=0.5)),
        cross_entropy,
        {"weight": 1.0},
        "With weight=None the gradients agree.",
    ),
    "random": (Noisy, cross_entropy, {}, "The gradient of one batch differs from run to run"),
    "weights": (dense, lambda: weighting_class_2, {}, UNCERTAIN),
    "coupled": (dense, lambda: coupled, {}, UNCERTAIN),
    "mixed rows": (Pooling, cross_entropy, {}, UNCERTAIN),
    "BCE outside graphs": (dense, lambda: binary_cross_entropy, {}, UNCERTAIN),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_fault_is_found_and_its_cause_named_where_it_is_certain(fault):
    make, loss, options, diagnosis = FAULTS[fault]
    result = verify(make(), loss(), batch(), 4, **options)
    assert not result.ok and result.diagnosis.startswith(diagnosis), result


@pytest.mark.slow
@pytest.mark.usefixtures("default_mode")
def test_loss_that_sums_is_named():
    """Outside graphs it is not certain: MindSpore's backward of a mean may sum there."""
    result = verify(dense(), summed, batch(), 4)
    assert not result.ok and result.diagnosis == "With reduction='sum' and weight=None the gradients agree."
    assert verify(dense(), summed, batch(), 4, reduction="sum").ok


def test_weight_that_is_named_is_right():
    x, y = batch()
    labels = Tensor(np.where(np.arange(24) % 7 < 2, -1, y.asnumpy()), ms.int32)
    named = re.match("With weight=(lambda.*) the gradients agree", verify(dense(), masked, (x, labels), 4).diagnosis)
    assert named[1] == "lambda *columns: (columns[1] >= 0).sum()"
    assert verify(dense(), masked, (x, labels), 4, weight=eval(named[1])).ok  # noqa: S307


def test_loss_with_a_known_sum_is_rejected():
    with pytest.raises(ValueError, match="'reduction' must be 'sum' for a loss that sums"):
        verify(dense(), cross_entropy("sum"), batch(), 4)
    result = verify(Pooling(), cross_entropy("sum"), batch(), 4, reduction="sum")
    assert not result.ok and result.diagnosis.startswith(UNCERTAIN)


def test_nan_is_named():
    x, y = batch()
    result = verify(dense(), cross_entropy(), (x * float("nan"), y), 4)
    assert not result.ok and result.diagnosis.startswith("A gradient is not finite")


def test_micro_batches_that_cannot_be_run_are_a_result():
    """Labels that number rows of the batch are out of range in a micro-batch."""

    def coupled_by_labels(output, labels):
        return ops.cross_entropy(ops.matmul(output, output.T), labels)

    result = verify(dense(), coupled_by_labels, (batch()[0], Tensor(np.arange(24) % 8, ms.int32)), 4)
    assert not result.ok and "can't be run" in result.diagnosis and "needs CoupledLoss" in result.diagnosis
    assert all(norm > 0 and np.isnan(difference) for _, norm, difference in result.table)


def test_gradients_of_0_say_nothing():
    def counts_nothing(output, labels):
        return ops.sum(ops.cross_entropy(output, labels, reduction="none") * (labels < 0))

    result = verify(dense(), counts_nothing, batch(), 4)
    assert not result.ok and result.diagnosis.startswith("All gradients are 0, which says nothing")
    ignored = Tensor(np.full(24, -100), ms.int32)
    assert "as if no label counts" in verify(dense(), nn.CrossEntropyLoss(), (batch()[0], ignored), 4).diagnosis


@pytest.mark.parametrize("columns", [1, 6])
def test_search_for_the_cause_is_announced_and_short(columns, caplog, monkeypatch):
    """Each window is run once, however many columns might have labels: one batch, 4 micro-batches, the batch again."""
    runs, run = [], GradientAccumulation.train_process
    monkeypatch.setattr(
        GradientAccumulation,
        "train_process",
        lambda self, epoch, data, size, **options: runs.append(size) or run(self, epoch, data, size, **options),
    )
    x, y = batch()
    masks = [Tensor(np.arange(24) % (number + 2) - 1, ms.int32) for number in range(columns)]
    result = verify(dense(), lambda output, labels, *masks: weighting_class_2(output, labels), (x, y, *masks), 4)
    assert not result.ok and result.diagnosis.startswith(UNCERTAIN)
    assert runs == [1, 4, 1, 1, 1, 1, 1]
    (record,) = caplog.records
    assert record.getMessage().startswith("For 'verify', the gradients differ, by up to 0.")


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("training", [True, False])
def test_network_is_restored(training):
    network = dense(nn.BatchNorm1d(16), nn.Dropout(p=0.5)).set_train(training)
    before = [parameter.asnumpy().copy() for parameter in network.get_parameters()]
    verify(network, cross_entropy(), batch(), 3)
    assert all((parameter.asnumpy() == b).all() for parameter, b in zip(network.get_parameters(), before))
    assert {cell.training for _, cell in network.cells_and_names()} == {training}


def test_generators_are_left_as_they_were():
    """MindSpore's also if it is used, as Dropout does on devices."""

    def draws(output, labels):
        ms.manual_seed(9)
        return ops.cross_entropy(output, labels)

    network, before = dense(), random_state()
    verify(network, draws, batch(), 4)
    assert random_state() == before


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


def sizes_of(rows, steps):
    return [len(column) for (column,) in _split((np.arange(rows),), steps)]


def test_number_of_micro_batches_and_shortest_is_last():
    for rows, steps in [(rows, steps) for steps in range(2, 61) for rows in range(2 * steps - 1, 120)]:  # noqa: B020
        sizes = sizes_of(rows, steps)
        assert len(sizes) == steps and sum(sizes) == rows and 1 <= sizes[-1] < min(sizes[:-1])
        assert len(set(sizes)) <= 3  # each is compiled
        assert [row for (column,) in _split((np.arange(rows),), steps) for row in column] == list(range(rows))


def test_columns_without_equal_numbers_of_rows_are_rejected():
    with pytest.raises(ValueError, match=r"For 'verify', 'batch' must be tensors with the same .*, but got \[8, 24\]"):
        verify(dense(), cross_entropy(), (batch()[0], batch(8)[1]), 2)
    with pytest.raises(ValueError, match="one row per sample, but got one that is a single number"):
        verify(dense(), cross_entropy(), (batch()[0], Tensor(1, ms.int32)), 2)
    with pytest.raises(ValueError, match="the same number of rows, but got none"):
        verify(dense(), cross_entropy(), (), 2)


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
def test_several_terms_behind_one_weight_are_found(weight):
    result = verify(several_terms.Net(), Added(), rows_and_labels(), 3, weight=weight)
    assert not result.ok and "a dict if it has several terms" in result.diagnosis


def test_terms_with_their_own_divisors_agree():
    weight = {"ce": tokens, "entropy": "rows"}
    assert verify(several_terms.Net(), WithoutSize(), rows_and_labels(), 3, weight=weight).ok


def test_term_with_a_wrong_divisor_is_found():
    result = verify(several_terms.Net(), WithoutSize(), rows_and_labels(), 3, weight={"ce": "rows", "entropy": "rows"})
    assert not result.ok and result.diagnosis.startswith(UNCERTAIN)
