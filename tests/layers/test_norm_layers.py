"""Is accumulation exact with GroupNorm in place of BatchNorm, and with frozen BatchNorm?"""

from __future__ import annotations

import warnings

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from helpers import batches, cross_entropy, forward_of, joined, run, values
from ms_accum import GradientAccumulation, batch_to_group_norm, freeze_batch_norm
from reference import miss

pytestmark = pytest.mark.usefixtures("eager")


def network_of(change):
    network = nn.SequentialCell(nn.Dense(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dense(8, 3))
    network[1].moving_mean.set_data(Tensor(np.linspace(-1, 1, 8), ms.float32))
    network[1].gamma.set_data(Tensor(np.linspace(1, 2, 8), ms.float32))
    change(network)
    return network


def difference_from_large_batch(network, rng):
    """Return by how much an uneven window's gradient differs from that of the same rows in one batch."""
    window, parameters = batches(rng, [8, 3, 5]), network.trainable_params()
    network.set_train()
    grad_fn = ms.value_and_grad(forward_of(network, cross_entropy()), None, ms.ParameterTuple(parameters))
    expected, start = values(grad_fn(*joined(window))[1]), values(parameters)
    model = GradientAccumulation(network, cross_entropy(), nn.SGD(parameters, 1.0), check="off")
    run(model, window, 3)
    return miss([a - b for a, b in zip(start, values(parameters))], expected, 1e-5, 1e-6)


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("change", [freeze_batch_norm, batch_to_group_norm])
def test_accumulation_equals_large_batch(change, rng):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert difference_from_large_batch(network_of(change), rng) <= 1


@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning")
def test_unchanged_batch_norm_differs_from_large_batch(rng):
    assert difference_from_large_batch(network_of(lambda network: None), rng) >= 100


KINDS = [(nn.BatchNorm1d, (6,)), (nn.BatchNorm1d, (6, 5)), (nn.BatchNorm2d, (6, 4, 4)), (nn.BatchNorm3d, (6, 2, 4, 4))]


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_frozen_layers_use_and_keep_running_statistics(kind, shape, rng):
    network, x = freeze_batch_norm(nn.SequentialCell(kind(6)).set_train()), Tensor(rng.randn(5, *shape), ms.float32)
    before = values(network.get_parameters())
    trained = network(x).asnumpy()
    assert np.array_equal(network.set_train(False)(x).asnumpy(), trained)
    assert all(np.array_equal(*pair) for pair in zip(before, values(network.get_parameters())))
    assert [parameter.name.rpartition(".")[2] for parameter in network.trainable_params()] == ["gamma", "beta"]


@pytest.mark.parametrize(("kind", "shape"), KINDS)
def test_group_norm_normalizes_each_row_separately(kind, shape, rng):
    network = nn.SequentialCell(kind(6)).set_train()
    gamma, beta = network.trainable_params()
    gamma.set_data(Tensor(np.arange(1, 7), ms.float32))
    assert batch_to_group_norm(network, 4) is network
    assert list(map(id, network.get_parameters())) == [id(gamma), id(beta)]
    x = rng.randn(5, *shape).astype(np.float32)
    groups = 1 if kind is nn.BatchNorm1d else 3
    rows = x.reshape(5, groups, -1)
    rows = (rows - rows.mean(2, keepdims=True)) / np.sqrt(rows.var(2, keepdims=True) + 1e-5)
    expected = rows.reshape(x.shape) * np.arange(1, 7).reshape(6, *[1] * (len(shape) - 1))
    assert miss([network(Tensor(x)).asnumpy()], [expected], 1e-5, 1e-5) <= 1


@pytest.mark.parametrize(
    ("channels", "groups", "made"), [(64, 32, 32), (48, 32, 24), (7, 32, 7), (13, 4, 1), (16, 5, 4)]
)
def test_number_of_groups_divides_channels(channels, groups, made):
    network = batch_to_group_norm(nn.SequentialCell(nn.BatchNorm2d(channels, eps=1e-3)), groups)
    assert (network[0].num_groups, network[0].eps) == (made, 1e-3)


@pytest.mark.parametrize(
    ("call", "error", "rule"),
    [
        (lambda: batch_to_group_norm(nn.BatchNorm2d(4)), TypeError, "but got BatchNorm2d. Make a GroupNorm instead."),
        (lambda: batch_to_group_norm(nn.ReLU(), 0), ValueError, "'groups' must be an int >= 1, but got 0"),
        (lambda: freeze_batch_norm(nn.SequentialCell(nn.ReLU())), ValueError, "without one. Leave out this call."),
        (lambda: freeze_batch_norm(None), TypeError, "'network' must be a Cell, but got NoneType"),
    ],
)
def test_invalid_networks_are_rejected(call, error, rule):
    with pytest.raises(error, match=rule):
        call()


def test_batch_norm_1d_of_one_channel_is_rejected_before_any_change():
    network = nn.SequentialCell(nn.BatchNorm2d(4), nn.BatchNorm1d(1))
    with pytest.raises(
        ValueError, match="must be without a BatchNorm1d of one channel, but got '1'. It would give zeros"
    ):
        batch_to_group_norm(network)
    assert isinstance(network[0], nn.BatchNorm2d)
