"""Does BatchNorm make accumulation differ from the large batch, and is there a warning?"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from mindspore import Tensor, mint, nn
from mindspore.dataset import GeneratorDataset
from mindspore.train import Model

from helpers import batches, cross_entropy, run, values
from ms_accum import AccumulatedTrainStep, Accumulator, FlushTail, GradientAccumulation, TrainForwardBackward
from ms_accum.layers import warn_about_batch_norm

pytestmark = pytest.mark.usefixtures("eager")


def network_with(norm):
    return nn.SequentialCell(nn.Dense(6, 8), norm, nn.ReLU(), nn.Dense(8, 3))


def driver_of(network):
    return GradientAccumulation(network, cross_entropy(), nn.SGD(network.trainable_params(), 1.0))


@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning")
def test_skipped_window_changes_only_running_statistics(rng):
    network, window = network_with(nn.BatchNorm1d(8)), batches(rng, [8, 8])
    window[1] = (Tensor(np.full((8, 6), np.nan, np.float32)), window[1][1])
    trained, statistics, model = network.trainable_params(), [network[1].moving_mean], driver_of(network)
    weights, mean = values(trained), values(statistics)
    run(model, window, 2)
    assert (model.updates, model.skipped) == (0, 1)
    assert all(map(np.array_equal, values(trained), weights))
    assert not np.array_equal(values(statistics), mean)


@pytest.mark.parametrize("epochs", [1, 3])
def test_warning_once_per_run(epochs, rng):
    model, data = driver_of(network_with(nn.BatchNorm1d(8))), batches(rng, [8, 8])
    with pytest.warns(
        UserWarning, match=r"BatchNorm layers \(1, the first is '1'\) normalize each micro-batch"
    ) as seen:
        run(model, data, 2, epochs)
    assert len(seen) == 1
    assert seen[0].filename == run.__code__.co_filename  # whoever called train_process


def test_warning_once_in_model(rng):
    network, data = network_with(nn.BatchNorm1d(8)), batches(rng, [8, 8])
    rows = GeneratorDataset([tuple(column.asnumpy() for column in columns) for columns in data], ["x", "y"])
    with pytest.warns(UserWarning, match="BatchNorm layers .1, the first is") as seen:
        step = AccumulatedTrainStep((network, cross_entropy()), nn.SGD(network.trainable_params(), 1.0), 2)
        Model(step).train(1, rows, callbacks=FlushTail())
    assert len(seen) == 1 and step.updates == 1


@pytest.mark.parametrize(("norm", "window"), [(nn.BatchNorm1d(8), 1), (nn.LayerNorm((8,)), 2)])
def test_no_warning_without_difference(norm, window, rng):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(driver_of(network_with(norm)), batches(rng, [8, 8]), window)


def test_warning_for_mint_batch_norm():
    with pytest.warns(UserWarning, match="BatchNorm layers"):
        warn_about_batch_norm(nn.SequentialCell(mint.nn.BatchNorm1d(2)).set_train())


@pytest.mark.usefixtures("eager")
def test_no_warning_for_frozen_batch_norm():
    """It uses its running statistics. With use_batch_statistics=True it does not, even in evaluation mode."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_about_batch_norm(nn.SequentialCell(nn.BatchNorm1d(2)).set_train(False))
        warn_about_batch_norm(nn.SequentialCell(nn.BatchNorm1d(2, use_batch_statistics=False)).set_train())
    with pytest.warns(UserWarning, match="BatchNorm layers"):
        warn_about_batch_norm(nn.SequentialCell(nn.BatchNorm1d(2, use_batch_statistics=True)).set_train(False))


# In a loop of one's own


def with_batch_norm(**options):
    network = nn.SequentialCell(nn.BatchNorm1d(2, **options), nn.Dense(2, 1))
    return network, nn.SGD(network.trainable_params(), 0.1)


def cells_of(network, optimizer):
    sums = optimizer.parameters.clone(prefix="sums", init="zeros")
    return TrainForwardBackward(nn.WithLossCell(network, nn.MSELoss()), optimizer, sums)


WAYS = {"Accumulator": lambda network, optimizer: Accumulator(optimizer, 4, network=network), "Cells": cells_of}


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_accumulating_by_hand_warns(make):
    with pytest.warns(UserWarning, match="BatchNorm layers .1, the first is"):
        make(*with_batch_norm())


@pytest.mark.parametrize("make", WAYS.values(), ids=WAYS)
def test_accumulating_frozen_statistics_by_hand_warns_of_nothing(make):
    make(*with_batch_norm(use_batch_statistics=False))  # a warning would be an error
