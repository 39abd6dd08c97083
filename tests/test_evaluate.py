"""`evaluate` counts every sample in evaluation mode, and checks the labels."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from helpers import batches, cross_entropy, values
from ms_accum import evaluate
from ways import Trained


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
def test_evaluate_restores_training_mode(training):
    network = OneHot().set_train(training)
    evaluate(network, [(Tensor([0], ms.int32), Tensor([0], ms.int32))])
    assert network.modes == [training, False] and network.training is training


@pytest.mark.host
def test_each_cell_has_its_mode_again():
    network = nn.SequentialCell(nn.Dense(3, 4), nn.Dropout(p=0.5)).set_train()
    network[1].set_train(False)
    before = [(cell.training, cell.phase) for _, cell in network.cells_and_names()]
    evaluate(network, [(np.ones((2, 3), np.float32), np.zeros(2, np.int32))])
    assert [(cell.training, cell.phase) for _, cell in network.cells_and_names()] == before


def test_evaluate_disables_dropout():
    network = nn.SequentialCell(nn.Dropout(p=0.9))
    scores = Tensor(np.tile(np.arange(50), (200, 1)), ms.float32)
    network.set_train()
    assert evaluate(network, [(scores, Tensor(np.full(200, 49), ms.int32))]) == (200, 200)


@pytest.mark.parametrize("shape", [(4, 1), (4, 2)])
def test_labels_of_wrong_shape_are_rejected(shape):
    network = nn.Dense(3, 2)
    batch = (np.ones((4, 3), np.float32), np.zeros(shape, np.int32))
    with pytest.raises(ValueError, match=r"labels must have the shape \(4,\), but got"):
        evaluate(network, [batch])


# In loops of the user's own


class Reversed(nn.Cell):
    """Reverses the columns in training. Masks of `nn.Dropout` on CPU differ between runs with the same seed."""

    def construct(self, x):
        return ms.ops.flip(x, (1,)) if self.training else x


class Classifier(nn.Cell):
    """A small network with a layer that is another one in evaluation."""

    def __init__(self):
        super().__init__()
        self.hidden, self.layer, self.scores = nn.Dense(6, 8), Reversed(), nn.Dense(8, 3)

    def construct(self, x):
        return self.scores(self.layer(ms.ops.relu(self.hidden(x))))


class OwnLoss(nn.Cell):
    """The loss of rows that end with their label."""

    def __init__(self, network):
        super().__init__()
        self.network, self.loss_fn = network, cross_entropy()

    def construct(self, x):
        return self.loss_fn(self.network(x[:, :-1]), ms.ops.cast(x[:, -1], ms.int32))


def counted(network, data):
    """Count the right answers in NumPy, without the layer."""
    hidden, scores = [(layer.weight.asnumpy(), layer.bias.asnumpy()) for layer in (network.hidden, network.scores)]
    right = 0
    for x, y in data:
        outputs = np.maximum(x.asnumpy() @ hidden[0].T + hidden[1], 0) @ scores[0].T + scores[1]
        right += int((outputs.argmax(1) == y.asnumpy()).sum())
    return right


def epochs_of(way, evaluates):
    """Train four epochs; return the weights, and what `evaluate` and NumPy count after each epoch."""
    ms.set_seed(1)
    network = Classifier()
    data = batches(np.random.RandomState(2), [8] * 4)
    rows = [(Tensor(np.concatenate([x.asnumpy(), y.asnumpy()[:, None]], 1), ms.float32),) for x, y in data]
    trained = Trained(way, OwnLoss(network).set_train(), 2, lr=0.5)
    found = []
    for _ in range(4):
        trained.train(rows)
        if evaluates:
            found.append([evaluate(network, data), (counted(network, data), 32)])
            assert network.training and network.layer.training
    assert trained.updates == 8
    return values(network.trainable_params()), found


@pytest.mark.slow
@pytest.mark.parametrize("way", ["accumulator"])
def test_evaluation_in_own_loop_sees_new_weights_and_changes_nothing(way):
    weights, found = epochs_of(way, evaluates=True)
    assert [actual for actual, _ in found] == [expected for _, expected in found]
    assert len({actual for actual, _ in found}) > 1, "the weights of all epochs give the same answers"
    for one, other in zip(weights, epochs_of(way, evaluates=False)[0]):
        assert one.tobytes() == other.tobytes()
