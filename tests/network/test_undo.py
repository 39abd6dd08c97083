"""Is what forwards change put back, and is nothing read that they can't change?"""

from __future__ import annotations

from types import SimpleNamespace

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from ms_accum.network import undo
from ms_accum.network.undo import Undo

pytestmark = pytest.mark.usefixtures("eager")


class Queue(nn.Cell):
    """A network with a buffer that its forward may change, beside a frozen layer of MindSpore's."""

    def __init__(self, size):
        super().__init__()
        self.buffer = Parameter(Tensor(np.zeros(size), ms.float32), name="buffer", requires_grad=False)
        self.frozen = nn.Dense(4, size, weight_init="zeros")
        self.head = nn.Dense(2, 2)
        for parameter in self.frozen.get_parameters():
            parameter.requires_grad = False

    def advance(self):
        ops.assign(self.buffer, self.buffer + 1)

    @property
    def first(self):
        return float(self.buffer.asnumpy()[0])


def undo_of(network, *, runs_again=False):
    return Undo(network, network.trainable_params(), runs_again=runs_again)


@pytest.fixture(params=[False, True], ids=["small", "large"])
def is_large(request, monkeypatch):
    monkeypatch.setattr(undo, "_LARGE", 8 if request.param else 2**20)
    return request.param


def test_what_a_forward_changes_is_put_back(is_large):
    network = Queue(16)
    changes = undo_of(network)
    changes.begin()
    network.advance()
    changes.learn()
    for _ in range(2):
        changes.begin()
        network.advance()
        assert changes.undo() and network.first == 1.0


def test_large_change_of_the_first_window_is_told(is_large):
    """It has no copy: only that it has changed is known."""
    network = Queue(16)
    changes = undo_of(network)
    changes.begin()
    network.advance()
    assert changes.is_sure != is_large
    assert changes.undo() != is_large and network.first == float(is_large)
    changes = undo_of(network)
    changes.begin()
    assert changes.undo()


def test_what_runs_again_has_a_copy_of_all(is_large):
    network = Queue(16)
    changes = undo_of(network, runs_again=True)
    changes.begin()
    network.advance()
    assert changes.is_sure and changes.undo() and network.first == 0.0


def test_another_mode_of_a_layer_is_another_beginning():
    network = nn.SequentialCell(nn.BatchNorm1d(2), nn.Dense(2, 2))
    changes, statistics = undo_of(network), network[0].moving_mean
    changes.begin()
    changes.learn()  # nothing
    network[0].set_train()
    changes.begin()
    ops.assign(statistics, statistics + 1)
    assert changes.undo() and not statistics.asnumpy().any()


def test_large_parameters_of_layers_are_not_read(is_large, monkeypatch):
    read, digest = [], undo._digest
    monkeypatch.setattr(undo, "_digest", lambda parameter: read.append(parameter.name) or digest(parameter))
    network = Queue(16)
    undo_of(network).begin()
    assert read == (["buffer"] if is_large else [])


class Observer(nn.Cell):
    """Remembers the largest value, which may change in any window."""

    def __init__(self):
        super().__init__()
        self.head = nn.Dense(1, 1)
        self.top = Parameter(Tensor(3.0, ms.float32), name="top", requires_grad=False)

    def construct(self, x):
        return self.head(x / ops.assign(self.top, ops.maximum(self.top, ops.max(ops.abs(x))[0])))


def test_own_parameter_that_changes_later_is_put_back():
    network = Observer()
    changes = undo_of(network)
    for value in (1.0, 9.0):
        changes.begin()
        network(Tensor([[value]], ms.float32))
        if value == 1.0:
            changes.learn()
    assert float(network.top.asnumpy()) == 9.0 and changes.undo() and float(network.top.asnumpy()) == 3.0


def test_state_outside_of_cells_is_put_back():
    """In what a function uses, in an object, and in a list of a Cell's; an optimizer is no part of a network."""
    counts = [Parameter(Tensor(0.0, ms.float32), name=f"count{number}") for number in range(4)]
    network = Observer()
    network.more = {"own": counts[0]}
    network.helper = SimpleNamespace(count=counts[1])
    used = counts[2]
    network.function = lambda: used
    optimizer = nn.SGD([counts[3]], 0.1)
    network.other = lambda: optimizer
    changes = undo_of(network)
    changes.begin()
    for count in counts:
        ops.assign(count, Tensor(1.0, ms.float32))
    changes.undo()
    assert [float(count.asnumpy()) for count in counts] == [0.0, 0.0, 0.0, 1.0]
