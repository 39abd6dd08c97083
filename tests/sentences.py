"""Sentences of different lengths, a network that scores each word, and a loss that ignores some."""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from ms_accum import GradientAccumulation, TokenBatches

IGNORED, WORDS, TOKENS = -100, 7, 64
DISTRIBUTIONS = ("uniform", "lognormal", "two peaks")


def lengths_of(distribution, number=60):
    rng = np.random.RandomState(number)
    drawn = {
        "uniform": lambda: rng.randint(2, 49, number),
        "lognormal": lambda: rng.lognormal(2.0, 0.7, number),
        "two peaks": lambda: np.where(rng.rand(number) < 0.8, rng.normal(8, 2, number), rng.normal(40, 4, number)),
    }
    return np.clip(drawn[distribution](), 1, 50).astype(int)


def samples_of(lengths):
    """Return sentences, with a label for each word, some of which are ignored."""
    rng = np.random.RandomState(len(lengths))
    words = [rng.randint(1, WORDS, length) for length in lengths]
    labels = [np.where(rng.rand(len(row)) < 0.3, IGNORED, row).astype(np.int32) for row in words]
    return list(zip(words, labels))


def packed(samples, tokens=TOKENS, **options):
    return TokenBatches(samples, tokens, pad=(0, IGNORED), **options)


def one_batch(samples):
    """Return all samples padded to the longest, as one batch."""
    (batch,) = packed(samples, 56 * len(samples), shapes=1)
    return batch


class Tagger(nn.Cell):
    """A score of each word for each label."""

    def __init__(self):
        super().__init__()
        ms.set_seed(1)
        self.table = nn.Embedding(WORDS, WORDS)

    def construct(self, words):
        return self.table(words)


def loss_of(scores, labels):
    return ops.cross_entropy(scores.reshape(-1, WORDS), labels.reshape(-1), ignore_index=IGNORED)


def counted(words, labels):
    return (labels != IGNORED).sum()


def driver_of(weight=counted, **options):
    network = Tagger()
    optimizer = nn.SGD(network.trainable_params(), 1.0)
    return GradientAccumulation(network, loss_of, optimizer, weight=weight, **options)


def table_of(model):
    return model._network.table.embedding_table.asnumpy().copy()


def miss_of(actual, expected):
    return np.linalg.norm(actual - expected) / np.linalg.norm(expected)
