"""Are only those micro-batches rejected, in one line, that the network or the loss does not accept?"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from concurrent.futures import ProcessPoolExecutor

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, nn, ops

from helpers import cross_entropy, run, values
from ms_accum import CoupledLoss, GradientAccumulation
from ms_accum.loss.first_micro_batch import ColumnsCheck, check_compiles
from reference import digest

RNG = np.random.RandomState(1)
IMAGES = RNG.rand(8, 1, 6, 6).astype(np.float32)
LABELS = RNG.randint(0, 3, 8).astype(np.int32)


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
    """Return the text of the error, which is one line; no file is left behind."""
    with pytest.raises(error) as caught:
        run(model, [batch] * 2, 2)
    text = str(caught.value)
    assert "\n" not in text and len(text) < 700 and model.updates == 0
    assert os.listdir() == []
    return text


ONE_HOT = np.eye(3, dtype=np.float32)[LABELS]
DENSE = nn.SoftmaxCrossEntropyWithLogits(reduction="mean")
MISTAKES = {
    "swapped": ((LABELS, IMAGES), "sparse", "the network accepts", "The columns are swapped: yield the data first"),
    "dicts that begin with the label": ({"y": LABELS, "x": IMAGES}, "sparse", "the network accepts", "are swapped"),
    "float64": ((IMAGES.astype(float), LABELS), "sparse", "Float64 [8, 1, 6, 6]", "Yield the data as Float32. "),
    "bytes": (((IMAGES * 255).astype(np.uint8), LABELS), "sparse", "the network", "Yield the data as Float32. "),
    "channels last": ((IMAGES.transpose(0, 2, 3, 1), LABELS), "sparse", "but got Float32 [8, 6, 6, 1]", "shape: 6"),
    "no channel": ((IMAGES[:, 0], LABELS), "sparse", "but got Float32 [8, 6, 6] and", "must be equal to 4"),
    "another size": ((IMAGES[:, :, 1:], LABELS), "sparse", "[8, 1, 5, 6]", "error at test_first_micro_batch.py:"),
    "float labels": ((IMAGES, LABELS.astype(np.float32)), "sparse", "'loss_fn' accepts with", "labels as Int32. "),
    "labels in a column": ((IMAGES, LABELS[:, None]), "sparse", "'loss_fn'", "Int32 [8, 1]. MindSpore's"),
    "one-hot labels": ((IMAGES, ONE_HOT), "sparse", "output, Float32 [8, 3], but", "Float32 [8, 3]. MindSpore's"),
    "class numbers": ((IMAGES, LABELS), DENSE, "'loss_fn' accepts", "Int32 [8]. MindSpore's"),
    "int64 labels": ((IMAGES, LABELS.astype(int)), nn.CrossEntropyLoss(), "Int64 [8].", "Yield the labels as Int32. "),
    "labels of fewer rows": ((IMAGES, LABELS[:4]), "sparse", "Float32 [8, 1, 6, 6] and Int32 [4]", "MindSpore's error"),
    "both": ((IMAGES.astype(float), LABELS[:, None]), "sparse", "the network", "Yield the data as Float32. "),
    "of mint": ((LABELS, IMAGES), mint.nn.CrossEntropyLoss(), "the network accepts", "The columns are swapped"),
}


@pytest.mark.parametrize(("batch", "loss_fn", "rule", "remedy"), MISTAKES.values(), ids=MISTAKES)
def test_invalid_batch_is_reported_in_one_line(batch, loss_fn, rule, remedy, capfd):
    message = rejected(driver(loss_fn=loss_fn), batch)
    assert message.startswith("For 'train_process', 'train_dataset' must be one whose columns ")
    assert "MindSpore's" in message and rule in message and remedy in message
    assert capfd.readouterr().err == ""


def test_invalid_batch_is_reported_with_closed_stderr(monkeypatch):
    def closed(number):
        raise OSError("Bad file descriptor")

    monkeypatch.setattr(os, "dup", closed)
    assert "MS_OM_PATH" not in os.environ
    with pytest.raises(ValueError, match="Yield the data as Float32."):
        run(driver(), [MISTAKES["float64"][0]], 1)
    assert "MS_OM_PATH" not in os.environ


@pytest.mark.host
def test_invalid_batch_is_reported_in_pynative_mode():
    assert "Yield the data as Float32." in rejected(driver(), MISTAKES["float64"][0])


@pytest.mark.parametrize(
    ("loss_fn", "batch", "error", "message"),
    [
        (None, (IMAGES,), ValueError, "the loss must be a scalar, but got shape (8, 3)"),
        (None, (IMAGES, LABELS), ValueError, "Without a 'loss_fn' the network gets all columns and returns the loss"),
        (lambda output, label: None, (IMAGES, LABELS), TypeError, "the loss must be a scalar, but got None"),
        (ops.square, (IMAGES,), ValueError, "must be one that yields 2 columns"),
    ],
    ids=["no scalar", "no loss function for two columns", "None", "one column"],
)
@pytest.mark.host
def test_missing_or_non_scalar_loss_is_rejected(loss_fn, batch, error, message):
    assert message in rejected(driver(loss_fn=loss_fn), batch, error)


SEVERAL = "'loss_fn' must return only the loss, a scalar, but got several values. Leave the others out"


def loss_and_output(output, label):
    return ops.mse_loss(output, label), output


def losses_of_rows(output, label):
    return ops.square(output - label).mean((1,))


@pytest.mark.parametrize(
    ("loss_fn", "error", "said"),
    [
        (loss_and_output, TypeError, SEVERAL),
        (
            losses_of_rows,
            ValueError,
            "a scalar, but got shape (8,). Give the loss function reduction=",
        ),
    ],
    ids=["several values", "a loss of each row"],
)
@pytest.mark.parametrize("check", ["first", "off"])
@pytest.mark.host
def test_loss_function_with_several_values_is_rejected(loss_fn, error, said, check):
    """The remedy must not be to give a loss function, because there is one."""
    message = rejected(driver(loss_fn=loss_fn, check=check), (IMAGES, ONE_HOT), error)
    assert said in message and "the driver a 'loss_fn'" not in message


@pytest.mark.host
def test_network_with_several_values_is_rejected():
    class Two(Small):
        def construct(self, x):
            return super().construct(x).sum(), x

    assert "the network must return only its loss" in rejected(driver(Two(), loss_fn=None), (IMAGES,), TypeError)


def test_error_in_the_network_is_raised_unchanged():
    class Mistaken(Small):
        def construct(self, x):
            return self.dens(x)

    assert "object has no attribute 'dens'" in rejected(driver(Mistaken()), (IMAGES, LABELS), AttributeError)


# Lambdas: MindSpore compiles the line that contains one

alone = lambda output, label: ops.mse_loss(output, label)  # noqa: E731
on_two_lines = lambda output, label: ops.mse_loss(  # noqa: E731
    output, label
)


def returned():
    return lambda output, label: ops.mse_loss(output, label)


inside = [("a call", dict(loss=lambda output, label: ops.mse_loss(output, label))["loss"])]  # noqa: C408
inside += [("a list", [lambda output, label: ops.mse_loss(output, label), 3][0])]
WORKING = {"alone": alone, "on two lines": on_two_lines, "returned": returned()}


@pytest.mark.parametrize("loss_fn", [*WORKING.values(), *(loss_fn for _, loss_fn in inside)])
def test_only_lambdas_that_mindspore_can_not_compile_are_rejected(loss_fn):
    ms.set_context(mode=ms.GRAPH_MODE)

    class Compiled(nn.Cell):
        def __init__(self):
            super().__init__()
            self.loss_fn = loss_fn

        def construct(self, output, label):
            return self.loss_fn(output, label)

    one = Tensor([1.0])
    if loss_fn in WORKING.values():
        check_compiles(loss_fn)
        assert Compiled()(one, one) == 0.0
        return
    with pytest.raises(TypeError, match="Parse Lambda Function Fail"):
        Compiled()(one, one)
    with pytest.raises(ValueError, match="'loss_fn' must be a function that .* larger statement. Define it with 'def'"):
        check_compiles(loss_fn)


def test_driver_checks_lambdas():
    assert "a lambda inside a larger" in rejected(driver(loss_fn=inside[0][1], check="first"), (IMAGES, ONE_HOT))


# Micro-batches that are accepted


class OnlyInTraining(Small):
    """Returns classes in evaluation mode, which the loss does not accept."""

    def construct(self, x):
        scores = super().construct(x)
        if self.training:
            return scores
        return scores.argmax(-1)


class OnlyEight(Small):
    def construct(self, x):
        if x.shape[0] != 8:
            raise ValueError("eight rows")
        return super().construct(x)


class ClassPerRow(Small):
    """Has one class for each row of the micro-batch."""

    def construct(self, x):
        scores = super().construct(x)
        return ops.matmul(scores, scores.T)


ROWS = np.arange(8, dtype=np.int32)


@pytest.mark.parametrize(
    ("network", "loss_fn", "labels"),
    [
        (OnlyInTraining(), "sparse", LABELS),
        (OnlyEight(), "sparse", LABELS),
        (Small(), mint.nn.CrossEntropyLoss(), LABELS),
    ],
    ids=["another output in evaluation mode", "fixed batch size", "no PyNative kernel"],
)
def test_networks_that_train_are_accepted(network, loss_fn, labels, capfd):
    model = driver(network, loss_fn)
    run(model, [(IMAGES, labels)] * 2, 2)
    assert model.updates == 1 and capfd.readouterr().err == "" and os.listdir() == []


def compared(output, labels):
    return ops.cross_entropy(ops.matmul(output, output.T), labels)


WARNING = "compares the rows of each micro-batch only|A loss that compares the rows of a batch needs CoupledLoss"
COMPARING = {"classes": (ClassPerRow, "sparse"), "a function": (Small, compared)}


@pytest.mark.parametrize("loss", ["classes", pytest.param("a function", marks=pytest.mark.slow)])
@pytest.mark.parametrize("labels", [ROWS, ROWS[::-1].copy()], ids=["in order", "mixed"])
def test_loss_with_row_numbers_as_labels_warns(loss, labels):
    make, loss_fn = COMPARING[loss]
    model = driver(make(), loss_fn)
    with pytest.warns(RuntimeWarning, match=WARNING) as caught:
        run(model, [(IMAGES, labels)] * 2, 2)
    assert model.updates == 1 and len(caught) == 1


@pytest.mark.parametrize("loss", ["classes", pytest.param("a function", marks=pytest.mark.slow)])
def test_row_numbers_of_a_larger_batch_are_rejected(loss):
    make, loss_fn = COMPARING[loss]
    model = driver(make(), loss_fn)
    error = "to 7, but got 15. .* CoupledLoss"
    with pytest.warns(RuntimeWarning, match=WARNING), pytest.raises(ValueError, match=error):
        run(model, [(IMAGES, ROWS), (IMAGES, ROWS + 8)], 2)
    message = rejected(driver(make(), loss_fn), (IMAGES, ROWS + 8))
    if loss == "classes":
        assert "labels are numbers of rows of the micro-batch, from 0 to 7, but got 15. The loss compares" in message
    else:  # what the labels mean is unknown until a micro-batch is accepted
        assert "with the network's output, Float32 [8, 3], but got Float32 [8, 1, 6, 6] and Int" in message


def test_invalid_class_is_not_taken_for_a_row_number():
    assert "3 classes, but got 9" in rejected(driver(), (IMAGES, np.where(LABELS == 1, 9, LABELS)))
    assert "CoupledLoss" not in rejected(driver(loss_fn=ops.cross_entropy), (IMAGES, LABELS + 7))


def test_row_numbers_in_windows_of_one_are_accepted():
    model = driver(ClassPerRow())
    run(model, [(IMAGES, ROWS)], 1)
    assert model.updates == 1


@pytest.mark.host
def test_row_numbers_of_a_coupled_window_are_accepted():
    model = driver(Small(), CoupledLoss(compared))
    order = np.random.RandomState(1).permutation(8).astype(np.int32)
    run(model, [(IMAGES, order)], micro_batch_size=2)
    assert model.updates == 1


class Random(nn.Cell):
    def __init__(self):
        super().__init__()
        self.norm, self.dense, self.dropout = nn.BatchNorm1d(36), nn.Dense(36, 3), nn.Dropout(p=0.5)

    def construct(self, x):
        return self.dense(self.dropout(self.norm(ops.flatten(x))))


def state_after(check, mode):
    """Train, and return all that random numbers and modes have left."""
    ms.set_context(mode=mode)
    ms.set_seed(2)
    model = driver(Random(), check=check)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of BatchNorm
        records = run(model, [(IMAGES, LABELS)] * 4, 2).records
    state = [digest(model._network.get_parameters()), ms.get_rng_state().asnumpy().tolist()]
    return [*state, [record.loss for record in records], [cell.training for cell in model._network.cells()]]


@pytest.mark.slow
@pytest.mark.modes
def test_check_changes_no_state():
    """Each run has a process of its own: in the second run of a process nn.Dropout may draw other masks."""
    states = []
    for check in ("first", "off"):
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            states.append(process.submit(state_after, check, ms.get_context("mode")).result())
    assert states[0] == states[1]


@pytest.mark.host
def test_each_column_type_is_checked_once(monkeypatch):
    checked = []
    monkeypatch.setattr(ColumnsCheck, "check", lambda self, data, columns, *arguments: checked.append(columns[0].dtype))
    images = [IMAGES, IMAGES[:5], IMAGES.astype(np.float16).astype(np.float32), IMAGES]
    run(driver(), [(image, LABELS[: len(image)]) for image in images], 2)
    assert checked == [ms.float32]
    model = driver()
    with pytest.raises(TypeError):
        run(model, [(IMAGES, LABELS), (IMAGES.astype(np.float16), LABELS)], 2)
    assert checked == [ms.float32, ms.float32, ms.float16]


@pytest.mark.host
@pytest.mark.parametrize("options", [{"check": "off"}, {}], ids=["check is off", "large untrained parameters"])
def test_without_the_check_mindspores_error_is_raised(options, monkeypatch):
    monkeypatch.setattr("ms_accum.network.restoring._LIMIT", 64 if options else -1)
    with pytest.raises(TypeError, match=r"(?s)For primitive\[Conv2D\].*Call Stack"):
        run(driver(**options), [MISTAKES["float64"][0]], 1)


# Labels


@pytest.mark.host
@pytest.mark.parametrize("loss_fn", ["sparse", nn.CrossEntropyLoss()], ids=["sparse", "CrossEntropyLoss"])
@pytest.mark.parametrize("label", [3, 7, -1])
@pytest.mark.parametrize("position", [0, 7])
def test_labels_out_of_range_are_rejected(loss_fn, label, position):
    labels = LABELS.copy()
    labels[position] = label
    message = rejected(driver(loss_fn=loss_fn), (IMAGES, labels))
    assert (
        f"must be one that yields labels from 0 to 2, the network's 3 classes, but got {label}. Should this" in message
    )


@pytest.mark.host
def test_ignored_labels_are_accepted():
    model = driver(loss_fn=nn.CrossEntropyLoss(ignore_index=-1))
    run(model, [(IMAGES, np.r_[LABELS[:7], -1].astype(np.int32))] * 2, 2)
    assert model.updates == 1


@pytest.mark.host
def test_label_minus_one_is_rejected_in_a_later_micro_batch():
    """MindSpore's loss takes label -1 for the last class."""
    later = np.r_[LABELS[:7], -1].astype(np.int32)
    with pytest.raises(ValueError, match="labels >= 0, but got -1. Should this be its 'ignore_index'"):
        run(driver(loss_fn=nn.CrossEntropyLoss()), [(IMAGES, LABELS), (IMAGES, later)], 2)


@pytest.mark.host
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
