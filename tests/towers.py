"""Networks and losses for tests of losses that couple the rows of a batch."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops

import reference
from ms_accum import GradientAccumulation

ROWS = (4, 4, 3)


class Tower(nn.Cell):
    def __init__(self, features=6):
        super().__init__()
        self.layers = nn.SequentialCell(nn.Dense(features, 8), nn.Tanh(), nn.Dense(8, 4))

    def construct(self, x):
        x = self.layers(x)
        return x / ops.sqrt(ops.sum(x * x, -1, keepdim=True))


class Towers(nn.Cell):
    """Two towers, one for each column."""

    def __init__(self):
        super().__init__()
        self.one, self.other = Tower(6), Tower(5)

    def construct(self, x, y):
        return self.one(x), self.other(y)


def info_nce(first, second):
    scores = ops.matmul(first, ops.transpose(second, (1, 0))) * 5.0
    return ops.cross_entropy(scores, ops.arange(first.shape[0]))


class Tempered(nn.Cell):
    """InfoNCE whose temperature is trained."""

    def __init__(self):
        super().__init__()
        self.temperature = Parameter(Tensor(2.0, ms.float32), name="temperature")

    def construct(self, first, second):
        return info_nce(first * self.temperature, second)


class Whole(nn.Cell):
    """The loss of a batch, as a network that returns its loss: the big batch, and plain accumulation."""

    def __init__(self, network, loss_fn, columns=2):
        super().__init__(auto_prefix=False)
        self.network, self.loss_fn, self.columns = network, loss_fn, columns

    def construct(self, *columns):
        output = self.network(*columns[: self.columns])
        output = output if isinstance(output, tuple) else (output,)
        return self.loss_fn(*output, *columns[self.columns :])


def pairs(rng, rows=ROWS):
    return [tuple(Tensor(rng.randn(count, size).astype(np.float32)) for size in (6, 5)) for count in rows]


def gradients_and_loss(network, loss_fn, data, mini_steps, trained, **options):
    """Return the gradient that the optimizer saw in one window, and the loss that was shown."""
    shown = []
    start = [parameter.asnumpy().copy() for parameter in trained]

    class Keep(ms.train.Callback):
        def on_train_step_end(self, run_context):
            shown.append(run_context.original_args().record)

    model = GradientAccumulation(network, loss_fn, nn.SGD(trained, 1.0), **options)
    model.train_process(1, data, mini_steps, report=Keep(), ckpt_path=None)
    gradients = [before - parameter.asnumpy() for before, parameter in zip(start, trained)]
    for parameter, before in zip(trained, start):
        ops.assign(parameter, Tensor(before))
    (record,) = shown
    assert record.samples == sum(columns[0].shape[0] for columns in data)
    return gradients, record.loss


def miss(actual, expected):
    """Return the largest difference in units of the tolerance."""
    return reference.miss(actual, expected, rtol=1e-5, atol=1e-6)
