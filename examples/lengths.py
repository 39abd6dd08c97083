"""Train a small GPT on sequences of different lengths: micro-batches of few shapes, an update for so many tokens."""

import argparse

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from model_zoo import GPT
from ms_accum import GradientAccumulation, TokenBatches

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--epochs", type=int, default=10)
epochs = parser.parse_args().epochs
WORDS, LONGEST, IGNORED = 50, 64, -100


def sequence(length):
    """Return words that count up from any, and the word after each."""
    words = (np.arange(length + 1) + rng.randint(WORDS)) % WORDS
    return words[:-1], words[1:]


def loss_fn(scores, following):
    """Return the mean over the words that are not padding."""
    return ops.cross_entropy(scores.reshape(-1, WORDS), following.reshape(-1), ignore_index=IGNORED)


rng = np.random.RandomState(0)
lengths = np.clip(rng.lognormal(3, 0.6, 400), 2, LONGEST).astype(int)
samples = [sequence(length) for length in lengths]
data = TokenBatches(samples, tokens=512, pad=(0, IGNORED), longest=LONGEST, seed=1)
print(f"{len(data)} micro-batches of {', '.join(f'{rows} x {positions}' for rows, positions in data.shapes)}")
one_shape = TokenBatches(samples, tokens=512, pad=(0, IGNORED), longest=LONGEST, shapes=1)
print(f"padding {data.padding:.0%}; with one shape {one_shape.padding:.0%}")

ms.set_seed(1)
network = GPT(WORDS, context=LONGEST, width=32)
optimizer = nn.AdamWeightDecay(network.trainable_params(), 0.003)
model = GradientAccumulation(
    network, loss_fn, optimizer, weight=lambda words, following: (following != IGNORED).sum(), clip_norm=1.0
)
model.train_process(epochs, data, window_weight=1500, ckpt_path=None)  # an update for 1,500 words or a few more
print(f"{model.updates} updates for {epochs * int(lengths.sum()):,} words")
