"""Helpers for tests of runs that are stopped and resumed."""

from __future__ import annotations

import itertools

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops

from helpers import Recorder, batches, cross_entropy
from ms_accum import Checkpointer, GradientAccumulation, Stopped
from reference import digest

ROWS = [8, 8, 5, 8, 8, 8, 5]


def network_of(features=6):
    ms.set_seed(1)
    return nn.SequentialCell(nn.Flatten(), nn.Dense(features, 5), nn.ReLU(), nn.Dense(5, 10))


def momentum(network):
    return nn.Momentum(network.trainable_params(), 0.1, 0.9)


def adam_with_schedule(network):
    rates = nn.exponential_decay_lr(0.1, 0.9, 100, 1, 1)
    return nn.Adam(network.trainable_params(), rates, weight_decay=0.01)


class Run:
    """One process's life: a new network, a new optimizer, a new driver."""

    def __init__(self, make_optimizer=momentum, features=6, make_network=network_of, **options):
        network = make_network(features)
        self.optimizer = make_optimizer(network)
        reduction = options.get("reduction", "mean")
        loss = cross_entropy(reduction)
        self.model = GradientAccumulation(network, loss, self.optimizer, **options)
        self.recorder = Recorder()

    def spoil(self):
        """Leave nothing of what was trained, nor of what was recorded or waits."""
        network = self.model._network
        for parameter in {
            id(each): each for each in (*self.optimizer.get_parameters(), *network.get_parameters())
        }.values():
            ops.assign(parameter, ops.full_like(parameter, 7))
        self.model.clear()
        self.recorder = Recorder()

    def train(self, dataset, mini_steps=None, epochs=2, states=None, **options):
        report = (self.recorder,)
        self.model.train_process(
            epochs, dataset, mini_steps, report=report, ckpt_path=None, checkpointer=states, **options
        )
        return self

    @property
    def left(self):
        """What it leaves: the bytes of all Parameters, the records, the counters, and the losses.

        The last are compared as numbers: the kernel's last bit depends on where in memory its input is.
        """
        records = [record._replace(seconds=0.0, loss=0.0) for record in self.recorder.records]
        losses = [record.loss for record in self.recorder.records]
        return digest(self.optimizer.get_parameters()), records, (self.model.updates, self.model.skipped), losses


def check_same(actual, expected):
    assert actual[:3] == expected[:3]
    assert actual[3] == pytest.approx(expected[3], rel=1e-6)


def numbers(rows=ROWS):
    return batches(np.random.RandomState(3), rows)


def even():
    """Batches of one shape, for what has nothing to do with windows: those of one compile a single graph."""
    return numbers([8] * 7)


def names(folder):
    """Return the names of the states in a folder, and of whatever else is there."""
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def stop_after(asked):
    """Return a function that requests a stop when it has been asked this number of times.

    The driver asks after it has read a micro-batch, when it has read a window, between its micro-batches, and after it.
    """
    count = itertools.count(1)
    return lambda: next(count) == asked


def stopped_and_resumed(folder, stops, make, dataset, *arguments, **options):
    """Run, stop and resume in turn; return what the last one left, with all records."""
    records = []
    for stop in (*stops, None):
        states = Checkpointer(folder, resume="auto", stop=None if stop is None else stop_after(stop))
        run = make()
        try:
            run.train(dataset(), *arguments, states=states, **options)
        except Stopped:
            assert stop is not None
        else:
            assert stop is None and run.recorder.planned in (None, len(run.recorder.records))
        records += run.recorder.records
        run.recorder.records = records
    return run.left
