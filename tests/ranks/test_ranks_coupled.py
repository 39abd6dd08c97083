"""Does a loss that compares rows compare the rows of all ranks, as in a single process?"""

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

pytestmark = pytest.mark.usefixtures("eager")


@pytest.fixture(scope="module")
def coupled(job):
    return [rank["coupled"] for rank in job[0]]


def big_batches(size):
    """Train with big batches of all ranks' rows in one process."""
    ms.set_seed(1)
    network, loss_fn = towers.Towers(), towers.Tempered()
    forward = towers.Whole(network, loss_fn)
    trained = [*network.trainable_params(), *loss_fn.trainable_params()]
    shards = [program.windows(rank) for rank in range(size)]
    data = [joined([columns for windows in shards for columns in windows[number]]) for number in (0, 1)]
    model = GradientAccumulation(forward, None, nn.SGD(trained, 1.0), check="off")
    return ranks.train(model, data, 1), [parameter.asnumpy() for parameter in trained]


@pytest.mark.parametrize("name", ["trained", "zero"])
def test_coupled_ranks_train_like_one_process(coupled, name):
    results = [rank[name] for rank in coupled]
    assert all(result["digest"] == results[0]["digest"] for result in results)
    records, expected = big_batches(len(results))
    arrays = [np.array(array, np.float32) for array in results[0]["parameters"]]
    assert towers.miss(arrays, expected) < 1
    assert results[0]["losses"] == pytest.approx([record.loss for record in records], rel=1e-5)
    assert results[0]["samples"] == [record.samples for record in records]


def test_different_numbers_of_windows_raise_on_all_ranks(coupled):
    message = "all ranks must have the same number of windows with a CoupledLoss, but 1 of 2 have no more data"
    for rank in coupled:
        said, updates = rank["another number"]
        assert message in said and updates == 1


def test_rows_of_any_type_are_gathered(coupled):
    size = len(coupled)
    for rank, gathered in enumerate(result["gathered"] for result in coupled):
        first = sum(range(2, 2 + rank))
        rows = sum(range(2, 2 + size))
        owners = [owner for owner in range(size) for _ in range(2 + owner)]
        assert gathered == [[[[-1] * 3] * rows, "int32", first], [[[owner] * 3 for owner in owners], "uint8", first]]
