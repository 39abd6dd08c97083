"""The README's change of the tutorial's program, and the benchmarks' copies of the tutorials.

What the tutorials compute is written in NumPy: gradients of mean losses are added, in the 2.x one of losses that are
divided by the window's size. A short last window stays in the sums until the next epoch.
"""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import nn, ops
from mindspore.dataset import NumpySlicesDataset

import reference
from helpers import cross_entropy, values

ROOT = Path(__file__).resolve().parents[1]
READMES = ("README.md", "README_CN.md")
BATCH, WINDOW, EPOCHS, LR = 8, 4, 2, 0.1
BATCHES = 7  # of which the last one has 5 rows, so that the last window of an epoch is short in both ways
TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


@pytest.fixture
def rows(rng):
    count = BATCH * (BATCHES - 1) + 5
    return rng.randn(count, 6).astype(np.float32), rng.randint(0, 3, count).astype(np.int32)


def micro_batches(rows):
    return [tuple(column[first : first + BATCH] for column in rows) for first in range(0, len(rows[0]), BATCH)]


def mean_gradient(weights, x, y):
    """The gradient of the mean cross entropy of a Dense layer."""
    weight, bias = weights
    logits = x.astype(np.float64) @ weight.T + bias
    wrong = np.exp(logits - logits.max(1, keepdims=True))
    wrong = wrong / wrong.sum(1, keepdims=True) - np.eye(3)[y]
    return [wrong.T @ x / len(x), wrong.mean(0)]


def trained(start, rows, tail, gradient_of):
    """The weights after training in NumPy, where `gradient_of(weights, window)` is what the optimizer gets."""
    weights, states, data = reference.float64(start), [{}, {}], micro_batches(rows)
    for step, window in enumerate(reference.windows(BATCHES, WINDOW, EPOCHS, tail)[0], 1):
        gradients = gradient_of(weights, [data[number % BATCHES] for number in window.micro_batches])
        weights = [reference.sgd(w, g, s, step, LR) for w, g, s in zip(weights, gradients, states)]
    return weights


def large_batch_gradient(weights, window):
    return mean_gradient(weights, *map(np.concatenate, zip(*window)))


def summed_gradient(weights, window):
    return [sum(parts) for parts in zip(*(mean_gradient(weights, *columns) for columns in window))]


def divided_loss_gradient(weights, window):
    return [gradient / WINDOW for gradient in summed_gradient(weights, window)]


# The README's diff


def programs_of_diff(readme):
    """Return the programs before and after the change."""
    (diff,) = re.findall(r"^```diff\n(.*?)^```", (ROOT / readme).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return ["".join(f"{line[2:]}\n" for line in diff.splitlines() if line[:1] != other) for other in "+-"]


def train_by_program(program, rows, folder):
    """Run a side of the diff on this data; return the weights that it begins with, and those that it leaves."""
    network = nn.Dense(6, 3)
    start, optimizer = values(network.trainable_params()), nn.SGD(network.trainable_params(), LR)
    variables = {"ms": ms, "ops": ops, "network": network, "loss_fn": cross_entropy(), "optimizer": optimizer}
    variables["dataset"] = NumpySlicesDataset(rows, ["x", "y"], shuffle=False).batch(BATCH)
    path = folder / "program.py"  # MindSpore compiles functions of files only
    path.write_text(program, encoding="utf-8")
    runpy.run_path(str(path), init_globals=variables)
    return start, values(network.trainable_params())


def with_tutorial_class(program):
    """Put in the class that the README leaves out."""
    line = r"^class Accumulator: \.\.\..*$"
    assert len(re.findall(line, program, re.MULTILINE)) == 1
    imported = "from benchmarks.programs.tutorial_functional import SumsInGraph as Accumulator"
    return re.sub(line, imported, program, flags=re.MULTILINE)


def test_readme_program_before_change_equals_tutorial(rows, tmp_path):
    start, actual = train_by_program(with_tutorial_class(programs_of_diff(READMES[0])[0]), rows, tmp_path)
    assert reference.miss(actual, trained(start, rows, "carry", divided_loss_gradient), **TOLERANCE) <= 1
    assert reference.miss(actual, trained(start, rows, "flush", large_batch_gradient), **TOLERANCE) >= 100


def test_tutorial_program_runs_with_our_accumulator(rows, tmp_path):
    """Only the import changes: our default sums, as the tutorial does."""
    program = re.sub(
        r"^class Accumulator.*$", "from ms_accum import Accumulator", programs_of_diff(READMES[0])[0], flags=re.M
    )
    start, actual = train_by_program(program, rows, tmp_path)
    assert reference.miss(actual, trained(start, rows, "carry", divided_loss_gradient), **TOLERANCE) <= 1


def test_readme_program_after_change_equals_large_batch(rows, tmp_path):
    start, actual = train_by_program(programs_of_diff(READMES[0])[1], rows, tmp_path)
    assert reference.miss(actual, trained(start, rows, "flush", large_batch_gradient), **TOLERANCE) <= 1
    assert reference.miss(actual, trained(start, rows, "carry", divided_loss_gradient), **TOLERANCE) >= 100


@pytest.mark.usefixtures("eager")
def test_both_readmes_show_same_change():
    english, chinese = map(programs_of_diff, READMES)
    assert english == chinese and english[0] != english[1]


# The benchmarks' programs


def test_cells_program_equals_tutorial(rows, monkeypatch):
    """It trains a small network here, with a large rate."""
    from benchmarks.programs import networks_ms, tutorial_cells

    network = nn.Dense(6, 3)
    start = values(network.trainable_params())
    monkeypatch.setattr(networks_ms, "make", lambda name: network)
    monkeypatch.setattr(networks_ms, "momentum", lambda network: nn.Momentum(network.trainable_params(), LR, 0.9))
    trainer = tutorial_cells.make("mlp")
    windows = [micro_batches(rows)[:WINDOW], micro_batches(rows)[2 : 2 + WINDOW]]
    trainer.windows_of(WINDOW)([trainer.load(window) for window in windows])
    actual = values(network.trainable_params())
    for gradient_of, holds in ((summed_gradient, True), (divided_loss_gradient, False)):
        weights, states = reference.float64(start), [{}, {}]
        for step, window in enumerate(windows, 1):
            gradients = gradient_of(weights, window)
            weights = [reference.momentum(w, g, s, step, LR) for w, g, s in zip(weights, gradients, states)]
        missed = reference.miss(actual, weights, **TOLERANCE)
        assert missed <= 1 if holds else missed >= 100
