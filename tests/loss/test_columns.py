"""Are only those micro-batches rejected, in one line, that the network or the loss does not accept?"""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

from helpers import cross_entropy, run, values
from ms_accum import CoupledLoss, GradientAccumulation
from ms_accum.loss.objective import Objective

RNG = np.random.RandomState(1)
IMAGES = RNG.rand(8, 1, 6, 6).astype(np.float32)
LABELS = RNG.randint(0, 3, 8).astype(np.int32)
ONE_HOT = np.eye(3, dtype=np.float32)[LABELS]
DENSE = nn.SoftmaxCrossEntropyWithLogits(reduction="mean")


class Small(nn.Cell):
    """A convolution of one channel, and three classes."""

    def __init__(self):
        super().__init__()
        self.conv, self.dense = nn.Conv2d(1, 2, 3, pad_mode="valid"), nn.Dense(32, 3)

    def construct(self, x):
        return self.dense(ops.flatten(self.conv(x)))


def driver(network=None, loss_fn="sparse", **options):
    network = network or Small()
    loss_fn = cross_entropy() if loss_fn == "sparse" else loss_fn
    return GradientAccumulation(network, loss_fn, nn.SGD(network.trainable_params(), 0.1), **options)


def rejected(model, batch, error=ValueError):
    """Return the text of the error, which is one line."""
    with pytest.raises(error) as caught:
        run(model, [batch] * 2, 2)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700 and model.updates == 0
    return text


# MindSpore's errors, with a hint


def losses_of_rows(output, label):
    return ops.square(output - label).mean((1,))


REJECTED = "For 'train_process', MindSpore rejects "
MISTAKES = {
    "swapped": (
        (LABELS, IMAGES),
        "sparse",
        "Int32 [8] and Float32 [8, 1, 6, 6] of 'train",
        "The columns are swapped: ",
    ),
    "float64": ((IMAGES.astype(float), LABELS), "sparse", "Float64 [8, 1, 6, 6]", "Yield the data as Float32."),
    "channels last": ((IMAGES.transpose(0, 2, 3, 1), LABELS), "sparse", "Float32 [8, 6, 6, 1]", "test_columns.py:"),
    "int64 labels": ((IMAGES, LABELS.astype(int)), nn.CrossEntropyLoss(), "Int64 [8]", "Yield the labels as Int32."),
    "fewer rows": ((IMAGES, ONE_HOT[:4]), losses_of_rows, "and Float32 [4, 3] of", "The columns have 8 and 4 rows."),
    "of mint": ((LABELS, IMAGES), mint.nn.CrossEntropyLoss(), "Int32 [8] and", "The columns are swapped: "),
}


@pytest.mark.parametrize(("batch", "loss_fn", "shown", "hint"), MISTAKES.values(), ids=MISTAKES)
def test_error_of_mindspore_is_one_line_with_a_hint(batch, loss_fn, shown, hint):
    message = rejected(driver(loss_fn=loss_fn), batch)
    assert message.startswith(REJECTED) and shown in message and hint in message


@pytest.mark.usefixtures("eager")
def test_error_in_the_network_is_raised_unchanged():
    class Mistaken(Small):
        def construct(self, x):
            return self.dens(x)

    with pytest.raises(AttributeError, match="object has no attribute 'dens'"):
        run(driver(Mistaken()), [(IMAGES, LABELS)] * 2, 2)


@pytest.mark.usefixtures("eager")
def test_error_after_the_first_window_is_raised_unchanged():
    later = np.where(np.arange(8) == 7, 7, LABELS).astype(np.int32)
    with pytest.raises(RuntimeError, match="(?s)'SparseSoftmaxCrossEntropyWithLogits' got error label.*Call Stack"):
        run(driver(), [(IMAGES, LABELS)] * 2 + [(IMAGES, later)], 2)


# The number of columns


def of_output(output):
    return ops.square(output).mean()


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    ("loss_fn", "batch", "rule"),
    [
        (cross_entropy(), (IMAGES,), "yields 2 columns: the data, and what 'loss_fn' takes in addition to the output"),
        (cross_entropy(), (IMAGES, LABELS, LABELS), "yields 2 columns"),
        (of_output, (IMAGES, LABELS), "yields 1 column: "),
        (ops.cross_entropy, (IMAGES, LABELS, ONE_HOT), "yields 2 columns"),
    ],
)
def test_wrong_number_of_columns_is_rejected(loss_fn, batch, rule):
    assert rule in rejected(driver(loss_fn=loss_fn), batch)


# What the loss returns

SEVERAL = "'loss_fn' must return only the loss, but got several values. Leave the others out"


def loss_and_output(output, label):
    return ops.mse_loss(output, label), output


def nothing(output, label):
    return None


@pytest.mark.parametrize(
    ("loss_fn", "error", "message"),
    [
        (loss_and_output, TypeError, SEVERAL),
        (losses_of_rows, ValueError, "a scalar, but got shape (8). Give the loss function reduction="),
        (nothing, TypeError, "the loss must be a scalar, but got None"),
    ],
    ids=["several values", "a loss of each row", "None"],
)
def test_loss_that_is_no_scalar_is_rejected(loss_fn, error, message):
    """The remedy must not be to give a loss function, because there is one."""
    text = rejected(driver(loss_fn=loss_fn), (IMAGES, ONE_HOT), error)
    assert message in text and "the driver a 'loss_fn'" not in text


@pytest.mark.usefixtures("eager")
def test_network_whose_first_output_is_no_loss_is_rejected():
    class Two(Small):
        def construct(self, x):
            return super().construct(x), x

    message = rejected(driver(Two(), loss_fn=None), (IMAGES,), ValueError)
    assert "the loss must be a scalar, but got shape (8, 3)" in message and "the driver a 'loss_fn'" in message


# Micro-batches that are accepted


class OnlyInTraining(Small):
    """Returns classes in evaluation mode, which the loss does not accept."""

    def construct(self, x):
        scores = super().construct(x)
        if self.training:
            return scores
        return scores.argmax(-1)


class DynamicRows(Small):
    """Returns as many rows as are above a threshold, which no graph knows before it runs."""

    def construct(self, x):
        scores = super().construct(x)
        return ops.gather(scores, ops.nonzero(x[:, 0, 0, 0] >= 0)[:, 0], 0)


@pytest.mark.parametrize(
    ("network", "loss_fn"),
    [(OnlyInTraining, "sparse"), (DynamicRows, "sparse"), (Small, mint.nn.CrossEntropyLoss())],
    ids=["another output in evaluation mode", "an output of unknown shape", "no PyNative kernel"],
)
def test_networks_that_train_are_accepted(network, loss_fn):
    model = driver(network(), loss_fn)
    run(model, [(IMAGES, LABELS)] * 2, 2)
    assert model.updates == 1


# Columns of different numbers of rows


class Pairs(Small):
    """Returns a row for two of its rows; in evaluation mode something that no loss accepts."""

    def construct(self, x):
        scores = super().construct(x)
        if self.training:
            return scores[0::2] + scores[1::2]
        raise ValueError("not in training")


def of_a_user(output, labels):
    return ops.cross_entropy(output, labels)


@pytest.mark.usefixtures("default_mode")
@pytest.mark.parametrize("loss_fn", ["sparse", of_a_user], ids=["sparse", "any"])
def test_columns_that_do_not_fit_together_are_rejected_before_a_graph_is_compiled(loss_fn, compiles, tmp_path):
    message = rejected(driver(loss_fn=loss_fn), (IMAGES, LABELS[:4]))
    assert ("labels of the shape (8,)" if loss_fn == "sparse" else "The columns have 8 and 4 rows") in message
    assert not compiles and not list(tmp_path.iterdir())


class InGraphs(Small):
    """Returns a row for two of its rows, and can't be called operator by operator."""

    def construct(self, x):
        scores = self.dense(ops.flatten(self.conv(x)))
        return scores[0::2] + scores[1::2]

    def __call__(self, x):
        raise TypeError("outside graphs")


@pytest.mark.usefixtures("default_mode")
def test_network_that_runs_in_graphs_only_is_accepted():
    model = driver(InGraphs())
    run(model, [(IMAGES, LABELS[:4])] * 2, 2)
    assert model.updates == 1


def test_network_that_joins_rows_is_accepted():
    model = driver(Pairs())
    run(model, [(IMAGES, LABELS[:4])] * 2, 2)
    assert model.updates == 1


# Labels


class Reversed(Small):
    """Its last Parameter has no row for each class, so that labels may be none for all that is known before it runs."""

    def __init__(self):
        super().__init__()
        self.scale = Parameter(Tensor([1.0], ms.float32), name="scale")

    def construct(self, x):
        return super().construct(x) * self.scale


@pytest.mark.usefixtures("default_mode")
@pytest.mark.parametrize("network", [Small, Reversed])
@pytest.mark.parametrize("labels", [LABELS + 3, ONE_HOT, LABELS[:, None]], ids=["out of range", "one-hot", "column"])
def test_labels_are_rejected_before_a_graph_is_compiled(labels, network, compiles, tmp_path):
    """MindSpore's compiler would log its stack, and leave a folder."""
    assert "one that yields labels " in rejected(driver(network()), (IMAGES, labels))
    assert not compiles and not list(tmp_path.iterdir())


class Sum(Small):
    """Takes two columns."""

    def construct(self, x, y):
        return self.dense(ops.flatten(self.conv(x + y)))


@pytest.mark.usefixtures("default_mode")
def test_labels_after_several_inputs_are_rejected_before_a_graph_is_compiled(compiles):
    assert "labels from 0 to 2" in rejected(driver(Sum(), inputs=2), (IMAGES, IMAGES, LABELS + 3))
    assert not compiles


@pytest.mark.usefixtures("default_mode")
def test_usual_labels_cost_no_forward_outside_graphs(monkeypatch):
    monkeypatch.setattr(Objective, "_try_outside_graphs", None)
    run(driver(Sum(), inputs=2), [(IMAGES, IMAGES, LABELS)] * 2, 2)
    for labels, loss_fn in ((LABELS, "sparse"), (ONE_HOT, DENSE), (LABELS, nn.CrossEntropyLoss())):
        run(driver(loss_fn=loss_fn), [(IMAGES, labels)] * 2, 2)


@pytest.mark.usefixtures("default_mode")
def test_own_error_keeps_its_traceback():
    class Mistaken(Small):
        def construct(self, x):
            raise ValueError("not so")

    with pytest.raises(ValueError, match="not so. The columns are swapped") as caught:
        run(driver(Mistaken(), compile=False), [(LABELS, IMAGES)] * 2, 2)
    assert str(caught.value.__cause__) == "not so"


@pytest.mark.parametrize(
    ("labels", "loss_fn", "rule"),
    [
        (LABELS.astype(np.float32), "sparse", "of the shape (8,), class numbers, for the network's output (8, 3), but"),
        (ONE_HOT, "sparse", "but got Float32 (8, 3). Labels of the other kind need sparse=False."),
        (LABELS, DENSE, "shape (8, 3), a score for each class, for the network's output (8, 3), but got Int32 (8,)."),
        (LABELS[:4], nn.CrossEntropyLoss(), "labels of the shape (8,), class numbers, for the network's output (8, 3)"),
    ],
    ids=["float", "one-hot", "class numbers", "of fewer rows"],
)
def test_labels_of_another_kind_are_rejected(labels, loss_fn, rule):
    assert rule in rejected(driver(loss_fn=loss_fn), (IMAGES, labels))


@pytest.mark.parametrize("loss_fn", ["sparse", nn.CrossEntropyLoss()], ids=["sparse", "CrossEntropyLoss"])
@pytest.mark.parametrize(
    ("label", "rule"), [(3, "labels from 0 to 2, the network's 3 classes"), (7, "3 classes"), (-1, "labels >= 0")]
)
def test_labels_out_of_range_are_rejected(loss_fn, label, rule):
    """For the label 3 MindSpore's loss is infinite, and its gradient is not; -1 is the last class of another loss."""
    labels = np.where(np.arange(8) == 7, label, LABELS).astype(np.int32)
    message = rejected(driver(loss_fn=loss_fn), (IMAGES, labels))
    assert rule in message and f"but got {label}. Should this be the loss's 'ignore_index'?" in message


@pytest.mark.usefixtures("eager")
def test_label_minus_one_is_rejected_in_a_later_micro_batch():
    """MindSpore's loss takes label -1 for the last class."""
    later = np.r_[LABELS[:7], -1].astype(np.int32)
    with pytest.raises(ValueError, match="labels >= 0, but got -1. Should this be its 'ignore_index'"):
        run(driver(loss_fn=nn.CrossEntropyLoss()), [(IMAGES, LABELS), (IMAGES, later)], 2)


@pytest.mark.parametrize(("label", "warned"), [(np.ones(8), True), (np.ones((8, 1)), False)], ids=["(8,)", "(8, 1)"])
def test_broadcasting_outputs_and_labels_warn(label, warned):
    network = nn.Dense(4, 1)
    model = GradientAccumulation(network, nn.MSELoss(), nn.SGD(network.trainable_params(), 0.1))
    batch = (np.ones((8, 4), np.float32), label.astype(np.float32))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run(model, [batch] * 4, 2)
    messages = [str(warning.message) for warning in caught if "MSELoss broadcasts" in str(warning.message)]
    assert len(messages) == warned
    assert not warned or "output ('rows', 1) and the labels ('rows',)" in messages[0]
    assert np.isfinite(values(network.trainable_params())[0]).all()


# Labels that number the rows of a batch


class ClassPerRow(Small):
    """Has one class for each row of the micro-batch."""

    def construct(self, x):
        scores = super().construct(x)
        return ops.matmul(scores, scores.T)


def compared(output, labels):
    return ops.cross_entropy(ops.matmul(output, output.T), labels)


ROWS = np.arange(8, dtype=np.int32)
COMPARING = {"classes": (ClassPerRow, "sparse"), "a function": (Small, compared)}


@pytest.mark.parametrize(("network", "loss_fn"), COMPARING.values(), ids=COMPARING)
def test_loss_with_row_numbers_as_labels_warns(network, loss_fn):
    """In any order."""
    model = driver(network(), loss_fn)
    with pytest.warns(RuntimeWarning, match="A loss that compares the rows of a batch needs CoupledLoss") as caught:
        run(model, [(IMAGES, ROWS[::-1].copy())] * 2, 2)
    assert model.updates == 1 and len(caught) == 1


def test_row_numbers_of_a_larger_batch_are_rejected():
    message = rejected(driver(ClassPerRow()), (IMAGES, ROWS + 8))
    assert "from 0 to 7, the network's 8 classes, but got 15. A loss that compares the rows of a batch needs" in message


@pytest.mark.usefixtures("eager")
def test_row_numbers_of_a_coupled_window_are_accepted():
    model = driver(Small(), CoupledLoss(compared))
    order = np.random.RandomState(1).permutation(8).astype(np.int32)
    run(model, [(IMAGES, order)], micro_batch_size=2)
    assert model.updates == 1
