"""What the FAQ says about `loss.backward()`: MindSpore differentiates a loss that it has recorded.

MindSpore has no public `Tensor.backward`. `Cell.set_grad` records, and `mindspore.grad` of a function that returns the
loss differentiates it. What is not recorded has gradients of 0 without an error, so no interface is built on it.
"""

from __future__ import annotations

import mindspore as ms

from helpers import Slope, micro_batch


def recorded(change):
    """Return the gradient of a recorded loss, after this change."""
    network = Slope().set_grad()
    loss = change(network(*micro_batch(3.0)))
    (gradient,) = ms.grad(lambda: loss, None, ms.ParameterTuple(network.trainable_params()))()
    return gradient.asnumpy().tolist()


def test_what_is_computed_outside_the_cell_has_no_gradients():
    """If MindSpore raises an error here one day, an `Accumulator.backward` can be built on it."""
    assert recorded(lambda loss: loss) == [3.0] and recorded(lambda loss: loss / 2) == [0.0]
