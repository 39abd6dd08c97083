"""Parameters that get their values late (`no_init_parameters`) train as others do."""

from __future__ import annotations

from contextlib import nullcontext

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.nn.utils import no_init_parameters

from ms_accum import Accumulator, Ema, GradientAccumulation, TrainClear, TrainForwardBackward, TrainOptim
from ms_accum.network.parameters import set_initial_values
from reference import miss

RATE, DECAY = 0.1, 0.5
LOSS = nn.MSELoss()


def by_driver(network, optimizer, ema, rows):
    model = GradientAccumulation(network, LOSS, optimizer, ema=ema, check="off")
    return lambda: model.train_process(1, rows, 2, report=(), ckpt_path=None)


def by_accumulator(network, optimizer, ema, rows):
    accumulator = Accumulator(optimizer, 2, reduction="mean", ema=ema)

    def forward(x, y):
        return LOSS(network(x), y)

    grad_fn = ms.value_and_grad(forward, None, optimizer.parameters)

    @ms.jit
    def step(x, y):
        loss, grads = grad_fn(x, y)
        return ops.depend(loss, accumulator(grads, x.shape[0]))

    return lambda: [step(*columns) for columns in rows]


def by_cells(network, optimizer, ema, rows):
    sums = optimizer.parameters.clone(prefix="sums", init="zeros")
    weights = Parameter(Tensor(0.0), name="weights", requires_grad=False)
    add = TrainForwardBackward(nn.WithLossCell(network, LOSS), optimizer, sums, weight_sum=weights)
    update, clear = TrainOptim(optimizer, sums, weight_sum=weights, ema=ema), TrainClear(sums, weight_sum=weights)

    def run():
        for number, columns in enumerate(rows, start=1):
            add(*columns)
            if number % 2 == 0:
                update()
                clear()

    return run


def train(make, rows, weight, bias, *, late):
    """Return the weights, the moments and the averages of a network whose weights are loaded after all is made."""
    ema = Ema(DECAY)
    with no_init_parameters() if "network" in late else nullcontext():
        network = nn.Dense(3, 1)
    with no_init_parameters() if "optimizer" in late else nullcontext():
        optimizer = nn.Momentum(network.trainable_params(), RATE, 0.9)
        run = make(network, optimizer, ema, rows)
    ms.load_param_into_net(network, {"weight": Parameter(Tensor(weight)), "bias": Parameter(Tensor(bias))})
    run()
    assert int(optimizer.global_step.asnumpy()[0]) == 2
    return [array.asnumpy() for array in (*optimizer.parameters, *optimizer.moments, *ema.averages)]


@pytest.mark.parametrize("late", ["network", "network, optimizer"])
@pytest.mark.parametrize("make", [by_driver, by_accumulator, by_cells])
def test_late_values_train_like_others(make, late, rng):
    rows = [(Tensor(rng.randn(4, 3), ms.float32), Tensor(rng.randn(4, 1), ms.float32)) for _ in range(4)]
    weight, bias = rng.randn(1, 3).astype(np.float32), rng.randn(1).astype(np.float32)
    found, expected = (train(make, rows, weight, bias, late=when) for when in (late, ""))
    assert miss(found, expected, 1e-6) <= 1 and miss([weight], [expected[0]], 1e-5) >= 100


@pytest.mark.host
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
