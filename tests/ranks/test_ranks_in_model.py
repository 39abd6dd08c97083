"""Do several processes train with MindSpore's Model and its callbacks like a single one?"""

from __future__ import annotations

import numpy as np
import pytest

import ranks as program
from reference import miss


@pytest.fixture(scope="module")
def in_model(job):
    return [rank["in model"] for rank in job[0]]


def check_like_one_process(in_model, name):
    results = [rank[name] for rank in in_model]
    assert all(result["digest"] == results[0]["digest"] for result in results)
    model = program.driver_of(program.network_of(), clip_norm=0.5)
    records = program.train(model, program.all_data(program.ROWS), program.N * len(results))
    arrays = [np.array(array, np.float32) for array in results[0]["parameters"]]
    expected = [parameter.asnumpy() for parameter in model._step.optimizer.parameters]
    assert miss(arrays, expected, rtol=1e-5, atol=1e-7) <= 1
    assert results[0]["updates"] == len(records)
    for rank in results:  # at a window's end all see the loss of all rows: callbacks decide alike
        assert [rank["losses"][end] for end in (2, 4, 7, 9)] == pytest.approx([r.loss for r in records], rel=1e-5)


@pytest.mark.host
@pytest.mark.parametrize("name", ["trained", "zero"])
def test_ranks_in_model_train_like_one_process(in_model, name):
    check_like_one_process(in_model, name)


def test_different_numbers_of_micro_batches_are_rejected(in_model):
    assert all("the same number of micro-batches in an epoch" in rank["another number"] for rank in in_model)


def test_stopped_run_is_resumed(in_model):
    digests = {rank["trained"]["digest"] for rank in in_model}
    assert len({rank["resumed"]["digest"] for rank in in_model} | digests) == 1
    assert {rank["resumed"]["micro-batches"] for rank in in_model} == {10}


@pytest.mark.parametrize(("name", "updates"), [("stopped", 2), ("stopped inside", 1)])
def test_callback_of_one_rank_stops_all_ranks(in_model, name, updates):
    """After the epoch, or after the next evaluation."""
    results = [rank[name] for rank in in_model]
    assert [result["updates"] for result in results] == [updates] * len(results)
    assert all(result["results"] == results[0]["results"] for result in results) and len(results[0]["results"]) == 1
