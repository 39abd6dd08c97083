"""Tokens are drawn with the probabilities of the scores, and only from what the network has seen."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from mindspore import Tensor

from ms_accum.app import sampling
from ms_accum.app.sampling import choose, continued

pytestmark = pytest.mark.host


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_have_the_probabilities_of_the_scores(temperature):
    scores, random = np.log([0.5, 0.3, 0.2]), np.random.default_rng(0)
    counts = np.bincount([choose(scores, temperature, random) for _ in range(20_000)], minlength=3) / 20_000
    expected = np.array([0.5, 0.3, 0.2]) ** (1 / temperature)
    assert counts == pytest.approx(expected / expected.sum(), abs=0.015)
    assert counts != pytest.approx([1 / 3] * 3, abs=0.015)  # the mutant: all alike


def test_temperature_0_takes_the_most_probable():
    assert [choose([1.0, 3.0, 2.0], 0, np.random.default_rng(seed)) for seed in range(9)] == [1] * 9


def test_large_and_small_scores_do_not_overflow():
    assert choose([1e4, -1e4, -np.inf], 0.01, np.random.default_rng(0)) == 0


@pytest.mark.parametrize("scores", [[np.nan, 1.0], [np.inf, 1.0]])
def test_scores_that_are_not_finite_are_an_error(scores):
    with pytest.raises(ValueError, match="not finite"):
        choose(scores, 1.0, np.random.default_rng(0))


@pytest.fixture
def network(monkeypatch):
    """A network whose next token is one more than the last one that it sees, and the rows that it has seen."""
    rows = []

    def scores_of(row):
        rows.append(row.asnumpy().copy())
        return Tensor(np.eye(10, dtype=np.float32)[(row.asnumpy() + 1) % 10] * 100)

    monkeypatch.setattr(sampling, "compiled", lambda owner, network, compiles: scores_of)
    monkeypatch.setattr(sampling, "training_mode", lambda network, mode: pytest.MonkeyPatch.context())
    return rows


def test_network_sees_the_last_tokens_in_a_row_of_one_length(network):
    options = {"context": 4, "temperature": 1.0, "seed": 1}
    assert list(continued(None, [7, 8], 5, **options)) == [9, 0, 1, 2, 3]
    assert [row.tolist() for row in network] == [
        [[7, 8, 0, 0]],
        [[7, 8, 9, 0]],
        [[7, 8, 9, 0]],
        [[8, 9, 0, 1]],
        [[9, 0, 1, 2]],
    ]


def test_tokens_come_one_by_one(network):
    tokens = continued(None, [0], 10**9, context=4, temperature=0, seed=1)
    assert list(itertools.islice(tokens, 3)) == [1, 2, 3] and len(network) == 3
