"""The expected results, in NumPy float64 and plain loops; nothing here imports ms_accum."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import numpy as np


def float64(arrays):
    return [np.asarray(array, np.float64) for array in arrays]


def pairs(first, second):
    """Return the pairs of two iterables of one length: `zip` would compare nothing with what the other lacks."""
    first, second = list(first), list(second)
    assert len(first) == len(second), f"{len(first)} are compared with {len(second)}"
    return list(zip(first, second))


def global_norm(gradients):
    return float(np.sqrt(sum(np.sum(array**2) for array in float64(gradients))))


class Window(NamedTuple):
    """One update: in which epoch it happens, and which micro-batches, numbered from 0, are in it."""

    epoch: int
    micro_batches: tuple


def windows(micro_batches, window, epochs, tail):
    """Return each window of a run and what is left at its end: one micro-batch after the other."""
    ended, open_window, number = [], [], 0
    for epoch in range(1, epochs + 1):
        for _ in range(micro_batches):
            open_window.append(number)
            number += 1
            if len(open_window) == window:
                ended.append(Window(epoch, tuple(open_window)))
                open_window = []
        if open_window and tail == "flush":
            ended.append(Window(epoch, tuple(open_window)))
        if tail != "carry":
            open_window = []
    return ended, open_window


def _comparable(array):
    """Return a float32 array unchanged, as neighbours subtract exactly in it, and others in float64."""
    array = np.asarray(array)
    return array if array.dtype == np.float32 else array.astype(np.float64)


def miss(actual, expected, rtol, atol=0.0):
    """Return the largest error in units of the tolerance: up to 1 is equal, and a mutant must reach 100.

    `atol` is absolute. NaN is as far off as can be.
    """
    worst = 0.0
    compared = pairs(map(_comparable, actual), map(_comparable, expected))
    assert compared, "nothing is compared"
    for got, want in compared:
        assert got.shape == want.shape
        with np.errstate(all="ignore"):
            error = np.abs(got - want) / (atol + rtol * np.abs(want))
        error = np.where(got == want, 0.0, error)  # else infinities and 0 / 0 were NaN
        largest = float(np.max(error, initial=0.0))  # NaN if there is one
        worst = max(worst, np.inf if np.isnan(largest) else largest)
    return worst


def digest(arrays):
    """Return the SHA-256 over the raw bytes of all arrays, in their order."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


# The optimizers, in MindSpore's formulas. Each is a function of (w, g, state, t, lr, decay) for one
# parameter, with t from 1, that changes `state` and returns the new w.


def sgd(w, g, state, t, lr, decay=0.0, momentum=0.0, nesterov=False):
    g = g + decay * w
    if not momentum:
        return w - lr * g
    state["v"] = g if t == 1 else momentum * state["v"] + g
    return w - lr * (g + momentum * state["v"] if nesterov else state["v"])


def momentum(w, g, state, t, lr, decay=0.0, momentum=0.9):
    g = g + decay * w
    state["v"] = state.get("v", 0.0) * momentum + g
    return w - lr * state["v"]


def _moments(g, state, beta1, beta2):
    state["m"] = beta1 * state.get("m", 0.0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0.0) + (1 - beta2) * g**2
    return state["m"], state["v"]


def adam(w, g, state, t, lr, decay=0.0, betas=(0.9, 0.999), eps=1e-8):
    """As the kernel computes it: the correction of the bias is in the rate, and `eps` is not corrected."""
    m, v = _moments(g + decay * w, state, *betas)
    return w - lr * np.sqrt(1 - betas[1] ** t) / (1 - betas[0] ** t) * m / (np.sqrt(v) + eps)
