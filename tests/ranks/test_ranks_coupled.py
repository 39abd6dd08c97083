"""Does a loss that compares rows compare those of all ranks, as one process would?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn

import ranks
import ranks_coupled as program
import towers
from helpers import joined
from ms_accum import GradientAccumulation

pytestmark = pytest.mark.host


@pytest.fixture(scope="module")
def coupled(job):
    return [rank["coupled"] for rank in job[0]]


def big_batches(size, alone=False):
    """Train with big batches of all ranks' rows in one process; `alone` leaves out the other ranks."""
    ms.set_seed(1)
    network, loss_fn = towers.Towers(), towers.Tempered()
    whole = towers.Whole(network, loss_fn)
    trained = [*network.trainable_params(), *loss_fn.trainable_params()]
    each = [program.windows(rank) for rank in range(1 if alone else size)]
    data = [joined([columns for windows in each for columns in windows[number]]) for number in (0, 1)]
    model = GradientAccumulation(whole, None, nn.SGD(trained, 1.0), check="off")
    return ranks.train(model, data, 1), [parameter.asnumpy() for parameter in trained]


@pytest.mark.parametrize("name", ["trained", "in step", "zero"])
def test_coupled_ranks_train_like_one_process(coupled, name):
    """And no rank by itself, which is the planted fault."""
    found = [rank[name] for rank in coupled]
    assert all(each["digest"] == found[0]["digest"] for each in found)
    records, expected = big_batches(len(found))
    arrays = [np.array(array, np.float32) for array in found[0]["parameters"]]
    assert towers.miss(arrays, expected) < 1
    assert towers.miss(arrays, big_batches(len(found), alone=True)[1]) > 100
    assert found[0]["losses"] == pytest.approx([record.loss for record in records], rel=1e-5)
    assert found[0]["samples"] == [record.samples for record in records]


def test_rows_of_any_type_are_gathered(coupled):
    size = len(coupled)
    for rank, found in enumerate(each["gathered"] for each in coupled):
        first = sum(range(2, 2 + rank))
        rows = sum(range(2, 2 + size))
        owners = [owner for owner in range(size) for _ in range(2 + owner)]
        assert found == [[[[-1] * 3] * rows, "int32", first], [[[owner] * 3 for owner in owners], "uint8", first]]
