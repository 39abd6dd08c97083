"""The memory that training needs, as reported and as measured."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

import memory_runs as runs
import ms_accum.app.memory
from helpers import Recorder, forward_of, values
from model_zoo import LeNet5
from ms_accum import find_micro_batch_size, memory_report, native
from ms_accum.app.trials import run_trial

PARAMETERS = 83  # MB: 21 million in float32


def peak(kind, folder, **settings):
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(tests.parent), **settings}
    command = [sys.executable, str(tests / "peak_memory.py"), kind]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, check=True)
    return int(done.stdout.splitlines()[-1])


on_linux = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")


@pytest.mark.slow
@on_linux
def test_mean_needs_no_more_memory_than_sum(tmp_path):
    assert peak("mean", tmp_path) <= peak("sum", tmp_path) + 0.5 * PARAMETERS
    without = {native.SWITCH: "0"}  # operators of our own, which the mutant does not reach
    total = peak("sum", tmp_path, **without)
    assert peak("mean", tmp_path, **without) <= total + 0.5 * PARAMETERS
    assert peak("zeros", tmp_path, **without) > total + 0.75 * PARAMETERS


# The report

LENET = 61_684 * 4


@pytest.mark.parametrize(
    ("make", "state"),
    [
        (lambda p: nn.SGD(p, 0.1), 2 * LENET),  # momentum and "first time" of each element, used or not
        (lambda p: nn.Momentum(p, 0.1, 0.9), LENET),
        (nn.Adam, 2 * LENET),
    ],
    ids=["sgd", "momentum", "adam"],
)
@pytest.mark.parametrize(("mini_steps", "accumulators"), [(1, 0), (2, LENET), (64, LENET)])
def test_parts_of_report(make, state, mini_steps, accumulators):
    network = LeNet5()
    report = memory_report(network, make(network.trainable_params()), mini_steps=mini_steps)
    assert report[:3] == (LENET, LENET, accumulators) and report.activations is None
    assert state <= report.optimizer_state < state + 64  # counters, rates
    assert report.total == 2 * LENET + accumulators + report.optimizer_state


def test_frozen_and_float16_parameters():
    network = nn.SequentialCell(nn.Dense(10, 20), nn.Dense(20, 5).to_float(ms.float16))
    network[0].weight.requires_grad = False
    network[1].weight.set_dtype(ms.float16)
    report = memory_report(network, nn.SGD(network.trainable_params(), 0.1), mini_steps=2)
    assert report[:3] == (4 * (200 + 20 + 5) + 2 * 100, 4 * 25 + 2 * 100, 4 * 125)


def test_report_is_printed_as_table():
    report = ms_accum.MemoryReport(2**20, 2**21, 0, 123 * 2**20, None, 126 * 2**20)
    assert str(report) == "\n".join(
        [
            "parameters         1.00 MiB",
            "gradients          2.00 MiB",
            "accumulators       0.00 MiB",
            "optimizer_state  123.00 MiB",
            "activations         unknown",
            "total            126.00 MiB",
        ]
    )


class Normed(nn.Cell):
    """BatchNorm and Dropout, which a forward changes."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.dropout = nn.Dense(6, 8), nn.BatchNorm1d(8), nn.Dropout(p=0.5)
        self.head = nn.Dense(8, 3)

    def construct(self, x):
        return self.head(self.dropout(ops.relu(self.norm(self.dense(x)))))


def report_of(network, rows=4, loss_fn=None):
    x, y = np.random.RandomState(1).randn(rows, 6).astype(np.float32), np.zeros(rows, np.int32)
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    return memory_report(network, optimizer, mini_steps=2, micro_batch=(x, y), loss_fn=loss_fn or nn.CrossEntropyLoss())


def footprint(network):
    flags = [cell.training for _, cell in network.cells_and_names()]
    arrays = [*values(network.get_parameters()), ms.get_rng_state().asnumpy()]
    return [array.tolist() for array in arrays], flags, network.phase, ms.get_context("mode")


@pytest.mark.parametrize("mode", [ms.GRAPH_MODE, ms.PYNATIVE_MODE])
def test_measuring_changes_nothing(mode, monkeypatch):
    ms.set_context(mode=mode)
    network = Normed()
    network.set_train(False)
    network.dropout.set_train()
    before = footprint(network)
    report_of(network)
    assert footprint(network) == before
    with pytest.raises(RuntimeError, match="planted"):
        report_of(network, loss_fn=_planted)
    assert footprint(network) == before
    monkeypatch.setattr(ms_accum.app.memory, "restoring", lambda *_, **__: contextlib.nullcontext(network.set_train()))
    ms.set_context(mode=ms.PYNATIVE_MODE)
    before = footprint(network)
    report_of(network)  # the mutant
    assert footprint(network) != before


def _planted(*_):
    raise RuntimeError("planted")


def test_dropout_masks_of_graphs_are_the_same_after_measuring():
    ms.set_context(mode=ms.GRAPH_MODE)
    drawn = []
    for asked in (False, True, False):
        ms.set_seed(3)
        network = Normed()
        network.set_train()
        x = Tensor(np.random.RandomState(2).randn(4, 6), ms.float32)
        before = network(x).asnumpy()
        if asked:
            report_of(network)
        drawn.append([before.tolist(), network(x).asnumpy().tolist()])
    assert drawn[0] == drawn[1] == drawn[2] and drawn[0][0] != drawn[0][1]


def test_activations_are_tensors_stored_for_backward():
    network = nn.SequentialCell(nn.Dense(6, 100, has_bias=False), nn.ReLU(), nn.Dense(100, 1, has_bias=False))
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    x = np.ones((50, 6), np.float32)
    report = memory_report(network, optimizer, mini_steps=1, micro_batch=x, loss_fn=ops.reduce_mean)
    hidden = 50 * 100 * 4  # the ReLU's output, once: the second product's input is the same
    assert hidden <= report.activations < 1.02 * hidden


def test_activations_grow_with_rows():
    few, many = (report_of(Normed(), rows).activations for rows in (100, 200))
    assert 1.9 * few < many < 2.1 * few


def test_activations_are_unknown_under_jit():
    network = nn.Dense(6, 1)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    compiled = ms.jit(forward_of(network, nn.MSELoss()))
    batch = (np.ones((2, 6), np.float32), np.ones((2, 1), np.float32))
    assert memory_report(network, optimizer, mini_steps=1, micro_batch=batch, loss_fn=nn.MSELoss()).activations
    inner = _Compiled(compiled)
    assert memory_report(inner, optimizer, mini_steps=1, micro_batch=batch).activations is None


class _Compiled(nn.Cell):
    def __init__(self, compiled):
        super().__init__()
        self.function = (compiled,)

    def construct(self, x, y):
        return self.function[0](x, y)


@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"network": 3}, TypeError, "'network' must be a Cell, but got int"),
        ({"optimizer": 3}, TypeError, "'optimizer' must be a MindSpore optimizer, but got int"),
        ({"mini_steps": 0}, ValueError, "'mini_steps' must be an int >= 1, but got 0"),
    ],
)
def test_invalid_arguments_are_rejected(change, error, match):
    network = nn.Dense(6, 1)
    arguments = {"network": network, "optimizer": nn.SGD(network.trainable_params(), 0.1), "mini_steps": 1, **change}
    with pytest.raises(error, match=f"For 'memory_report', {match}"):
        memory_report(arguments.pop("network"), arguments.pop("optimizer"), **arguments)


# Measured, in processes of their own


def peaks(folder, network, rows, *run_specs):
    """Return the peaks in MB after each run, all in one process (see `memory_runs.print_peaks`)."""
    tests = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": str(tests.parent)}
    command = [sys.executable, str(tests / "memory_runs.py"), network, str(rows), *run_specs]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=True)
    return [float(line) for line in done.stdout.split()[-len(run_specs) :]]


def kept_per_row(name):
    network, batch = runs.NETWORKS[name](64)
    optimizer = nn.SGD(network.trainable_params(), 0.1)
    report = memory_report(network, optimizer, mini_steps=2, micro_batch=batch, loss_fn=nn.CrossEntropyLoss())
    return report.activations / 64 / 2**20


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "few_rows", "many_rows", "low", "high"),
    [("lenet", 512, 4608, 2, 3), ("images", 64, 576, 1.6, 2.5), ("tokens", 64, 320, 3, 5)],
)
def test_measured_peak_grows_by_multiple_of_activations(name, few_rows, many_rows, low, high, tmp_path, monkeypatch):
    (smaller_peak,), (larger_peak,) = (peaks(tmp_path, name, rows, "2x4") for rows in (few_rows, many_rows))
    measured = (larger_peak - smaller_peak) / (many_rows - few_rows)
    assert low < measured / kept_per_row(name) < high
    monkeypatch.setattr(ms_accum.app.memory, "_storages", lambda tensors: dict(enumerate(t.nbytes for t in tensors)))
    assert not low < measured / kept_per_row(name) < high  # the mutant counts shared storages twice, and parameters


@on_linux
@pytest.mark.slow
def test_accumulating_needs_at_most_twice_the_model_size(tmp_path):
    (window_of_1,), (window_of_2, window_of_64) = (
        peaks(tmp_path, "wide", 4, *run_specs) for run_specs in (["1x4"], ["2x4", "64x64"])
    )
    parameters = 2 * (4096 + 1) * 4096 * 4 / 2**20
    # One set is the accumulators. The other is there while gradients are added or normed; the goal is to lose it.
    assert 0.75 * parameters < window_of_2 - window_of_1 < 2.1 * parameters
    assert window_of_64 - window_of_2 < 0.25 * parameters


@on_linux
@pytest.mark.slow
def test_peak_does_not_depend_on_window(tmp_path):
    first, *_, last = peaks(tmp_path, "images", 64, "2x16", "4x16", "16x16", "64x64")
    assert last < 1.05 * first
    assert peaks(tmp_path, "images", 256, "2x16")[-1] > 1.05 * first  # a larger micro-batch is seen


@on_linux
@pytest.mark.slow
def test_peak_does_not_grow_over_10000_micro_batches(tmp_path):
    early, late = peaks(tmp_path, "small", 8, "4x1000", "4x9000")
    assert late - early < 5


EFFECTIVE = 32


@on_linux
@pytest.mark.slow
def test_found_micro_batch_trains_where_large_batch_is_killed():
    trial = partial(runs.train_whole, EFFECTIVE)
    smallest_peak, complete_peak = (run_trial("test", trial, rows, None).peak for rows in (1, EFFECTIVE))
    result = find_micro_batch_size(
        trial, EFFECTIVE, memory_budget=(smallest_peak + complete_peak) >> 1, prefer="memory"
    )
    assert not result.trials[0].fits and result.trials[0].rows == EFFECTIVE
    assert (
        1 < result.micro_batch_size < EFFECTIVE
        and result.peak <= (smallest_peak + complete_peak) >> 1
        and len(result.trials) <= 12
    )
    losses = []
    for rows in (EFFECTIVE, result.micro_batch_size):
        recorder = Recorder()
        runs.train_whole(EFFECTIVE, rows, (recorder,))
        losses.append([record.loss for record in recorder.records])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)
    assert losses[0][0] != losses[0][1]
