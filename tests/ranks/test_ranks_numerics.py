"""Do all ranks treat non-finite gradients alike, and train like a single process otherwise?"""

from __future__ import annotations

import numpy as np
import pytest

import ranks_numerics as program

WAYS = ("at the end", "in step", "zero 1", "zero 2", "sums")


@pytest.fixture(scope="module")
def numerics(job):
    return [rank["numerics"] for rank in job[0]]


def weights_of(size, *, left_out=(), skipped=(), reduction="mean"):
    """Return the weight after each update, by its definition: x is the gradient of a row."""
    weight, weights = 0.0, []
    for first in range(0, 6, program.WINDOW):
        window = range(first, first + program.WINDOW)
        if first in skipped:
            continue
        terms = [
            (program.rows(rank, number), program.value(rank, number))
            for rank in range(size)
            for number in window
            if (rank, number) not in left_out
        ]
        total = sum(rows for rows, _ in terms) if reduction == "mean" else 1
        weight -= sum((rows if reduction == "mean" else 1) * value for rows, value in terms) / total
        weights.append(weight)
    return weights


def average_of(weights):
    average = weights[0]
    for weight in weights[1:]:
        average = 0.5 * average + 0.5 * weight
    return average


@pytest.mark.parametrize("way", WAYS)
def test_nonfinite_micro_batch_of_one_rank_is_left_out(numerics, way):
    results = [rank[way] for rank in numerics]
    reduction = "sum" if way == "sums" else "mean"
    expected = weights_of(len(results), left_out={(0, program.BAD)}, reduction=reduction)
    kept = weights_of(len(results), reduction=reduction)  # the planted fault: it counts
    for result in results:
        assert result["weights"] == pytest.approx([expected[-1]] * 2, rel=1e-6)
        assert result["weights"] != pytest.approx([kept[-1]] * 2, rel=1e-4)
        assert result["average"] == pytest.approx([average_of(expected)] * 2, rel=1e-6)
        assert result["counts"] == [3, 0, 0] and np.isfinite(result["loss"]).all()
    assert [result["left out"] for result in results] == [1] * len(results)  # on all ranks together
    assert results[0]["bad"] == [[], [program.BAD + 1], []]  # reports are on rank 0


def test_all_ranks_skip_the_nonfinite_window_of_one_rank(numerics):
    results = [rank["skipped"] for rank in numerics]
    expected = weights_of(len(results), skipped={2})
    for result in results:
        assert result["weights"] == pytest.approx([expected[-1]] * 2, rel=1e-6) and result["counts"] == [2, 1, 0]
        assert result["average"] == pytest.approx([average_of(expected)] * 2, rel=1e-6)


def test_nonfinite_window_raises_on_all_ranks(numerics):
    for rank in numerics:
        assert rank["raised"]["error"].startswith("For 'GradientAccumulation', the gradient of window 2 in epoch 1")
        assert rank["raised"]["counts"][0] == 1


@pytest.mark.parametrize("way", ["scaled", "scaled in a loop"])
def test_all_ranks_lower_the_loss_scale(numerics, way):
    results = [rank[way] for rank in numerics]
    assert [result["scale"] for result in results] == [2.0**14] * len(results)
    assert [result["counts"] for result in results] == [[2, 1, 1]] * len(results)
    assert all(result["weights"] == pytest.approx([-2.0] * 2) for result in results)
