"""Factors of micro-batches make any engine exact, whether it sums, averages over ranks, or divides by their number."""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_accum import Group, window_factors
from ms_accum.loss import terms

pytestmark = pytest.mark.usefixtures("eager")

WIDTH, CLASS_WEIGHTS = 3, np.array([0.2, 1.0, 2.5])
WEIGHTED = nn.CrossEntropyLoss(Tensor(CLASS_WEIGHTS.astype(np.float32)), ignore_index=-1)
COEFFICIENTS = {"size": lambda updates: 0.5 * updates}


def tokens(x, y):
    return (y >= 0).sum()


def weights_of(y):
    return np.where(y >= 0, CLASS_WEIGHTS[y], 0.0)


def of_rows(w, x, y):
    """The gradient of the sum of half the squares of x w over rows, and the number over which its mean is taken."""
    return x.T @ (x @ w), len(x)


def of_labels(w, x, y, counts=None):
    """The same of x w - y over labels that count, each times its weight."""
    counts = (y >= 0).astype(float) if counts is None else counts(y)
    return x.T @ (counts * (x @ w - y)), counts.sum()


def of_weighted_labels(w, x, y):
    return of_labels(w, x, y, weights_of)


# Of each: the weight as the user gives it, and the terms of the loss.
LOSSES = {
    "rows": (None, {"loss": of_rows}),
    "tokens": (tokens, {"loss": of_labels}),
    "class weights": (WEIGHTED, {"loss": of_weighted_labels}),
    "two terms": ({"label": tokens, "size": "rows"}, {"label": of_labels, "size": of_rows}),
}


def data_of(ranks):
    """Return for each rank its window: uneven rows and numbers of micro-batches, one of padding only."""
    rng = np.random.RandomState(ranks)
    sizes = [(4, 7, 2, 5), (3, 6), (8,)][:ranks]
    windows = [[(rng.randn(rows, WIDTH), rng.randint(-1, 3, rows)) for rows in own] for own in sizes]
    windows[0][1][1][:] = -1
    return windows


def trained(windows, weight, losses, engine, monkeypatch, times):
    """Return the gradient that an engine has computed from mean losses times their factors."""
    divisors = [
        [sum(loss(np.zeros(WIDTH), x, y)[1] for x, y in window) for loss in losses.values()] for window in windows
    ]
    monkeypatch.setattr(terms, "gather_numbers", lambda own, group: np.array(divisors))  # what the ranks send
    coefficients = COEFFICIENTS if isinstance(weight, dict) else None
    w, total = np.arange(1.0, WIDTH + 1), np.zeros(WIDTH)
    for rank, window in enumerate(windows):
        group = Group(rank, len(windows))
        factors = window_factors(
            window, weight, coefficients=coefficients, updates=3, group=group, times=times(window, windows)
        )
        own = np.zeros(WIDTH)
        for (x, y), factor in zip(window, factors):
            factor = factor if isinstance(factor, dict) else {"loss": factor}
            for name, loss in losses.items():
                gradient, divisor = loss(w, x, y)
                own += factor[name] * gradient / divisor if divisor else 0.0
        total += own / (len(window) if "divides" in engine else 1)
    return total / (len(windows) if "averages" in engine else 1)


def expected(windows, losses, w):
    """Return the gradient of the mean loss over all micro-batches of all ranks."""
    total = np.zeros(WIDTH)
    for name, loss in losses.items():
        gradients, divisors = zip(*(loss(w, x, y) for window in windows for x, y in window))
        total += (1.5 if name == "size" else 1.0) * sum(gradients) / sum(divisors)
    return total


# Of each engine, what `times` is.
ENGINES = {
    "sums": lambda window, windows: 1.0,
    "averages": lambda window, windows: len(windows),
    "divides": lambda window, windows: len(window),
    "divides and averages": lambda window, windows: len(window) * len(windows),
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", LOSSES)
def test_gradient_is_that_of_the_whole_window(name, engine, ranks, monkeypatch):
    (weight, losses), windows = LOSSES[name], data_of(ranks)
    found = trained(windows, weight, losses, engine, monkeypatch, ENGINES[engine])
    wanted = expected(windows, losses, np.arange(1.0, WIDTH + 1))
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    if ranks > 1 and engine != "sums":  # without `times` it is not
        assert np.abs(trained(windows, weight, losses, engine, monkeypatch, ENGINES["sums"]) / wanted - 1).max() > 0.1


def test_nothing_counts():
    window = [(np.zeros((2, WIDTH)), np.full(2, -1))] * 2
    assert window_factors(window, tokens) == [0.0, 0.0]
    assert window_factors([]) == []


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: window_factors([], times=0), ValueError, "'times' must be a finite number > 0, but got 0"),
        (lambda: window_factors([], coefficients={"a": 1}), ValueError, "'coefficients' must be None unless"),
        (lambda: window_factors([np.zeros(3)]), TypeError, "columns of each micro-batch, but got one of ndarray"),
        (lambda: window_factors([], "tokens"), ValueError, "'weight' must be 'rows', 'elements', a number"),
    ],
)
def test_wrong_use_is_rejected(use, error, message):
    with pytest.raises(error, match=f"^For 'window_factors', .*{message}"):
        use()
