"""Parameters that get their values late (`no_init_parameters`) train as others do."""

from __future__ import annotations

from contextlib import nullcontext

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters

from ms_accum import Ema
from ms_accum.network.parameters import set_initial_values
from reference import miss
from ways import Trained


class Squares(nn.Cell):
    """The mean square of a layer's output."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 1)

    def construct(self, x):
        return ops.mean(ops.square(self.dense(x)))


def train(way, rows, weight, bias, *, late):
    """Return the weights, the moments and the averages of a network whose weights are loaded after all is made."""
    ema = Ema(0.5)
    with no_init_parameters() if "network" in late else nullcontext():
        network = Squares()
    with no_init_parameters() if "optimizer" in late else nullcontext():
        trained = Trained(way, network, make=lambda parameters: nn.Momentum(parameters, 0.1, 0.9), ema=ema)
    loaded = {"dense.weight": Parameter(Tensor(weight)), "dense.bias": Parameter(Tensor(bias))}
    assert ms.load_param_into_net(network, loaded) == ([], [])
    assert trained.train(rows).updates == 2
    optimizer = trained.optimizer
    return [array.asnumpy() for array in (*optimizer.parameters, *optimizer.moments, *ema.averages)]


@pytest.mark.parametrize("late", ["network", "network, optimizer"])
@pytest.mark.parametrize("way", ["driver", "accumulator", "cells"])
def test_late_values_train_like_others(way, late, rng):
    rows = [(Tensor(rng.randn(4, 3), ms.float32),) for _ in range(4)]
    weight, bias = rng.randn(1, 3).astype(np.float32), rng.randn(1).astype(np.float32)
    found, expected = (train(way, rows, weight, bias, late=when) for when in (late, ""))
    assert miss(found, expected, 1e-6) <= 1 and miss([weight], [expected[0]], 1e-5) >= 100


@pytest.mark.usefixtures("eager")
def test_weight_whose_copy_took_its_values_gets_values_of_its_own():
    """MindSpore raises an error for it: a copy made outside the block has the values, and the weight none."""
    with no_init_parameters():
        weight = nn.Dense(3, 1).weight
    moment = weight.clone()
    set_initial_values([weight, moment])
    values = weight.asnumpy().copy()
    assert np.isfinite(values).all() and values.any()
    ops.assign_add(moment, Tensor(np.ones((1, 3)), ms.float32))
    assert (weight.asnumpy() == values).all()


class Held(nn.Cell):
    """A network with a factor that no Cell has as its own."""

    def __init__(self):
        super().__init__()
        self.dense = nn.Dense(3, 1, weight_init="ones", has_bias=False)
        self.held = {"factor": Parameter(Tensor(1.0, ms.float32), name="factor", requires_grad=False)}

    def construct(self, x):
        return ops.mean(self.dense(x)) * self.held["factor"]


@pytest.mark.parametrize("way", ["driver", "step", "accumulator", "cells"])
def test_values_that_are_set_later_are_used(way):
    """Also of Parameters in lists and dicts: a graph would keep the storage of its first run."""
    network = Held()
    trained = Trained(way, network, lr=0.5)
    for factor in (1.0, 2.0, 3.0):
        network.held["factor"].set_data(Tensor(factor, ms.float32))
        trained.train([(Tensor(np.ones((2, 3)), ms.float32),)] * 2)
    assert network.dense.weight.asnumpy().tolist() == [[1 - 0.5 * 6.0] * 3]
