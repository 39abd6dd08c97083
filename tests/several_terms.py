"""A network and a loss of three terms whose gradients have a closed form, which NumPy computes in float64."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

FEATURES, TOKENS, CLASSES = 6, 5, 3
WEIGHT = {"ce": lambda x, y: (y >= 0).sum(), "entropy": "rows", "size": 1}
COEFFICIENTS = {"entropy": 0.7, "size": 0.1}


class Net(nn.Cell):
    """The logits of a fixed number of tokens for each row."""

    def __init__(self, seed=1):
        super().__init__()
        rng = np.random.RandomState(seed)
        self.dense = nn.Dense(FEATURES, TOKENS * CLASSES)
        for parameter in self.dense.get_parameters():
            parameter.set_data(Tensor(rng.randn(*parameter.shape) * 0.3, ms.float32))

    def construct(self, x):
        return ops.reshape(self.dense(x), (-1, TOKENS, CLASSES))


class Loss(nn.Cell):
    """The mean over tokens, the mean over rows, and the mean over the logits of a micro-batch."""

    def __init__(self):
        super().__init__()
        self.ce = nn.CrossEntropyLoss(ignore_index=-1)

    def construct(self, logits, labels):
        logs = ops.log_softmax(logits, -1)
        entropy = ops.mean(ops.sum(ops.exp(logs) * logs, (1, 2)))
        ce = self.ce(ops.reshape(logits, (-1, CLASSES)), ops.reshape(labels, (-1,)))
        return {"entropy": entropy, "ce": ce, "size": ops.mean(ops.square(logits))}


class SumOfLoss(Loss):
    """The same as one number, for a single weight."""

    def construct(self, logits, labels):
        terms = super().construct(logits, labels)
        return terms["ce"] + 0.7 * terms["entropy"] + 0.1 * terms["size"]


def data_of(rows, seed=0, masked=()):
    """Return micro-batches of these numbers of rows, with labels of which about half count; none in `masked`."""
    rng, data = np.random.RandomState(seed), []
    for number, count in enumerate(rows):
        labels = rng.randint(0, CLASSES, (count, TOKENS)).astype(np.int32)
        labels[rng.rand(count, TOKENS) < (1.0 if number in masked else 0.5)] = -1
        data.append((rng.randn(count, FEATURES).astype(np.float32), labels))
    return data


def oracle(network, window, coefficients=COEFFICIENTS):
    """Return the gradient of a window as one vector, and the mean of each term that counts in it."""
    weight, bias = (p.asnumpy().astype(np.float64) for p in (network.dense.weight, network.dense.bias))
    divisors = [sum((y >= 0).sum() for _, y in window), sum(len(x) for x, _ in window), len(window)]
    factors = [coefficients.get(name, 1.0) / max(count, 1) for name, count in zip(WEIGHT, divisors)]
    of_weight, of_bias, sums = np.zeros_like(weight), np.zeros_like(bias), np.zeros(3)
    for x, y in window:
        x = x.astype(np.float64)
        logits = (x @ weight.T + bias).reshape(-1, TOKENS, CLASSES)
        logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        p, counts = np.exp(logs), (y >= 0)[..., None]
        answers = np.eye(CLASSES)[np.maximum(y, 0)]
        entropies = (p * logs).sum(-1, keepdims=True)
        sums += [-(answers * logs * counts).sum(), (p * logs).sum(), (logits**2).mean()]
        gradient = factors[0] * (p - answers) * counts + factors[1] * p * (logs - entropies)
        gradient = (gradient + factors[2] * 2 * logits / logits.size).reshape(len(x), -1)
        of_weight += gradient.T @ x
        of_bias += gradient.sum(0)
    means = {name: total / count for name, total, count in zip(WEIGHT, sums, divisors) if count}
    return np.concatenate([of_weight.ravel(), of_bias]), means


def flat(arrays):
    return np.concatenate([np.asarray(array, np.float64).ravel() for array in arrays])


def loss_of(means, coefficients=COEFFICIENTS):
    """Return the loss of a window whose terms have these means."""
    return sum(coefficients.get(name, 1.0) * mean for name, mean in means.items())


def error(found, expected):
    """Return the largest error of a gradient, in parts of its norm."""
    return np.abs(found - expected).max() / np.linalg.norm(expected)
