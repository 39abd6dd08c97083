"""GPT is a causal Transformer, in graphs and in float16 too, and its windows are weighted by tokens."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from model_zoo import GPT
from ms_accum import GradientAccumulation, TrainClear, TrainForwardBackward
from reference import miss

pytestmark = pytest.mark.host
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


def valid_tokens(tokens, following):
    return int((following.asnumpy() != -100).sum())


def micro_batch(rng, *lengths):
    """Return sentences of these lengths, padded."""
    following = rng.randint(0, WORDS, (len(lengths), LONGEST)).astype(np.int32)
    for row, length in zip(following, lengths):
        row[length:] = -100
    return tokens(rng, len(lengths)), Tensor(following)


def norm(x, gain, bias):
    return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gain + bias


def attention(x, dense, name, heads=2, reach=0):
    """Return what each token takes from those up to `reach` behind it."""
    mixed = []
    query, key, value = (np.split(dense(x, f"{name}.{part}"), heads, 1) for part in ("query", "key", "value"))
    for q, k, v in zip(query, key, value):
        scores = np.exp(q @ k.T / np.sqrt(q.shape[1])) * np.tri(len(x), k=reach)
        mixed.append(scores / scores.sum(1, keepdims=True) @ v)
    return dense(np.concatenate(mixed, 1), f"{name}.projection")


def logits_of(weights, row, layers=2, reach=0):
    """Compute GPT for one sentence in NumPy."""

    def dense(x, name):
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def norm_of(x, name):
        return norm(x, weights[f"{name}.gamma"], weights[f"{name}.beta"])

    x = weights["embedding.embedding_table"][row] + weights["position.embedding_table"][: len(row)]
    for block in (f"blocks.{number}" for number in range(layers)):
        x = x + attention(norm_of(x, f"{block}.attention_norm"), dense, f"{block}.attention", reach=reach)
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
    # The planted fault: each token also sees the one behind it.
    wrong = np.stack([logits_of(weights, row, reach=1) for row in read.asnumpy()])
    assert np.abs(actual - wrong).max() > 100 * 1e-5


def test_attention_is_causal(rng):
    network, read = gpt(), tokens(rng)
    other = read.asnumpy().copy()
    other[:, 5:] = (other[:, 5:] + 1) % WORDS
    before, after = network(read).asnumpy(), network(Tensor(other)).asnumpy()
    np.testing.assert_allclose(before[:, :5], after[:, :5], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(network(read[:, :5]).asnumpy(), before[:, :5], rtol=1e-5, atol=1e-5)
    assert np.abs(before[:, 5:] - after[:, 5:]).max() > 1e-3


@pytest.mark.graph
def test_graph_mode_equals_pynative_mode(rng):
    network, read = gpt(layers=1), tokens(rng)

    @ms.jit
    def forward(tokens):
        return network(tokens)

    actual = forward(read).asnumpy()
    ms.set_context(mode=ms.PYNATIVE_MODE)
    np.testing.assert_allclose(actual, network(read).asnumpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.graph
@pytest.mark.slow
@pytest.mark.parametrize("level", ["O2"])
def test_training_in_float16(level, rng):
    network = GPT(WORDS, context=LONGEST, width=16, heads=2, layers=1)
    read, following = micro_batch(rng, 2, 5, 8)
    full_precision = loss_fn(network(read), following).asnumpy()
    optimizer = nn.Momentum(network.trainable_params(), 0.1, 0.9)
    network = ms.amp.auto_mixed_precision(network, level, ms.float16)
    assert 0 < abs(loss_fn(network(read), following).asnumpy() - full_precision) < 0.01  # it is float16
    model = GradientAccumulation(network, loss_fn, optimizer, weight=valid_tokens)
    seen = []
    for _ in range(5):
        model.train_process(1, [(read, following)] * 2, 2, report=(), ckpt_path=None)
        seen.append(float(loss_fn(network(read), following).asnumpy()))
    assert model.updates == 5 and np.isfinite(seen).all() and seen[-1] < full_precision - 0.05


class Window:
    """Sums of a window's micro-batches, by the Cells."""

    def __init__(self, network):
        optimizer = nn.SGD(network.trainable_params(), 0.1)
        self.grad_sum = optimizer.parameters.clone(prefix="grad_sum", init="zeros")
        self.weight_sum = Parameter(Tensor(0.0, ms.float32), name="weight_sum", requires_grad=False)
        with_loss, weights = nn.WithLossCell(network, loss_fn), {"weight_sum": self.weight_sum}
        self.add = TrainForwardBackward(with_loss, optimizer, self.grad_sum, **weights).set_train()
        self.clear = TrainClear(self.grad_sum, **weights)

    def mean(self, micro_batches, weigh):
        """Return the loss and the gradients of a window."""
        self.clear()
        weights = [weigh(*columns) for columns in micro_batches]
        losses = [
            self.add(*columns, weight=Tensor(weight, ms.float32)).asnumpy()
            for columns, weight in zip(micro_batches, weights)
        ]
        gradients = [total.asnumpy() / self.weight_sum.asnumpy() for total in self.grad_sum]
        return np.average(losses, weights=weights), gradients


@pytest.mark.host
def test_window_weighted_by_tokens_equals_large_batch(rng):
    """And a mean of means, which is the planted fault, is not."""
    window = Window(GPT(WORDS, context=LONGEST, width=16, heads=2, layers=1))
    micro_batches = [micro_batch(rng, 1, 1), micro_batch(rng, 2, 1), micro_batch(rng, 8, 8)]
    joined = tuple(Tensor(np.concatenate([tensor.asnumpy() for tensor in column])) for column in zip(*micro_batches))
    loss, expected = window.mean([joined], valid_tokens)
    exact, gradients = window.mean(micro_batches, valid_tokens)
    np.testing.assert_allclose(exact, loss, rtol=1e-5)
    assert miss(gradients, expected, 1e-5, 1e-6) <= 1
    wrong, of_means = window.mean(micro_batches, lambda *columns: 1)
    assert abs(wrong - loss) > 100 * 1e-5 * loss and miss(of_means, expected, 1e-5, 1e-6) > 100


def test_driver_warns_about_tokens_without_weight(rng):
    network = GPT(WORDS, context=LONGEST, width=16, heads=2, layers=1)
    model = GradientAccumulation(network, loss_fn, nn.SGD(network.trainable_params(), 0.1))
    with pytest.warns(RuntimeWarning, match="weight"):
        model.train_process(1, [micro_batch(rng, 1, 8)] * 2, 2, report=(), ckpt_path=None)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: GPT(0), ValueError, "'vocab_size' must be an int >= 1, but got 0"),
        (lambda: GPT("a"), TypeError, "'vocab_size' must be an int >= 1, but got type str"),
        (lambda: GPT(5, layers=0), ValueError, "'layers' must be an int >= 1"),
        (lambda: GPT(5, context=0), ValueError, "'context' must be"),
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
    assert miss(table, embedding, 1e-4) > 100  # the mutant: only one of the uses
    for ours, other in zip(others, expected):
        assert ours == pytest.approx(other, rel=1e-4, abs=1e-6)
