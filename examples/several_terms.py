"""Train on a cross entropy per token, a divergence per row and a balance of the window: one weight against terms."""

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ms_accum import GradientAccumulation, WindowStatistic

IGNORED, EXPERTS = -100, 4


class Tagger(nn.Cell):
    """Return the scores of three tags for each of 8 tokens, and the probability of each expert."""

    def __init__(self):
        super().__init__()
        self.router, self.head = nn.Dense(6, EXPERTS), nn.Dense(6, 3 * EXPERTS)

    def construct(self, tokens):
        routing = ops.softmax(self.router(tokens), -1)
        scores = self.head(tokens).reshape(*tokens.shape[:2], EXPERTS, 3)
        return ops.sum(scores * ops.expand_dims(routing, -1), 2), routing


def balance(sums):
    """Return the balance of the experts' load, 1 if it is even, from sums over tokens: chosen, probability, number."""
    return EXPERTS * ops.sum(sums[:EXPERTS] * sums[EXPERTS:-1]) / ops.square(sums[-1])


def terms(outputs, tags):
    """Return the mean over tokens with a tag, the mean over rows, and the sums for the balance."""
    scores, routing = outputs
    logs = ops.log_softmax(scores, -1)
    chosen = ops.one_hot(ops.argmax(routing, -1), EXPERTS).reshape(-1, EXPERTS)
    return {
        "ce": ops.cross_entropy(scores.reshape(-1, 3), tags.reshape(-1), ignore_index=IGNORED),
        "kl": ops.mean(ops.sum(ops.exp(logs) * logs, (1, 2))),  # to even probabilities, without a constant
        "balance": ops.cat((ops.sum(chosen, 0), ops.sum(routing, (0, 1)), ops.ones(1) * chosen.shape[0])),
    }


def one_number(outputs, tags):
    """Return the same as one loss, with the balance of the micro-batch."""
    losses = terms(outputs, tags)
    return losses["ce"] + 0.1 * losses["kl"] + 0.5 * balance(losses["balance"])


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
several = {"ce": tagged, "kl": "rows", "balance": WindowStatistic(balance)}
for name, loss_fn, options in (
    ("one weight, rows", one_number, {}),
    ("one weight, tokens", one_number, {"weight": tagged}),
    ("terms", terms, {"weight": several, "coefficients": {"kl": 0.1, "balance": 0.5}}),
):
    difference = np.linalg.norm(gradient(loss_fn, window, **options) - expected) / np.linalg.norm(expected)
    print(f"{name}: relative difference of the gradient {difference:.1e}")
