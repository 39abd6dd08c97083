"""Several micro-batches in one graph train exactly as one after the other."""

from __future__ import annotations

import logging

import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from helpers import cross_entropy, run
from ms_accum import GradientAccumulation
from ms_accum.training import runners
from reference import digest

ROWS = [5] * 18 + [3, 3] + [5] * 7  # more micro-batches than one loop takes, two shapes, and a tail


def network():
    layers = nn.SequentialCell(nn.Dense(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dense(8, 3))
    for number, parameter in enumerate(layers.trainable_params()):
        parameter.set_data(Tensor(np.random.RandomState(number).randn(*parameter.shape).astype(np.float32)))
    return layers


def data():
    rng = np.random.RandomState(3)
    return [
        (Tensor(rng.randn(rows, 6).astype(np.float32)), Tensor(rng.randint(0, 3, rows).astype(np.int32)))
        for rows in ROWS
    ]


def trained(model_network, size=20):
    optimizer = nn.Momentum(model_network.trainable_params(), 0.1, 0.9)
    model = GradientAccumulation(model_network, cross_entropy(), optimizer, clip_norm=0.5, check="off")
    records = run(model, data(), size).records
    return (
        digest(model_network.get_parameters()),
        [record._replace(seconds=0.0, loss=0.0) for record in records],
        [record.loss for record in records],
    )


@pytest.mark.filterwarnings("ignore:BatchNorm layers:UserWarning")
def test_loops_train_to_the_bytes_of_calls(compiles, monkeypatch):
    monkeypatch.setattr(runners, "_KINDS", 1)  # both shapes need the arrays in turn
    looped = trained(network())
    assert compiles.count("Loop") == 2  # one for each shape of a micro-batch
    monkeypatch.setattr(runners, "_LARGEST", 0)
    called = trained(network())
    assert "AddAndEnd" in compiles and looped[:2] == called[:2]
    assert looped[2] == pytest.approx(called[2], rel=1e-6)


def test_network_that_mindspore_can_not_compile_in_a_loop_is_run_by_calls(caplog, monkeypatch):
    def fails(*inputs):
        raise RuntimeError("planted")

    monkeypatch.setattr(runners.Loop, "__call__", fails)
    caplog.set_level(logging.DEBUG, "ms_accum")
    _, records, _ = trained(nn.SequentialCell(nn.Dense(6, 3)))
    assert "not run in a loop: planted" in caplog.text and [record.samples for record in records] == [96, 35]


def test_masks_of_dropout_differ_in_each_round():
    class Dropped(nn.Cell):
        def __init__(self):
            super().__init__()
            self.dense, self.dropout = nn.Dense(64, 64), nn.Dropout(p=0.5)

        def construct(self, x):
            return ops.mean(self.dense(self.dropout(x)))

    net = Dropped()
    optimizer = nn.SGD([net.dense.weight], 1.0)
    model = GradientAccumulation(net, None, optimizer, check="off")
    ones, before = (Tensor(np.ones((1, 64), np.float32)),), net.dense.weight.asnumpy().copy()
    run(model, [ones] * 4, 4)
    # The gradient of a column is its share of the rounds in which it was kept: of equal masks it were 0 or 4 of 4.
    kept = np.round((before - net.dense.weight.asnumpy())[0] * 64 * 4 / 2).astype(int)
    assert set(kept) - {0, 4}
