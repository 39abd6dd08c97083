"""Do all ranks give an evaluation up together, and none alone?"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from mindspore import Tensor, nn

from ms_accum import Group, Stopped, evaluate
from ms_accum.training import evaluation
from ms_accum.training.evaluation import evaluate_together

pytestmark = pytest.mark.host


def batches():
    rng = np.random.RandomState(1)
    return [
        (Tensor(rng.randn(4, 3).astype(np.float32)), Tensor(rng.randint(0, 2, 4).astype(np.int32))) for _ in range(5)
    ]


def test_it_stops_before_a_batch_or_not_at_all():
    network = nn.Dense(3, 2)
    expected = list(evaluate(network, batches()))
    assert evaluate_together(network, batches(), None) == expected
    for stop in range(1, 6):
        asked = itertools.count(1)
        with pytest.raises(Stopped):
            evaluate_together(network, batches(), None, lambda asked=asked, stop=stop: next(asked) >= stop)
        assert next(asked) == stop + 1  # nothing is evaluated after that
    asked = itertools.count(1)
    assert evaluate_together(network, batches(), None, lambda: next(asked) >= 6) == expected


@pytest.mark.parametrize("others", [[0, 0, 0], [3, 8, 1]], ids=["nobody else", "another rank"])
@pytest.mark.parametrize("own", [True, False])
def test_ranks_stop_together(others, own, monkeypatch):
    """Each takes part in the sum, also one that has stopped: the others would wait for it."""
    told = []

    def total(counts, group):
        told.append(list(counts))
        return [mine + theirs for mine, theirs in zip(counts, others)]

    monkeypatch.setattr(evaluation, "total", total)
    monkeypatch.setattr(evaluation, "take_from_rank_0", lambda parameters, group: None)
    network = nn.Dense(3, 2)
    if own or others[2]:
        with pytest.raises(Stopped):
            evaluate_together(network, batches(), Group(0, 2), lambda: own)
    else:
        assert evaluate_together(network, batches(), Group(0, 2), lambda: own) == list(evaluate(network, batches()))
    assert len(told) == 1 and told[0][2] == own and told[0][1] == (0 if own else 20)
