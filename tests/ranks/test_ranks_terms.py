"""Do ranks divide each term of a loss by what it counts on all of them?"""

from __future__ import annotations

import numpy as np
import pytest

import ranks_terms as program

N = program.N


@pytest.fixture(scope="module")
def ranks(job):
    return [rank["terms"] for rank in job[0]]


def windows_of(size, data=program.data_of):
    """Return the micro-batches of all ranks in each window."""
    by_rank = [data(rank) for rank in range(size)]
    return [[part for data in by_rank for part in data[:N]], [part for data in by_rank for part in data[N:]]]


def test_factors_are_shares_of_all_ranks(ranks):
    windows = windows_of(len(ranks))
    rows = sum(len(x) for x, _ in windows[0])
    shares = [len(x) / rows for x, _ in windows[0]]
    factors = [values for rank in ranks for values in rank["factors"]]
    assert [values[1] for values in factors] == pytest.approx(shares)
    assert [values[2] for values in factors] == pytest.approx([1 / len(factors)] * len(factors))


def test_window_in_which_nothing_counts_is_skipped_by_all(ranks):
    results = [rank["nothing counts"] for rank in ranks]
    assert [result["counts"] for result in results] == [[2, 1]] * len(results)
    assert len({result["digest"] for result in results}) == 1
    means = results[0]["terms"]
    assert [sorted(each) for each in means] == [["ce"], [], ["ce"]] and np.isnan(results[0]["losses"][1])
    assert results[0]["losses"][0] == pytest.approx(means[0]["ce"], rel=1e-6) and means[0]["ce"] > 0


def test_micro_batches_are_not_summed_twice(ranks):
    message = "'sync_every_micro_batch' must be False with several terms and nonfinite='skip_micro'"
    assert all(message in rank["refused"] for rank in ranks)
