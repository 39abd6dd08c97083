"""GPT is a causal Transformer, in graphs and in float16 too, and its windows are weighted by tokens."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, ops

from model_zoo import GPT

pytestmark = pytest.mark.usefixtures("eager")
WORDS, LONGEST = 11, 8


def gpt(layers=2):
    network = GPT(WORDS, context=LONGEST, width=16, heads=2, layers=layers)
    for parameter in network.get_parameters():  # weights as after training: at 0.02 attention hardly matters
        if parameter.name.endswith("weight") or "embedding_table" in parameter.name:
            parameter.set_data(parameter * 10)
    return network


def tokens(rng, rows=3, length=LONGEST):
    return Tensor(rng.randint(0, WORDS, (rows, length)).astype(np.int32))


def loss_fn(logits, following):
    return ops.cross_entropy(ops.cast(logits, ms.float32).reshape(-1, WORDS), following.reshape(-1))


def norm(x, gain, bias):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gain + bias


def attention(x, dense, name, heads=2):
    """Return what each token takes from those before it, and from itself."""
    mixed = []
    query, key, value = (np.split(dense(x, f"{name}.{part}"), heads, 1) for part in ("query", "key", "value"))
    for q, k, v in zip(query, key, value):
        scores = np.exp(q @ k.T / np.sqrt(q.shape[1])) * np.tri(len(x))
        mixed.append(scores / scores.sum(1, keepdims=True) @ v)
    return dense(np.concatenate(mixed, 1), f"{name}.projection")


def logits_of(weights, row, layers=2):
    """Compute GPT for one sentence in NumPy."""

    def dense(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def norm_of(x, name):
        return norm(x, weights[f"{name}.gamma"], weights[f"{name}.beta"])

    x = weights["embedding.embedding_table"][row] + weights["position.embedding_table"][: len(row)]
    for block in (f"blocks.{number}" for number in range(layers)):
        x = x + attention(norm_of(x, f"{block}.attention_norm"), dense, f"{block}.attention")
        inner = dense(norm_of(x, f"{block}.feed_forward_norm"), f"{block}.feed_forward.0")
        erf = ops.erf(Tensor(inner / np.sqrt(2), ms.float32)).asnumpy()
        x = x + dense(inner * (1 + erf) / 2, f"{block}.feed_forward.2")
    return dense(norm_of(x, "norm"), "head")


def test_gpt_equals_numpy_reference(rng):
    network, read = gpt(), tokens(rng, 2, 6)
    weights = {name: parameter.asnumpy().astype(np.float64) for name, parameter in network.parameters_dict().items()}
    actual = network(read).asnumpy()
    expected = np.stack([logits_of(weights, row) for row in read.asnumpy()])
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GPT(0), ValueError, "'vocab_size' must be an int >= 1, but got 0"),
        (lambda: GPT(5, width=10, heads=4), ValueError, "'width' must be a multiple of 4 heads, but got 10"),
        (lambda: GPT(5, context=4)(ops.zeros((2, 5), ms.int32)), ValueError, "at most 4 per row, but got 5"),
    ],
)
def test_invalid_arguments_are_rejected(make, error, message):
    with pytest.raises(error, match=message):
        make()


# Tied weights


def test_tied_head_gets_the_gradients_of_both_uses(rng):
    ms.set_seed(1)
    tied, untied = (GPT(WORDS, context=LONGEST, width=16, heads=2, tie_weights=tie) for tie in (True, False))
    names = [parameter.name for parameter in untied.trainable_params()]
    assert [parameter.name for parameter in tied.trainable_params()] == names[:-1] and names[-1] == "head.weight"
    for ours, other in zip(tied.trainable_params(), untied.trainable_params()):
        other.set_data(ours)
    untied.head.weight.set_data(tied.embedding.embedding_table)
    batch = tokens(rng), tokens(rng)

    def gradients(network):
        grad = ms.grad(lambda *columns: loss_fn(network(columns[0]), columns[1]), None, network.trainable_params())
        return [gradient.asnumpy() for gradient in grad(*batch)]

    (table, *others), (embedding, *expected, head) = gradients(tied), gradients(untied)
    assert table == pytest.approx(embedding + head, rel=1e-4, abs=1e-6)
    for ours, other in zip(others, expected):
        assert ours == pytest.approx(other, rel=1e-4, abs=1e-6)
