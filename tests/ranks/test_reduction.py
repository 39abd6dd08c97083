"""Are sums over the ranks the same for each way to compute them?"""

from __future__ import annotations

import math

import numpy as np
import pytest
from mindspore import nn

import ranks as program
from helpers import has_stage
from ms_accum import Accumulator, GradientAccumulation, Group, TrainForwardBackward, TrainOptim, ZeroOptimizer
from ms_accum.ranks.reduction import SumOverRanks
from reference import miss

KINDS = ("plain", "in step", "zero 1", "zero 2")


def same(ranks, *keys):
    """Return the result of rank 0, after checking that all ranks have the same state."""
    results = []
    for rank in ranks:
        for key in keys:
            rank = rank[key]
        results.append(rank)
    assert all(result["state"] == results[0]["state"] for result in results)
    return results[0]


def check_close(state, expected, rtol=1e-6, atol=1e-7):
    assert sorted(state) == sorted(expected)
    arrays = [[np.array(values[name], np.float32) for name in sorted(values)] for values in (state, expected)]
    assert miss(*arrays, rtol=rtol, atol=atol) <= 1


def test_collectives_are_ordered(in_step):
    """Two collectives without an order could be sent in different orders by two ranks."""
    assert [rank["graphs"]["unordered"] for rank in in_step] == [[0, 0]] * len(in_step)


def test_all_ranks_skip_an_overflow_in_one_part(in_step):
    """The sums of one rank's part exceed float16. If ranks checked their own parts only, they would wait forever."""
    for rank in in_step:
        for kind in KINDS:
            overflows, fits = rank["narrow"][kind]
            assert overflows == [0, 2, [0.0] * 4] and fits == [2, 2, fits[2]]
            assert fits[2] == rank["narrow"]["plain"][1][2] != [0.0] * 4


def test_collectives_of_each_graph(in_step):
    """Collectives of a micro-batch, an update and a clear, outside of branches. The norm of parts needs one, too."""
    gradients, figures, norm = 1, 1, 1
    for rank in in_step:
        assert rank["graphs"]["operators"] == [{"AllReduce": gradients}, {"AllReduce": figures + norm}, {}]


def test_accumulators_contain_the_sums_of_parts(in_step):
    ranks = len(in_step)
    results = [rank["graphs"] for rank in in_step]
    assert all(result["updated"] for result in results) and len({result["after"] for result in results}) == 1
    assert len({result["held"] for result in results}) == ranks  # each rank's own sums
    assert [result["elements"] for result in results] == [sum(-(-size // ranks) for size in (30, 5, 50, 10))] * ranks


def test_micro_batches_of_weight_0_take_part(in_step):
    at_the_end, each_time = (same([rank["passed over"] for rank in in_step], number) for number in (0, 1))
    assert all(math.isfinite(record[3]) for record in each_time["records"])
    check_close(each_time["state"], at_the_end["state"])
    assert each_time["state"] != same(in_step, "plain")["state"]


def test_all_ranks_begin_with_the_parameters_of_rank_0(in_step):
    digests = [rank["sent"] for rank in in_step]
    assert all(digest == digests[0] for digest in digests) and len(digests[0]) == 4


def test_reduce_scatter_gives_the_same_sums(in_step):
    assert same(in_step, "scattered") == same(in_step, "zero 2")


# In one process


def test_zero_optimizer_with_another_group_is_rejected():
    network = program.network_of()
    optimizer = ZeroOptimizer(lambda parts: nn.SGD(parts, 0.1), network.trainable_params(), group=Group(0, 2))
    makers = (
        lambda: GradientAccumulation(network, nn.CrossEntropyLoss(), optimizer, group=None),
        lambda: Accumulator(optimizer, 2, group=None),
        lambda: TrainOptim(optimizer, optimizer.parameters.clone("sum", "zeros"), group=None),
    )
    for make in makers:
        with pytest.raises(ValueError, match="'group' must be that of the ZeroOptimizer"):
            make()


def test_sync_every_micro_batch_must_be_a_bool():
    optimizer = nn.SGD(program.network_of().trainable_params(), 0.1)
    with pytest.raises(TypeError, match="'sync_every_micro_batch' must be a bool"):
        Accumulator(optimizer, 2, sync_every_micro_batch=1)


def test_accumulators_of_the_wrong_shapes_are_rejected():
    network = program.network_of()
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    sharded = ZeroOptimizer(lambda own: nn.SGD(own, 0.1), network.trainable_params(), group=Group(0, 2))
    grad_sum = sharded.inner.parameters.clone(prefix="grad_sum", init="zeros")
    with pytest.raises(ValueError, match="'grad_sum' must have the shapes .* Make them of 'optimizer.parameters'."):
        TrainForwardBackward(network, optimizer, grad_sum)


def test_group_of_one_is_a_single_process():
    optimizer = nn.SGD(program.network_of().trainable_params(), 0.1)
    update = TrainOptim(optimizer, optimizer.parameters.clone("sum", "zeros"), group=Group(0, 1))
    assert not has_stage(SumOverRanks, update.window.boundary)
