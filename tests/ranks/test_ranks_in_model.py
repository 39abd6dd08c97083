"""Do several processes train with MindSpore's Model and its callbacks like a single one?"""

from __future__ import annotations

import pytest


@pytest.fixture(scope="module")
def in_model(job):
    return [rank["in model"] for rank in job[0]]


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
