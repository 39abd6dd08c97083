"""Are gradients of looked-up rows accumulated as those of all rows?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from helpers import compiled_step, run, values
from ms_accum import Accumulator, GradientAccumulation
from ms_accum.network import tree

ROWS = 10


class Words(nn.Cell):
    """An embedding before or behind another layer: there MindSpore makes other graphs of it."""

    def __init__(self, make, late):
        super().__init__()
        random = np.random.RandomState(1)
        if late:
            self.head = nn.Dense(4, 3)
        self.words = make(ROWS, 4)
        self.words.embedding_table.set_data(Tensor(random.rand(ROWS, 4), ms.float32))
        if not late:
            self.head = nn.Dense(4, 3)
        self.head.weight.set_data(Tensor(random.rand(3, 4), ms.float32))
        self.head.bias.set_data(Tensor(random.rand(3), ms.float32))

    def construct(self, x):
        return self.head(self.words(x))


def data():
    """Words that come twice in a micro-batch, some that come in one only, and one that never does."""
    random = np.random.RandomState(2)
    rows = (4, 4, 4, 2, 4)
    return [(Tensor(random.randint(0, ROWS - 1, n), ms.int32), Tensor(random.rand(n, 3), ms.float32)) for n in rows]


def trained(make, late, window, **options):
    network = Words(make, late)
    optimizer = nn.Adam(network.trainable_params(), 0.1)
    model = GradientAccumulation(network, nn.MSELoss(), optimizer, clip_norm=0.05, **options)
    run(model, data(), window)
    return values(network.trainable_params())


@pytest.mark.slow
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("late", [False, True])
def test_the_driver_trains_as_with_all_rows(window, late):
    found, expected = trained(nn.EmbeddingLookup, late, window), trained(nn.Embedding, late, window)
    for sparse, dense in zip(found, expected):
        np.testing.assert_allclose(sparse, dense, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(("late", "window"), [(True, 2), (False, 2), (True, 1)])
def test_a_step_of_ones_own_does_too(late, window):
    left = []
    for make in (nn.EmbeddingLookup, nn.Embedding):
        network = Words(make, late)
        optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
        accumulator = Accumulator(optimizer, window, reduction="mean")
        step = compiled_step(network, nn.MSELoss(), accumulator, optimizer)
        for x, y in data():
            step(x, y)
        assert accumulator.flush() == (window == 2) and accumulator.updates == 3 + 2 * (window == 1)
        left.append(values(network.trainable_params()))
    for sparse, dense in zip(*left):
        np.testing.assert_allclose(sparse, dense, rtol=1e-6, atol=1e-7)


@pytest.mark.slow
def test_without_it_nothing_is_trained(monkeypatch):
    """The mutant."""

    def left_alone(gradients, parameters):
        return gradients

    monkeypatch.setattr(tree, "dense", left_alone)
    with pytest.raises(Exception, match="has no attribute 'shape'"):
        trained(nn.EmbeddingLookup, False, 1)


@pytest.mark.host
def test_outside_a_graph_their_rows_are_not_known():
    with pytest.raises(ValueError, match=r"got \(4, 4\) for \(10, 4\)\. Outside graphs .* use graph mode, or nn.Emb"):
        trained(nn.EmbeddingLookup, True, 3)
