"""What the FAQ says about `loss.backward()`: MindSpore differentiates a loss that it has recorded.

MindSpore has no public `Tensor.backward`. `Cell.set_grad` records, and `mindspore.grad` of a function that returns the
loss differentiates it. What is not recorded has gradients of 0 without an error, so no interface is built on it.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_accum import Accumulator

SIZES = (5, 4, 3, 2, 4)  # windows of 2, and a tail


def trained(gradients_of, weigh=lambda rows: rows):
    """Return the parameters after windows of micro-batches whose gradients come from a function."""
    random = np.random.RandomState(0)
    network = nn.SequentialCell(nn.Dense(6, 5), nn.ReLU(), nn.Dense(5, 2))
    for parameter in network.get_parameters():
        parameter.set_data(Tensor(random.randn(*parameter.shape).astype(np.float32)))
    momentum = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    accumulator = Accumulator(momentum, 2, reduction="mean", clip_norm=0.5)
    gradients = gradients_of(nn.WithLossCell(network, nn.CrossEntropyLoss()), momentum.parameters)
    for rows in SIZES:
        x, y = random.randn(rows, 6).astype(np.float32), random.randint(0, 2, rows).astype(np.int32)
        accumulator(gradients(Tensor(x), Tensor(y)), weigh(rows))
    accumulator.flush()
    assert (accumulator.updates, accumulator.skipped) == (3, 0)
    return np.concatenate([parameter.asnumpy().ravel() for parameter in network.get_parameters()])


def differentiated(cell, weights):
    grad_fn = ms.value_and_grad(lambda x, y: cell(x, y), None, weights)
    return lambda x, y: grad_fn(x, y)[1]


def recorded(cell, weights, seen=lambda loss: loss):
    cell.set_grad()

    def gradients(x, y):
        loss = seen(cell(x, y))
        return ms.grad(lambda: loss, None, weights)()

    return gradients


def test_recorded_loss_trains_as_value_and_grad():
    np.testing.assert_array_equal(trained(recorded), trained(differentiated))


def test_what_is_computed_outside_the_cell_has_no_gradients():
    """If MindSpore raises an error here one day, an `Accumulator.backward` can be built on it."""

    def halved(cell, weights):
        gradients = recorded(cell, weights, lambda loss: loss / 2)

        def zeros(x, y):
            grads = gradients(x, y)
            assert not any(grad.asnumpy().any() for grad in grads)
            return grads

        return zeros

    with pytest.warns(RuntimeWarning, match="all gradients of the window are 0"):
        trained(halved)
