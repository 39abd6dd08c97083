"""The loss of the next token is MindSpore's, and padding does not count."""

from __future__ import annotations

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

from model_zoo.data.text import IGNORED
from model_zoo.next_token import LossOfTargets, LossOfTokens, NextTokenLoss, count_targets

pytestmark = pytest.mark.usefixtures("eager")
ROWS, LENGTH, KINDS = 3, 5, 7


@pytest.fixture
def batch(rng):
    targets = rng.randint(0, KINDS, (ROWS, LENGTH)).astype(np.int32)
    targets[0, 2:] = targets[2, 4:] = IGNORED
    return Tensor(rng.randn(ROWS, LENGTH, KINDS).astype(np.float32)), Tensor(targets)


def test_mean_and_gradient_are_those_of_cross_entropy(batch):
    logits, targets = batch
    flat = nn.CrossEntropyLoss()

    def expected(logits, targets):
        return flat(logits.reshape(-1, KINDS), targets.reshape(-1))

    for ours, other in zip(ms.value_and_grad(NextTokenLoss())(*batch), ms.value_and_grad(expected)(*batch)):
        assert ours.asnumpy() == pytest.approx(other.asnumpy(), rel=1e-5, abs=1e-7)
    assert float(NextTokenLoss()(*batch)) == pytest.approx(float(expected(*batch)), rel=1e-6)


def test_losses_are_those_of_the_targets(batch):
    logits, targets = (column.asnumpy() for column in batch)
    scores = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    chosen = -np.take_along_axis(scores, np.maximum(targets, 0)[..., np.newaxis], 2)[..., 0]
    losses = LossOfTargets()(*batch).asnumpy()
    assert losses == pytest.approx(np.where(targets == IGNORED, 0, chosen), rel=1e-5)
    assert losses.dtype == np.float32 and count_targets(*batch) == (losses > 0).sum() == 11


def test_no_target_gives_0_and_no_nan(batch):
    targets = Tensor(np.full((ROWS, LENGTH), IGNORED, np.int32))
    loss, gradient = ms.value_and_grad(NextTokenLoss())(batch[0], targets)
    assert float(loss) == 0 and not gradient.asnumpy().any()


def test_names_of_the_network_stay():
    network = nn.Dense(2, 3)
    before = [parameter.name for parameter in network.get_parameters()]
    assert [parameter.name for parameter in LossOfTokens(network).get_parameters()] == before
