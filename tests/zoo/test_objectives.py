"""Do objectives of several terms train in windows as in one large batch?"""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn, ops

from model_zoo import AuxiliaryHeads, DistillationLoss, PolicyLoss
from ms_accum import verify

pytestmark = pytest.mark.modes

ROWS, TOKENS, VOCABULARY = 11, 6, 8


class Model(nn.Cell):
    """The scores of the next token, from the last one."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(VOCABULARY, VOCABULARY, embedding_table="normal")

    def construct(self, tokens):
        return self.table(tokens)


def sequences(seed=1):
    """Return tokens, the next ones, and a mask of which the first rows have more."""
    rng = np.random.RandomState(seed)
    tokens = rng.randint(0, VOCABULARY, (ROWS, TOKENS)).astype(np.int32)
    lengths = np.sort(rng.randint(1, TOKENS + 1, ROWS))[::-1]
    return tokens, np.roll(tokens, -1, 1), (np.arange(TOKENS) < lengths[:, None]).astype(np.float32)


def policy_batch():
    rng = np.random.RandomState(2)
    tokens, targets, mask = sequences()
    logs = [np.log(rng.uniform(0.05, 0.3, (ROWS, TOKENS))).astype(np.float32) for _ in range(2)]
    return tuple(map(Tensor, (tokens, targets, mask, rng.randn(ROWS).astype(np.float32), *logs)))


def labelled(tokens, targets, mask):
    return np.where(mask > 0, targets, -100).astype(np.int32)


DIVISORS = {
    "grpo": lambda losses, mask: (losses * mask).sum(1) @ (1 / mask.sum(1)) / ROWS,
    "dr_grpo": lambda losses, mask: (losses * mask).sum() / (ROWS * TOKENS),
    "dapo": lambda losses, mask: (losses * mask).sum() / mask.sum(),
}


@pytest.mark.parametrize("division", DIVISORS)
def test_policy_loss_is_its_definition_and_that_of_the_large_batch(division):
    ms.set_seed(1)
    network, loss_fn, batch = Model(), PolicyLoss(division, max_tokens=TOKENS), policy_batch()
    tokens, targets, mask, advantages, old, reference = (column.asnumpy().astype(np.float64) for column in batch)
    scores = network(batch[0]).asnumpy().astype(np.float64)
    logs = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
    chosen = np.take_along_axis(logs, targets.astype(int)[..., None], -1)[..., 0]
    ratio = np.exp(chosen - old)
    policy = -np.minimum(ratio * advantages[:, None], np.clip(ratio, 0.8, 1.2) * advantages[:, None])
    kl = np.exp(reference - chosen) - (reference - chosen) - 1
    found = loss_fn(network(batch[0]), *batch[1:])
    for name, losses in (("policy", policy), ("kl", kl)):
        assert float(found[name].asnumpy()) == pytest.approx(DIVISORS[division](losses, mask), rel=1e-5)
    assert verify(network, loss_fn, batch, 3, weight=loss_fn.weight, coefficients={"kl": 0.1}, rtol=1e-6).ok


def test_wrong_division_is_named():
    ms.set_seed(1)
    result = verify(Model(), PolicyLoss("dapo"), policy_batch(), 3, weight={"policy": "rows", "kl": "rows"})
    assert not result.ok and "'policy' is off by" in result.diagnosis and "'kl' is off by" in result.diagnosis


def test_distillation_is_that_of_the_large_batch():
    ms.set_seed(1)
    tokens, targets, mask = sequences()
    teacher = np.random.RandomState(3).randn(ROWS, TOKENS, VOCABULARY).astype(np.float32)
    batch = tuple(map(Tensor, (tokens, labelled(tokens, targets, mask), teacher)))
    loss_fn = DistillationLoss()
    assert verify(Model(), loss_fn, batch, 3, weight=loss_fn.weight, coefficients={"kl": 0.5}, rtol=1e-6).ok
    wrong = verify(Model(), loss_fn, batch, 3, weight={"ce": "rows", "kl": "rows"})
    assert not wrong.ok and "'ce' is off by" in wrong.diagnosis and "'kl' is off by" not in wrong.diagnosis


class Heads(nn.Cell):
    def __init__(self):
        super().__init__()
        self.body, self.heads = nn.Dense(6, 8), nn.CellList([nn.Dense(8, 3) for _ in range(3)])

    def construct(self, x):
        x = ops.relu(self.body(x))
        return self.heads[0](x), self.heads[1](x), self.heads[2](x)


def test_auxiliary_heads_are_those_of_the_large_batch():
    ms.set_seed(1)
    rng, loss_fn = np.random.RandomState(1), AuxiliaryHeads(2)
    labels = np.sort(rng.randint(0, 3, ROWS)).astype(np.int32)
    labels[:3] = -100
    batch = Tensor(rng.randn(ROWS, 6), ms.float32), Tensor(labels)
    assert verify(Heads(), loss_fn, batch, 3, weight=loss_fn.weight, coefficients=loss_fn.coefficients, rtol=1e-6).ok


def test_unknown_division_is_rejected():
    with pytest.raises(ValueError, match="'division' must be one of"):
        PolicyLoss("mean")
