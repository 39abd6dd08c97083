"""Which datasets, rows and columns does the driver take, and with which errors does it reject others?"""

from __future__ import annotations

import mindspore as ms
import mindspore.dataset as ds
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from helpers import Slope, micro_batch, run, slope_driver, values
from ms_accum import GradientAccumulation
from ms_accum.training import data as batches

pytestmark = pytest.mark.usefixtures("eager")


def rows(*numbers):
    return [np.full((2, 1), number, np.float32) for number in numbers]


# Datasets


class CountedGenerator:
    """A generator function that counts how often it is called."""

    def __init__(self, times=99):
        self.calls, self.times = 0, times

    def __call__(self):
        self.calls += 1
        if self.calls <= self.times:
            yield from ((row,) for row in rows(1.0, 2.0, 3.0, 4.0))


@pytest.mark.parametrize("shape", [lambda dataset: dataset, lambda dataset: dataset.repeat(1).skip(0)])
def test_generator_is_not_read_before_training(shape):
    source = CountedGenerator(times=1)
    model = slope_driver()
    recorder = run(model, shape(ds.GeneratorDataset(source, ["x"], shuffle=False)), 4)
    assert source.calls == 1 and model.updates == 1 and recorder.planned is None
    assert values([model._network.w])[0] == -2.5


def test_length_of_source_gives_planned_updates():
    class Source:
        def __len__(self):
            return 4

        def __getitem__(self, number):
            return (rows(1.0, 2.0, 3.0, 4.0)[number],)

    assert run(slope_driver(), ds.GeneratorDataset(Source(), ["x"], shuffle=False), 4).planned == 1


class EndlessSequence:
    """Four batches by number that begin again after the last, so there is no IndexError."""

    numbers: list

    def __init__(self):
        self.numbers = []

    def __len__(self):
        return 4

    def __getitem__(self, number):
        self.numbers.append(number)
        if len(self.numbers) > 99:
            raise AssertionError("the epoch does not end")
        return (rows(1.0, 2.0, 3.0, 4.0)[number % 4],)


def test_sequence_without_index_error_ends_at_its_length():
    data = EndlessSequence()
    recorder = run(slope_driver(), data, 4, epochs=2)
    assert recorder.planned == 2 and [number for number in data.numbers if number > 3] == []
    assert data.numbers[-8:] == [0, 1, 2, 3] * 2
    resumed = next(batches.Data(data).epochs(1, batches.Position(batches=2, rows=4)))  # resumed after two batches
    assert [float(x.asnumpy()[0, 0]) for (x,) in resumed] == [3.0, 4.0]


def test_sequence_without_length_ends_at_index_error():
    class Source:
        def __getitem__(self, number):
            return (rows(1.0, 2.0)[number],)

    model = slope_driver()
    run(model, Source(), 1)
    assert model.updates == 2


# Rows


def test_dicts_with_keys_in_any_order():
    network, seen = nn.Dense(1, 1), []
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    model = GradientAccumulation(
        network,
        nn.MSELoss(),
        optimizer,
        weight=lambda *columns: seen.append([float(each[0, 0]) for each in columns]) or 1,
    )
    x, y = rows(1.0, 2.0)
    run(model, [{"x": x, "y": y}, {"y": y, "x": x}], 9)
    assert seen == [[1.0, 2.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ((np.array(["a", "b"]),), "batches of numbers, but got a column of ndarray, <U1"),
        ((Tensor(np.array(["a", "b"])),), "batches of numbers, but got a column of strings"),
        ((np.float32(3.0),), "columns with one row per sample, but got a column that is one number"),
        (({"x": 1},), "batches of numbers, but got a column of dict, object"),
        (([[1.0, 2.0], [3.0]],), "batches of numbers, but got a column of rows that differ in size"),
    ],
    ids=["array of texts", "tensor of texts", "number", "dict", "ragged"],
)
def test_invalid_batch_rejected_with_one_line_error(batch, message):
    with pytest.raises(ValueError, match="For 'train_process', 'train_dataset' must be one that yields") as error:
        run(slope_driver(), [batch], 1)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("dataset", [None, 3])
def test_invalid_dataset_is_rejected(dataset):
    message = f"'train_dataset' must be a dataset, or an iterable of batches, but got {type(dataset).__name__}."
    with pytest.raises(TypeError, match=message):
        run(slope_driver(), dataset, 1)


def test_dicts_with_different_keys_are_rejected():
    with pytest.raises(ValueError, match=r"dicts with the keys 'x', but got one with \['z'\]"):
        run(slope_driver(), [{"x": rows(1.0)[0]}, {"z": rows(1.0)[0]}], 2)


# Columns


class TwoLabels(nn.Cell):
    def construct(self, output, first, second):
        return ops.mean(ops.square(output - first) + ops.square(output - second))


@pytest.mark.usefixtures("eager")
def test_loss_with_several_labels():
    """As much as a network that returns its loss itself."""

    class WithLoss(nn.Cell):
        def __init__(self):
            super().__init__()
            self.network, self.loss = nn.Dense(1, 1), TwoLabels()

        def construct(self, x, first, second):
            return self.loss(self.network(x), first, second)

    data, results = [tuple(rows(1.0, 2.0, 5.0))] * 4, []
    for returns_loss in (False, True):
        ms.set_seed(3)
        network = WithLoss()
        parts = (network, None) if returns_loss else (network.network, network.loss)
        model = GradientAccumulation(*parts, nn.SGD(network.trainable_params(), 0.1), check="off")
        run(model, data, 2)
        results.append([array.tolist() for array in values(network.trainable_params())])
    assert results[0] == results[1]


class ReturnsDict(Slope):
    """Returns its loss in a dict."""

    def construct(self, x):
        return {"loss": super().construct(x)}


@pytest.mark.usefixtures("eager")
def test_network_that_returns_a_dict_is_rejected():
    network = ReturnsDict()
    model = GradientAccumulation(network, None, nn.SGD([network.w], 0.1), check="off")
    with pytest.raises(
        (TypeError, RuntimeError), match="must return the loss, or .loss, output, ...., but got several"
    ):
        run(model, [(rows(1.0)[0],)], 1)


class Longer:
    def __len__(self):
        return 2

    def __iter__(self):
        return iter([micro_batch(1.0)] * 3)


def test_more_batches_than_the_length_are_rejected():
    """A resumed run would take its epoch for over."""
    with pytest.raises(ValueError, match="must be one that yields 2 batches, its length, but got one that yields more"):
        run(slope_driver(), Longer(), 1)
