"""Does an optimizer with a sharded state train like the unsharded one?"""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim

import ranks as program
from helpers import cross_entropy
from ms_accum import Group, ZeroOptimizer
from ms_accum.ranks.reduction import Part
from ms_accum.training.loop import trained_parameters
from reference import miss


def check_same(state, expected):
    """Check for equal values up to rounding: kernels process the elements of a part in other groups."""
    assert sorted(state) == sorted(expected)
    arrays = [[np.array(values[name], np.float32) for name in sorted(values)] for values in (state, expected)]
    assert miss(*arrays, rtol=1e-6, atol=1e-7) <= 1


def test_sharded_optimizer_trains_like_the_unsharded(at_end):
    results = [rank["zero"] for rank in at_end[0]]
    for result in results:
        check_same(result["sharded"], results[0]["plain"])
        assert result["sharded"] == results[0]["sharded"]


def test_each_rank_stores_its_part(at_end):
    ranks = len(at_end[0])
    full_sizes = [30, 5, 50, 10]
    for rank in at_end[0]:
        assert rank["zero"]["kept"] == [-(-full_size // ranks) for full_size in full_sizes]


def test_states_can_be_exchanged_with_the_unsharded_optimizer(at_end):
    result = at_end[0][0]["zero"]
    check_same(result["resumed"], result["plain"])
    check_same(result["more"][1], result["more"][0])


# In one process


@pytest.mark.parametrize("ranks", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1, 2, 6, 7])
def test_parts_have_equal_sizes_and_are_complete(ranks, size):
    array = np.arange(1, size + 1, dtype=np.float32)
    parts = [Part(Parameter(Tensor(array)), rank, ranks) for rank in range(ranks)]
    arrays = [part.extract(array) for part in parts]
    part_size = parts[0].size
    assert {len(part) for part in arrays} == {part_size} and part_size - 1 < size / ranks <= part_size
    assert np.concatenate(arrays).tolist() == [*array, *[0] * (ranks * part_size - size)]


def trained(make):
    network = program.network_of()
    optimizer = make(network)
    model = program.GradientAccumulation(network, cross_entropy(), optimizer, clip_norm=0.5)
    program.train(model, program.all_data([8] * 6), 3)
    return {name: parameter.asnumpy().tolist() for name, parameter in trained_parameters(network, optimizer).items()}


def groups(parameters):
    """Return groups whose order differs from the network's."""
    biases = [parameter for parameter in parameters if "bias" in parameter.name]
    weights = [parameter for parameter in parameters if "weight" in parameter.name]
    return [{"params": biases, "lr": 0.1}, {"params": weights, "weight_decay": 0.2}]


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: nn.Momentum(groups(parameters), 0.05, 0.9),
        lambda parameters: nn.AdamWeightDecay(parameters, nn.ExponentialDecayLR(0.01, 0.9, 1), weight_decay=0.1),
        lambda parameters: nn.SGD(parameters, 0.05, momentum=0.9, loss_scale=1024.0),
    ],
    ids=["groups", "schedule", "scale"],
)
def test_single_process_trains_like_the_optimizer(make):
    plain = trained(lambda network: make(network.trainable_params()))
    check_same(trained(lambda network: ZeroOptimizer(make, network.trainable_params())), plain)


def test_without_a_group_the_state_is_complete(monkeypatch):
    """Also in a process that a launcher started."""
    monkeypatch.setattr("ms_accum.ranks.group.own_group", lambda: Group(0, 2))
    network = program.network_of()
    optimizer = ZeroOptimizer(lambda parts: nn.Adam(parts, 0.1), network.trainable_params(), group=None)
    assert trained_parameters(network, optimizer)["optimizer.moment1.1.weight"].asnumpy().shape == (5, 6)


def test_moments_belong_to_the_longest_matching_name():
    parameters = [Parameter(Tensor(np.zeros(4, np.float32)), name=name) for name in ("weight", "a.weight")]
    optimizer = ZeroOptimizer(lambda parts: nn.Momentum(parts, 0.1, 0.9), parameters, group=Group(0, 2))
    state = optimizer.complete_state()
    assert sorted(name for name in state if "weight" in name) == [
        "a.weight",
        "moments.a.weight",
        "moments.weight",
        "weight",
    ]
    assert state["moments.a.weight"]._part is optimizer.parts[1]


@pytest.mark.usefixtures("eager")
def test_parameter_groups():
    plain = trained(lambda network: nn.Momentum(groups(network.trainable_params()), 0.05, 0.9))
    sharded = trained(
        lambda network: ZeroOptimizer(lambda parts: nn.Momentum(parts, 0.05, 0.9), groups(network.trainable_params()))
    )
    check_same(sharded, plain)


@pytest.mark.parametrize(
    "make",
    [
        lambda parts: nn.AdaFactor(parts),
        lambda parts: optim.SGD(parts, 0.1),
        lambda parts: nn.SGD([{"params": parts, "grad_centralization": True}], 0.1),
    ],
)
def test_optimizers_that_are_not_elementwise_are_rejected(make):
    with pytest.raises(ValueError, match="'make' must be an optimizer that updates each element independently"):
        ZeroOptimizer(make, program.network_of().trainable_params())


def test_make_must_be_a_function():
    with pytest.raises(TypeError, match="'make' must be a function from parts to an optimizer"):
        ZeroOptimizer(nn.Dense(2, 2).trainable_params(), nn.Adam)
