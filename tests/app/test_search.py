"""The search finds the largest micro-batch that fits, in few trials."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ms_accum import find_micro_batch_size
from ms_accum.app.search import _next_rows, search
from ms_accum.app.trials import Trial


def attempts(peak, limit):
    """Return a trial of a memory curve, which is stopped at the limit as a real one is."""
    return lambda rows: Trial(rows, min(peak(rows), limit + 1), peak(rows) <= limit)


def check(trials, peak, max_rows, limit):
    """Return the faults of trials, by brute force over all sizes."""
    largest = max((rows for rows in range(1, max_rows + 1) if peak(rows) <= limit), default=0)
    chosen = max((trial.rows for trial in trials if trial.fits), default=0)
    faults = []
    if len({trial.rows for trial in trials}) < len(trials) or not all(1 <= trial.rows <= max_rows for trial in trials):
        faults.append("tried twice, or out of range")
    if not chosen <= largest <= chosen + max(1, chosen // 16) - (chosen > 0):
        faults.append(f"{chosen} instead of {largest}")
    return faults


CURVES = {
    "affine": lambda base, slope, most: lambda rows: int(base + slope * rows),
    "square": lambda base, slope, most: lambda rows: int(base + slope * rows * rows / most),
    "root": lambda base, slope, most: lambda rows: int(base + slope * math.sqrt(rows * most)),
    "steps": lambda base, slope, most: lambda rows: int(base + slope * 2 ** math.ceil(math.log2(rows))),
    "cliff": lambda base, slope, most: lambda rows: int(base + slope + slope * most * (rows > most / 3)),
    "flat": lambda base, slope, most: lambda rows: int(base),
}


@pytest.mark.parametrize("curve", CURVES)
def test_search_agrees_with_brute_force(curve, rng):
    counts = []
    for _ in range(400):
        most = int(2 ** rng.uniform(0, 12))
        base, slope = int(rng.uniform(0, 10**9)), 10 ** rng.uniform(0, 7)
        peak = CURVES[curve](base, slope, most)
        limit = int(rng.uniform(0.9 * base, 1.1 * peak(most)))
        trials = search(attempts(peak, limit), most, limit)
        assert check(trials, peak, most, limit) == []
        counts.append(len(trials))
    assert max(counts) <= 8 + math.log2(4096) and np.mean(counts) <= (5 if curve in ("affine", "flat") else 8)


@pytest.mark.parametrize("limit", [0.2, 0.3, 0.5, 0.8, 0.97])
@pytest.mark.parametrize("most", [32, 128, 1000])
def test_affine_peaks_with_noise_need_few_trials(most, limit, rng):
    counts = []
    for _ in range(50):
        bound = int(10**9 * limit)
        noise = {rows: rng.uniform(-1e6, 1e6) for rows in range(1, most + 1)}
        trials = search(attempts(lambda rows: 10**8 + 9 * 10**8 * rows / most + noise[rows], bound), most, bound)  # noqa: B023
        assert any(trial.fits for trial in trials)
        counts.append(len(trials))
    assert max(counts) <= 10 and np.mean(counts) <= 7


def test_complete_batch_that_fits_needs_one_trial():
    assert [trial.rows for trial in search(attempts(lambda rows: rows, 99), 64, 99)] == [64]


def test_no_size_fits():
    trials = search(attempts(lambda rows: 100, 99), 1000, 99)
    assert [trial.rows for trial in trials] == [1000, 250, 15, 1]


@pytest.mark.parametrize("largest", [1, 5, 77, 127])
def test_search_without_peaks_bisects(largest):
    trials = search(lambda rows: Trial(rows, None, rows <= largest), 128, None)
    chosen = max(trial.rows for trial in trials if trial.fits)
    assert chosen <= largest <= chosen * 17 / 16 and len(trials) <= 11


def test_search_in_launched_process_is_rejected(monkeypatch):
    monkeypatch.setenv("MS_ROLE", "MS_WORKER")
    with pytest.raises(RuntimeError, match="For 'find_micro_batch_size', there must be a single process. Run it once"):
        find_micro_batch_size(print, 8, memory_budget="4GiB")


def test_early_stop_is_detected():
    def one_guess(attempt, most, limit):
        trials = [attempt(most)]
        trials.append(attempt(_next_rows(trials, limit)))
        return trials

    assert check(one_guess(attempts(lambda rows: rows, 70), 128, 70), lambda rows: rows, 128, 70) == [
        "32 instead of 70"
    ]
