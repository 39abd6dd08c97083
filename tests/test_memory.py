"""The memory that training needs, measured in processes of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from ms_accum import native
from running import run_python

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc"),
]
PARAMETERS = 2 * (4096 + 1) * 4096 * 4 / 2**20  # MB of "wide"


def peaks(folder, network, rows, *runs, **settings):
    """Return the peaks in MB after each run, all in one process: see memory_runs.py."""
    done = run_python(Path(__file__).with_name("memory_runs.py"), network, rows, *runs, cwd=folder, **settings)
    assert done.returncode == 0, done.stderr
    return [float(line) for line in done.stdout.split()[-len(runs) :]]


def test_mean_needs_no_more_memory_than_sum(tmp_path):
    without = {native.SWITCH: "0"}  # operators of our own, which the mutant does not reach
    for settings in ({}, without):
        (mean,), (total,) = (peaks(tmp_path, network, 8, "2x6", **settings) for network in ("wide", "sums"))
        assert mean <= total + 0.5 * PARAMETERS
    assert peaks(tmp_path, "zeros", 8, "2x6", **without)[0] > total + 0.75 * PARAMETERS


def test_accumulating_needs_at_most_twice_the_model_size(tmp_path):
    (window_of_1,), (window_of_2, window_of_64) = (
        peaks(tmp_path, "wide", 4, *runs) for runs in (["1x4"], ["2x4", "64x64"])
    )
    # One set is the accumulators. The other is there while gradients are added or normed; the goal is to lose it.
    assert 0.75 * PARAMETERS < window_of_2 - window_of_1 < 2.1 * PARAMETERS
    assert window_of_64 - window_of_2 < 0.25 * PARAMETERS


def test_peak_does_not_depend_on_window(tmp_path):
    first, *_, last = peaks(tmp_path, "images", 64, "2x16", "4x16", "16x16", "64x64")
    assert last < 1.05 * first
    assert peaks(tmp_path, "images", 256, "2x16")[-1] > 1.05 * first  # a larger micro-batch is seen


def test_peak_does_not_grow_over_4000_micro_batches(tmp_path):
    early, late = peaks(tmp_path, "small", 8, "4x500", "4x3500")
    assert late - early < 5
