"""Does a trial restore the network and the loss?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from helpers import run
from ms_accum import GradientAccumulation, verify
from ms_accum.network import restoring

pytestmark = pytest.mark.host


class Counts(nn.Cell):
    """Counts its calls in Python and in a Parameter, and returns its input."""

    def __init__(self):
        super().__init__()
        self.number = 0
        self.calls = Parameter(Tensor(0, ms.int32), name="calls", requires_grad=False)

    def count(self, x):
        self.number += 1
        return ops.depend(x, ops.assign_add(self.calls, Tensor(1, ms.int32)))

    def construct(self, x):
        return self.count(x)

    @property
    def both(self):
        return self.number, int(self.calls.asnumpy())


class CountingLoss(Counts):
    def construct(self, output, label):
        return ops.mean(ops.square(self.count(output) - label))


def rows(count):
    random = np.random.RandomState(1)
    return Tensor(random.randn(count, 4).astype(np.float32)), Tensor(random.randn(count, 2).astype(np.float32))


def counting():
    return nn.SequentialCell(Counts(), nn.Dense(4, 2)), CountingLoss()


def trained(check):
    """Return how often a driver calls the network and the loss for two micro-batches."""
    network, loss_fn = counting()
    model = GradientAccumulation(network, loss_fn, nn.SGD(network.trainable_params(), 0.1), check=check, weight=1.0)
    run(model, [rows(4), rows(4)], 2)
    return network[0].both, loss_fn.both


def test_first_check_is_undone():
    """The check of the first one runs it more often, and restores what that changes."""
    assert trained("first") == trained("off") == ((2, 2), (2, 2))


@pytest.mark.parametrize("broken", ["restore", "number_attributes"])
def test_missing_restore_is_detected(broken, monkeypatch):
    """The mutants."""
    monkeypatch.setattr(restoring, broken, lambda values: [])
    assert trained("first") != trained("off")


def test_verify_leaves_counters_unchanged():
    network, loss_fn = counting()
    assert verify(network, loss_fn, rows(8), 2).ok
    assert (network[0].both, loss_fn.both) == ((0, 0), (0, 0))
