"""`evaluate` counts every sample in evaluation mode, and checks the labels."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_accum import evaluate


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


@pytest.mark.usefixtures("eager")
def test_each_cell_has_its_mode_again():
    network = nn.SequentialCell(nn.Dense(3, 4), nn.Dropout(p=0.5)).set_train()
    network[1].set_train(False)
    before = [(cell.training, cell.phase) for _, cell in network.cells_and_names()]
    evaluate(network, [(np.ones((2, 3), np.float32), np.zeros(2, np.int32))])
    assert [(cell.training, cell.phase) for _, cell in network.cells_and_names()] == before


@pytest.mark.parametrize("shape", [(4, 1), (4, 2)])
def test_labels_of_wrong_shape_are_rejected(shape):
    network = nn.Dense(3, 2)
    batch = (np.ones((4, 3), np.float32), np.zeros(shape, np.int32))
    with pytest.raises(ValueError, match=r"labels must have the shape \(4,\), but got"):
        evaluate(network, [batch])
