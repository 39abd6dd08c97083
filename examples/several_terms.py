"""Train on a cross entropy per token and a divergence per row: one weight against terms."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_accum import GradientAccumulation

IGNORED = -100


class Tagger(nn.Cell):
    """Return the scores of three tags for each of 8 tokens."""

    def __init__(self):
        super().__init__()
        self.hidden, self.head = nn.Dense(6, 12), nn.Dense(12, 3)

    def construct(self, tokens):
        return self.head(ops.tanh(self.hidden(tokens)))


def terms(scores, tags):
    """Return the mean over tokens with a tag, and the mean over rows."""
    logs = ops.log_softmax(scores, -1)
    return {
        "ce": ops.cross_entropy(scores.reshape(-1, 3), tags.reshape(-1), ignore_index=IGNORED),
        "kl": ops.mean(ops.sum(ops.exp(logs) * logs, (1, 2))),  # to even probabilities, without a constant
    }


def one_number(scores, tags):
    """Return the same as one loss."""
    losses = terms(scores, tags)
    return losses["ce"] + 0.5 * losses["kl"]


def tagged(tokens, tags):
    """Return the number of tokens that have a tag."""
    return (tags != IGNORED).sum()


def gradient(loss_fn, micro_batches, **options):
    """Return the gradient of one window: plain SGD with a learning rate of 1 subtracts it."""
    ms.set_seed(1)
    network = Tagger()
    parameters = network.trainable_params()
    before = [parameter.asnumpy().copy() for parameter in parameters]
    model = GradientAccumulation(network, loss_fn, nn.SGD(parameters, 1.0), check="off", **options)
    model.train_process(1, micro_batches, mini_steps=len(micro_batches), report=(), ckpt_path=None)
    return np.concatenate([(old - new.asnumpy()).ravel() for old, new in zip(before, parameters)])


rng = np.random.default_rng(1)
tokens, tags = rng.normal(size=(24, 8, 6)).astype(np.float32), rng.integers(0, 3, (24, 8)).astype(np.int32)
tags[np.arange(8) >= rng.integers(1, 9, (24, 1))] = IGNORED
window = [
    (Tensor(tokens[rows]), Tensor(tags[rows])) for rows in (slice(10), slice(10, 14), slice(14, 22), slice(22, 24))
]
expected = gradient(one_number, [(Tensor(tokens), Tensor(tags))])
print(f"one big batch: norm of the gradient {np.linalg.norm(expected):.4f}")
for name, loss_fn, options in (
    ("one weight, rows", one_number, {}),
    ("one weight, tokens", one_number, {"weight": tagged}),
    ("terms", terms, {"weight": {"ce": tagged, "kl": "rows"}, "coefficients": {"kl": 0.5}}),
):
    difference = np.linalg.norm(gradient(loss_fn, window, **options) - expected) / np.linalg.norm(expected)
    print(f"{name}: relative difference of the gradient {difference:.1e}")
