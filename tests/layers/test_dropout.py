"""Does CountedDropout draw random masks by its formula, and the same ones in a resumed run?"""

from __future__ import annotations

from functools import partial

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, mint, nn, ops

import runs
from helpers import values
from ms_accum import CheckpointError, CountedDropout, replace_dropout
from ms_accum import layers as dropout
from ms_accum.layers import MaskKey
from ms_accum.network.generators import offset_seeds_by_rank
from ms_accum.saving.model_file import load_model, save_model

pytestmark = pytest.mark.usefixtures("eager")
M = 2**64
SHAPE = (8, 3, 32)


# What is drawn, in Python's integers


def mixed(x):
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> shift)) * factor % M
    return x ^ (x >> 31)


def expected_numbers(seed, layer, rank, count, rows, columns):
    step, key = 0x9E3779B97F4A7C15, 0
    for part in (seed, layer, rank):
        key = mixed((key + part * step) % M)
    drawn = []
    for row in range(1, rows + 1):
        x = (mixed((mixed(key) + row * step) % M) + count * step) % M
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 % M
        x = x ^ (x >> 27)
        drawn.append([x * (mixed((mixed(key + 1) + column * step) % M) | 1) % M for column in range(1, columns + 1)])
    return np.array(drawn, np.uint64)


class Numbers(nn.Cell):
    def __init__(self, mask_key):
        super().__init__()
        self.mask_key = mask_key

    def construct(self, count):
        return dropout.numbers(self.mask_key, count, SHAPE)


@pytest.mark.usefixtures("each_mode")
def test_numbers_follow_formula():
    found = Numbers(MaskKey(7, 2, 1))(Tensor(-3, ms.int32)).asnumpy()
    assert np.array_equal(found.reshape(24, 32), expected_numbers(7, 2, 1, -3 % M, 24, 32))
    # A state of today must resume in any later version.
    assert found[0, 0, :2].tolist() == [1685089215648427193, 457778867325695673]


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropped_fraction_and_scale(p):
    made = CountedDropout(p, seed=3).set_train()(ops.ones((256, 512), ms.float32)).asnumpy()
    assert np.unique(made).tolist() == [0.0, np.float32(1 / (1 - p))]
    dropped = (made == 0).mean()
    assert abs(dropped - p) < 4.5 * np.sqrt(p * (1 - p) / made.size)


# The layer


@pytest.mark.parametrize(("p", "training"), [(0.5, False), (0.0, True)])
def test_input_is_returned_in_evaluation_or_with_p_0(p, training):
    layer, x = CountedDropout(p).set_train(training), Tensor(np.ones(4), ms.float32)
    assert layer(x) is x
    assert layer.dropout_counter.asnumpy() == 0


@pytest.mark.parametrize(
    ("arguments", "error", "rule"),
    [
        ({"p": 1}, ValueError, "'p' must be a number >= 0 and < 1, but got 1"),
        ({"p": "0.5"}, TypeError, "'p' must be a number"),
        ({"seed": -1}, ValueError, "'seed' must be an int >= 0"),
        ({"layer": 2**31}, ValueError, "'layer' must be an int >= 0"),
    ],
)
def test_invalid_arguments_are_rejected(arguments, error, rule):
    with pytest.raises(error, match=rule):
        CountedDropout(**arguments)


class Drop(nn.Cell):
    """The sum of w * (dropout(x) + dropout(x)): the gradient is the sum of two masks, over the share that is kept."""

    def __init__(self, layer, size=64):
        super().__init__()
        self.w = Parameter(Tensor(np.zeros((2, size)), ms.float32), name="w")
        self.first = self.second = layer
        self.set_train()

    def construct(self, x):
        return ops.reduce_sum((self.first(x) + self.second(x)) * self.w)


ONES = Tensor(np.ones((2, 64)), ms.float32)


def masks(counts):
    """What a layer of seed 3 draws, computed without it."""
    return [2.0 * (expected_numbers(3, 0, 0, count, 2, 64) >= np.uint64(M // 2)) for count in counts]


@pytest.mark.usefixtures("graph_mode")
def test_gradient_uses_masks_of_forward_for_shared_layer():
    network = Drop(CountedDropout(0.5, seed=3))
    step = ms.value_and_grad(network, 0, ms.ParameterTuple([network.w]))
    ops.assign(network.w, ONES)
    for call in range(2):
        loss, (to_x, to_w) = step(ONES)
        expected = np.sum(masks([2 * call + 1, 2 * call + 2]), 0)
        assert np.array_equal(to_w[0].asnumpy(), expected) and np.array_equal(to_x.asnumpy(), expected)
        assert loss.asnumpy() == expected.sum()
    assert network.first.dropout_counter.asnumpy() == 4


# Replacing


class Block(nn.Cell):
    def __init__(self, shared):
        super().__init__()
        self.dense, self.shared, self.again = nn.Dense(4, 4), shared, shared
        self.listed = nn.CellList([nn.Dropout(keep_prob=0.75), nn.SequentialCell(nn.ReLU(), mint.nn.Dropout(p=0.1))])

    def construct(self, x):
        x = self.again(self.shared(self.dense(x)))
        for layer in self.listed:
            x = layer(x)
        return x


def network_with_many():
    return nn.SequentialCell(nn.Dropout(p=0.5), Block(nn.Dropout(p=0.2)), nn.SequentialCell(nn.Dropout(p=0.0)))


def test_all_layers_are_replaced_in_place_and_numbered():
    network = network_with_many().set_train()
    before = [parameter.name for parameter in network.get_parameters()]
    assert replace_dropout(network, seed=9) is network
    found = {name: cell for name, cell in network.cells_and_names() if isinstance(cell, CountedDropout)}
    assert {name: (cell.p, cell.layer, cell.seed) for name, cell in found.items()} == {
        "0": (0.5, 0, 9),
        "1.shared": (0.2, 1, 9),
        "1.listed.0": (0.25, 2, 9),
        "1.listed.1.1": (0.1, 3, 9),
        "2.0": (0.0, 4, 9),
    }
    assert network[1].again is network[1].shared
    assert all(cell.training for cell in found.values())
    names = [parameter.name for parameter in network.get_parameters()]
    assert sorted(names) == sorted([*before, *(f"{name}.dropout_counter" for name in found)])
    assert not any(parameter.requires_grad for parameter in network.get_parameters() if "counter" in parameter.name)
    network(Tensor(np.ones((2, 4)), ms.float32))
    assert [int(cell.dropout_counter.asnumpy()) for cell in found.values()] == [1, 2, 1, 1, 0]


@pytest.mark.parametrize(
    ("network", "error", "rule"),
    [
        (lambda: nn.Dropout(p=0.5), TypeError, r"but got Dropout\. Make a CountedDropout instead\."),
        (
            lambda: nn.SequentialCell(nn.ReLU()),
            ValueError,
            r"but got SequentialCell without one\. Leave out this call\.",
        ),
        (lambda: replace_dropout(network_with_many()), ValueError, "that are not yet replaced"),
    ],
)
def test_networks_without_replaceable_layers_are_rejected(network, error, rule):
    with pytest.raises(error, match=f"For 'replace_dropout', .*{rule}"):
        replace_dropout(network())


@pytest.mark.usefixtures("graph_mode")
def test_compiled_network_is_recompiled():
    network, ones = nn.SequentialCell(nn.Dropout(p=0.5)).set_train(), Tensor(np.ones((2, 64)), ms.float32)
    network(ones)
    replace_dropout(network, seed=3)
    assert np.array_equal(network(ones).asnumpy(), masks([1])[0])


@pytest.mark.usefixtures("each_mode")
def test_each_rank_draws_different_masks():
    made = []
    for ranks in ((0,), (2,), (2, 2), (1, 2)):
        network = replace_dropout(nn.SequentialCell(nn.Dropout(p=0.5)), seed=3).set_train()
        for rank in ranks:
            offset_seeds_by_rank([network], rank)
        made.append(network(ONES).asnumpy())
        assert [parameter.name for parameter in network.get_parameters()] == ["0.dropout_counter"]
    assert np.array_equal(made[0], masks([1])[0])
    assert not np.array_equal(made[0], made[1])
    assert np.array_equal(made[1], made[2]) and np.array_equal(made[1], made[3])


# Resuming, and loading


def network_of(change):
    ms.set_seed(1)
    network = nn.SequentialCell(nn.Flatten(), nn.Dense(6, 32), nn.Dropout(p=0.5), nn.Dense(32, 10))
    return change(network)


def test_resumed_run_draws_same_masks(tmp_path):
    make = partial(runs.Run, make_network=lambda features: network_of(replace_dropout))
    found = runs.stopped_and_resumed(tmp_path, [12], make, runs.even, 3)  # in the second window
    runs.check_same(found, make().train(runs.even(), 3).left)


def test_loading_model_with_other_kind_of_dropout_explains_error(tmp_path):
    plain, counted = network_of(lambda network: network), network_of(replace_dropout)
    save_model(plain, tmp_path / "plain.ckpt")
    save_model(counted, tmp_path / "counted.ckpt")
    with pytest.raises(CheckpointError, match=r"missing 2\.dropout_counter.*Load it before replace_dropout"):
        load_model(counted, tmp_path / "plain.ckpt")
    with pytest.raises(CheckpointError, match=r"unexpected 2\.dropout_counter.*Call replace_dropout"):
        load_model(plain, tmp_path / "counted.ckpt")
    load_model(network_of(replace_dropout), tmp_path / "counted.ckpt")
    network = network_of(lambda network: network)
    load_model(network, tmp_path / "plain.ckpt")
    replace_dropout(network)
    assert all(
        np.array_equal(*pair) for pair in zip(values(network.trainable_params()), values(plain.get_parameters()))
    )
