"""Optimizers of `mint` that MindSpore does not run in PyNative mode are rejected."""

import pytest
from mindspore import mint
from mindspore.experimental import optim

from helpers import Slope, micro_batch, run
from ms_accum import Accumulator, GradientAccumulation

pytestmark = pytest.mark.host


def driver(make):
    network = Slope()
    return GradientAccumulation(network, None, make([network.w]))


@pytest.mark.parametrize("make", [mint.optim.SGD, mint.optim.Adam])
def test_mint_optimizers_in_pynative_mode_are_rejected(make):
    """The reason: without the check they count updates and leave the weights as they are."""
    for build in (lambda: driver(lambda p: make(p, 0.5)), lambda: Accumulator(make([Slope().w], 0.5), 2)):
        with pytest.raises(ValueError, match=f"one that trains, but got mint.optim.{make.__name__} in PyNative mode"):
            build()


@pytest.mark.parametrize("make", [optim.SGD, optim.Adam])
def test_recommended_optimizers_train(make):
    model = driver(lambda parameters: make(parameters, 0.5))
    run(model, [micro_batch(1.0)] * 2, 2)
    assert model._network.w.asnumpy()[0] == pytest.approx(-0.5)
