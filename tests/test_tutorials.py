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


def trained(start, rows, tail, gradient_of, rates=(LR,) * EPOCHS * BATCHES, epochs=EPOCHS, rule=reference.sgd):
    """The weights after training in NumPy, where `gradient_of(weights, window)` is what the optimizer gets."""
    weights, states, data = reference.float64(start), [{}, {}], micro_batches(rows)
    for step, window in enumerate(reference.windows(BATCHES, WINDOW, epochs, tail)[0], 1):
        gradients = gradient_of(weights, [data[number % BATCHES] for number in window.micro_batches])
        weights = [rule(w, g, s, step, rates[step - 1]) for w, g, s in zip(weights, gradients, states)]
    return weights


def large_batch_gradient(weights, window):
    return mean_gradient(weights, *map(np.concatenate, zip(*window)))


def summed_gradient(weights, window):
    return [sum(parts) for parts in zip(*(mean_gradient(weights, *columns) for columns in window))]


def divided_loss_gradient(weights, window):
    return [gradient / WINDOW for gradient in summed_gradient(weights, window)]


# The README's diffs: of a plain loop, and of the program of the tutorial

TUTORIAL = f"""
class Accumulator: ...
optimizer = nn.SGD(network.trainable_params(), {LR})
accumulator = Accumulator(optimizer, 4)

def forward(x, y):
    return loss_fn(network(x), y) / 4

grad_fn = ms.value_and_grad(forward, None, network.trainable_params())

@ms.jit
def train_step(x, y):
    loss, grads = grad_fn(x, y)
    accumulator(grads)
    return loss

for epoch in range({EPOCHS}):
    for x, y in dataset.create_tuple_iterator():
        train_step(x, y)
"""


def diffs(readme):
    return re.findall(r"^```diff\n(.*?)^```", (ROOT / readme).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def plain(sign):
    """Return the plain loop before and after the change."""
    program = "".join(f"{line[2:]}\n" for line in diffs(READMES[0])[0].splitlines() if line[:1] in (" ", sign))
    return re.sub(r"batch\((128|32)\)", lambda match: f"batch({int(match[1]) // 32 * BATCH})", program)


def patched(program, diff):
    """Change a program by a diff without context: a new line is where the removed one was, or after one named."""
    lines = [line.partition("  # ")[0] for line in program.splitlines()]
    at = 0
    for sign, line in ((line[:1], line[2:].partition("  # ")[0]) for line in diff.splitlines()):
        if sign == "+":
            at += 1
            lines.insert(at, line)
        else:
            at = lines.index(line)
        if sign == "-":
            del lines[at]
            at -= 1
    return "\n".join(lines)


def train_by_program(program, rows, folder):
    """Run a program on this data; return the weights that it begins with, and those that it leaves."""
    network = nn.Dense(6, 3)
    start = values(network.trainable_params())
    variables = {"ms": ms, "nn": nn, "ops": ops, "network": network, "loss_fn": cross_entropy()}
    dataset = NumpySlicesDataset(rows, ["x", "y"], shuffle=False)
    variables["dataset"] = dataset if "dataset.batch" in program else dataset.batch(BATCH)
    path = folder / "program.py"  # MindSpore compiles functions of files only
    path.write_text(program, encoding="utf-8")
    runpy.run_path(str(path), init_globals=variables)
    return start, values(network.trainable_params())


def misses(actual, start, rows, *more):
    """Return how far weights are from those of the large batch, and from those of the tutorial."""
    large = trained(start, rows, "flush", large_batch_gradient, *more)
    tutorial = trained(start, rows, "carry", divided_loss_gradient, *more)
    return [reference.miss(actual, expected, **TOLERANCE) for expected in (large, tutorial)]


@pytest.mark.parametrize("sign", ["-", "+"])
def test_readme_plain_loop_equals_large_batch(sign, rows, tmp_path):
    """Before and after the change: the schedule has the rates of updates, of which there are two in each epoch."""
    rates = nn.cosine_decay_lr(0.0, 0.1, 10 * 2, 2, 10)
    start, actual = train_by_program(plain(sign), rows, tmp_path)
    large, tutorial = misses(actual, start, rows, rates, 10, reference.momentum)
    assert large <= 1 and tutorial >= 100
    assert misses(actual, start, rows, [*rates[2:], 0, 0], 10, reference.momentum)[0] >= 100


def with_class(program, line):
    """Put in the class that the README leaves out."""
    assert program.count("class Accumulator: ...") == 1
    return program.replace("class Accumulator: ...", line)


def test_tutorial_program_equals_tutorial(rows, tmp_path):
    imported = "from benchmarks.programs.tutorial_functional import SumsInGraph as Accumulator"
    start, actual = train_by_program(with_class(TUTORIAL, imported), rows, tmp_path)
    large, tutorial = misses(actual, start, rows)
    assert tutorial <= 1 and large >= 100


def test_tutorial_program_runs_with_our_accumulator(rows, tmp_path):
    """Only the import changes: our default sums, as the tutorial does."""
    start, actual = train_by_program(with_class(TUTORIAL, "from ms_accum import Accumulator"), rows, tmp_path)
    assert misses(actual, start, rows)[1] <= 1


def test_tutorial_program_after_change_equals_large_batch(rows, tmp_path):
    start, actual = train_by_program(patched(TUTORIAL, diffs(READMES[0])[1]), rows, tmp_path)
    large, tutorial = misses(actual, start, rows)
    assert large <= 1 and tutorial >= 100


@pytest.mark.usefixtures("eager")
def test_both_readmes_show_same_changes():
    assert diffs(READMES[0]) == diffs(READMES[1]) and len(diffs(READMES[0])) == 2


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
