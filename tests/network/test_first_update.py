"""Is there a warning about an optimizer that trains nothing, and none about one whose update is tiny?"""

from __future__ import annotations

import mindspore as ms
import pytest
from mindspore import mint, nn
from mindspore.experimental import optim

from helpers import Slope, micro_batch, run
from ms_accum import Accumulator, GradientAccumulation
from ms_accum.network import optimizers

pytestmark = pytest.mark.host


class Idle(nn.SGD):
    """An optimizer that does not change its parameters."""

    def construct(self, gradients):
        return gradients


def driver(make):
    network = Slope()
    return GradientAccumulation(network, None, make([network.w]))


@pytest.mark.parametrize("window", [1, 2])
def test_optimizer_that_changes_nothing_warns_once(window):
    model = driver(lambda parameters: Idle(parameters, 0.5))
    message = "'Idle' changed no parameter in an update with learning rate 0.5 and a gradient of norm 1. If this is not"
    with pytest.warns(RuntimeWarning, match=message) as seen:
        run(model, [micro_batch(1.0)] * 4 * window, window)
    assert len(seen) == 1 and seen[0].filename == run.__code__.co_filename


@pytest.mark.parametrize(
    ("rate", "gradient"), [(0.0, 1.0), (1e-30, 1.0), (0.5, 0.0)], ids=["rate 0", "tiny rate", "no gradient"]
)
def test_no_warning_if_nothing_should_change(rate, gradient):
    model = driver(lambda parameters: nn.SGD(parameters, rate))
    model._network.w.set_data(ms.Tensor([1.0], ms.float32))
    run(model, [micro_batch(gradient)] * 8, 2)
    assert model.updates == 4


def test_large_networks_are_not_checked(monkeypatch):
    monkeypatch.setattr(optimizers, "_LARGEST_CHECKED", 3)
    run(driver(lambda parameters: Idle(parameters, 0.5)), [micro_batch(1.0)] * 4, 2)


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
