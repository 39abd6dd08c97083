"""Do ranks have equal untrained Parameters, and different random numbers?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_accum.network import generators
from ms_accum.network.generators import offset_seeds_by_rank, random_state, set_random_state


@pytest.fixture
def results(job):
    """The results of each rank."""
    return [rank["apart"] for rank in job[0]]


@pytest.mark.parametrize("way", ["cells", "driver", "accumulator"])
def test_frozen_parameters_are_those_of_rank_0(results, way):
    assert len({rank["backbones"][way] for rank in results}) == 1
    assert len(results[0]["backbones"][way]) == 64


def test_dropout_masks_differ_by_rank_and_are_reproducible(results):
    pairs = [rank["masks"] for rank in results]
    assert all(first == second for first, second in pairs)
    layers, numbers = zip(*(first for first, _ in pairs))
    assert all(len({str(rank) for rank in draws}) == len(results) for draws in (layers, numbers))


@pytest.mark.usefixtures("eager")
def test_seeds_of_rank_0_are_those_of_a_single_process():
    ms.manual_seed(5)
    ms.set_seed(3)
    layer = nn.Dropout(p=0.5)
    before = [dict(layer.dropout.attrs), ms.get_rng_state().asnumpy().tolist()]
    offset_seeds_by_rank([layer], 0)
    assert [dict(layer.dropout.attrs), ms.get_rng_state().asnumpy().tolist()] == before
    offset_seeds_by_rank([layer], 2)
    offset_seeds_by_rank([layer], 2)  # twice is once
    assert layer.dropout.attrs["Seed1"] - before[0]["Seed1"] == 2 << generators._LAYERS
    assert ms.initial_seed() == 5 + (2 << generators._GENERATORS)


@pytest.mark.usefixtures("eager")
def test_layers_without_a_seed_are_unchanged():
    """Zeros mean that the kernel chooses a seed."""
    layer = nn.Dropout(p=0.5)
    for name in ("Seed0", "Seed1"):
        layer.dropout.add_prim_attr(name, 0)
    offset_seeds_by_rank([layer], 1)
    assert layer.dropout.attrs["Seed1"] == 0


@pytest.mark.usefixtures("eager")
def test_random_state_of_rank_0_is_offset_by_rank():
    """The offset of the generator is kept. No operator on MindSpore's CPU uses this generator."""
    ms.set_rng_state(Tensor(np.array([5, 12], np.uint64).view(np.uint8)))
    state = random_state()
    for rank in (0, 1, 0, 1):
        ms.manual_seed(9)
        set_random_state(state)
        offset_seeds_by_rank([], rank)
        numbers = ms.get_rng_state().asnumpy().view(np.uint64).tolist()
        assert numbers == [5 + (rank << generators._GENERATORS), 12]
