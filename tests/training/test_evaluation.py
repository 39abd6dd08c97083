"""Do all ranks stop an evaluation together?"""

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


def test_evaluation_stops_before_any_batch():
    network = nn.Dense(3, 2)
    expected = list(evaluate(network, batches()))
    assert evaluate_together(network, batches(), None) == expected
    for stop in range(1, 6):
        calls = itertools.count(1)
        with pytest.raises(Stopped):
            evaluate_together(network, batches(), None, lambda calls=calls, stop=stop: next(calls) >= stop)
        assert next(calls) == stop + 1  # nothing is evaluated after that
    calls = itertools.count(1)
    assert evaluate_together(network, batches(), None, lambda: next(calls) >= 6) == expected


@pytest.mark.parametrize("other_ranks", [[0, 0, 0], [3, 8, 1]], ids=["no other rank", "another rank"])
@pytest.mark.parametrize("stops", [True, False])
def test_ranks_stop_evaluation_together(other_ranks, stops, monkeypatch):
    """Each takes part in the sum, also one that has stopped: the others would wait for it."""
    summed = []

    def total(counts, group):
        summed.append(list(counts))
        return [count + other for count, other in zip(counts, other_ranks)]

    monkeypatch.setattr(evaluation, "total", total)
    monkeypatch.setattr(evaluation, "take_from_rank_0", lambda parameters, group: None)
    network = nn.Dense(3, 2)
    if stops or other_ranks[2]:
        with pytest.raises(Stopped):
            evaluate_together(network, batches(), Group(0, 2), lambda: stops)
    else:
        assert evaluate_together(network, batches(), Group(0, 2), lambda: stops) == list(evaluate(network, batches()))
    assert len(summed) == 1 and summed[0][2] == stops and summed[0][1] == (0 if stops else 20)
