"""Do ranks divide each term of a loss by what it counts on all of them?"""

from __future__ import annotations

import numpy as np
import pytest
from mindspore import Tensor

import ranks_terms as program
import several_terms

N = program.N


@pytest.fixture(scope="module")
def ranks(job):
    return [rank["terms"] for rank in job[0]]


def windows_of(size, data=program.data_of):
    """Return the micro-batches of all ranks in each window."""
    by_rank = [data(rank) for rank in range(size)]
    return [[part for data in by_rank for part in data[:N]], [part for data in by_rank for part in data[N:]]]


def expected_of(windows):
    """Return what is left of the parameters, and the means of each window's terms."""
    network, means = several_terms.Net(), []
    for window in windows:
        gradient, of_window = several_terms.oracle(network, window)
        means.append(of_window)
        for parameter in network.trainable_params():
            moved, gradient = gradient[: parameter.size].reshape(parameter.shape), gradient[parameter.size :]
            parameter.set_data(Tensor(parameter.asnumpy() - moved.astype(np.float32)))
    return several_terms.flat(parameter.asnumpy() for parameter in network.trainable_params()), means


def check(results, windows):
    parameters, means = expected_of(windows)
    start = several_terms.flat(parameter.asnumpy() for parameter in several_terms.Net().trainable_params())
    for result in results:
        assert several_terms.error(several_terms.flat(result["parameters"]) - start, parameters - start) <= 1e-6
    assert results[0]["terms"] == [pytest.approx(each, rel=1e-5) for each in means]  # reports are on rank 0
    assert results[0]["losses"] == pytest.approx([several_terms.loss_of(each) for each in means], rel=1e-5)
    assert len({result["digest"] for result in results}) == 1


@pytest.mark.parametrize("way", ["trained", "in step", "zero 2", "in model"])
def test_divisors_are_those_of_all_ranks(ranks, way):
    check([rank[way] for rank in ranks], windows_of(len(ranks)))


def test_micro_batch_of_one_rank_takes_its_shares_on_all(ranks):
    results = [rank["left out"] for rank in ranks]
    windows = windows_of(len(ranks))
    check(results, [windows[0][1:], windows[1]])
    assert [result["left out"] for result in results] == [1] * len(results)


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


def test_one_small_exchange_of_ranks_in_a_window(ranks):
    """Of what three terms count, and of what a window needs: `Shared`."""
    assert [rank["exchanges"] for rank in ranks] == [[9] * 3] * len(ranks)
