"""Trials in a separate process, and what they leave in this one."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest

import memory_runs as runs
from helpers import gone
from ms_accum import find_micro_batch_size
from ms_accum.app.trials import Trial, peak_of, run_trial

MIB = 2**20
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")


@pytest.fixture(scope="module")
def idle():
    """The peak of a process that does nothing but import MindSpore."""
    return run_trial("test", runs.ends_well, 1, None).peak


def test_peak_is_measured_and_output_is_hidden(idle, capfd):
    done = run_trial("test", runs.takes_memory, 300, idle + 500 * MIB)
    assert done.fits and done.rows == 300
    assert done.peak - idle == pytest.approx(300 * MIB, rel=0.1)
    assert capfd.readouterr() == ("", "")


def test_trial_that_exceeds_limit_is_stopped(idle):
    peak_before = peak_of("self")
    done = run_trial("test", runs.takes_memory, 100_000, idle + 200 * MIB)
    assert not done.fits and idle + 200 * MIB < done.peak < idle + 1000 * MIB
    assert multiprocessing.active_children() == [] and peak_of("self") - peak_before < 50 * MIB


ALONE = """
import sys
from functools import partial
sys.path[:0] = sys.argv[1:3]
import memory_runs as runs
from helpers import gone
from ms_accum.app import trials
if __name__ == "__main__":
    trial = partial(getattr(runs, sys.argv[3]), sys.argv[4])
    print(trials.run_trial("test", trial, int(sys.argv[5]), int(sys.argv[6])).fits)
"""


def alone(folder, trial, rows, limit):
    """Run a trial from a process of its own; the trial's file is `folder / "noted"`."""
    (folder / "alone.py").write_text(ALONE)
    where = [str(ROOT), str(ROOT / "tests"), trial, str(folder / "noted"), str(rows), str(limit)]
    return subprocess.Popen([sys.executable, "alone.py", *where], cwd=folder, stdout=subprocess.PIPE, text=True)


@pytest.mark.slow
def test_mindspore_trial_may_come_near_limit():
    """Its pools map a gigabyte at once, and touch little of it."""
    trial = partial(runs.trains, "lenet")
    peak = run_trial("test", trial, 64, None).peak
    assert run_trial("test", trial, 64, peak + 100 * MIB).fits


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="asked of Linux")
def test_trial_ends_with_its_parent(tmp_path):
    starter = alone(tmp_path, "waits", 1, 2**40)
    while not (tmp_path / "noted").exists():
        assert starter.poll() is None
        time.sleep(0.05)
    starter.kill()
    starter.communicate()
    assert gone((tmp_path / "noted").read_text())


@pytest.mark.parametrize(
    "trial",
    [
        pytest.param(partial(runs.raises, MemoryError()), marks=pytest.mark.slow),
        partial(runs.raises, RuntimeError("Device memory not enough.")),
        runs.is_killed,
        pytest.param(runs.aborts, marks=pytest.mark.slow),
    ],
    ids=["MemoryError", "RuntimeError", "SIGKILL", "SIGABRT"],
)
def test_out_of_memory_does_not_fit(trial):
    assert run_trial("test", trial, 8, None) == Trial(8, None, False)


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        (partial(runs.raises, ValueError("no such layer\nsecond line")), "ValueError: no such layer"),
        pytest.param(partial(runs.leaves, 3), "a process that ended with exit code 3", marks=pytest.mark.slow),
        (runs.NotThere(), "a process that ended with exit code 1"),
    ],
    ids=["error", "exit", "not importable"],
)
def test_other_failure_is_an_error(trial, message):
    with pytest.raises(RuntimeError) as caught:
        find_micro_batch_size(trial, 8, memory_budget="64GiB", prefer="memory")
    rule = "'trial' must be a function that runs with 8 rows in a new process"
    assert str(caught.value) == f"For 'find_micro_batch_size', {rule}, but got {message}."
    assert ("raise error" in str(caught.value.__cause__)) == ("ValueError" in message)


@pytest.mark.slow
def test_largest_that_fits_is_found(idle):
    budget = int((idle + 400 * MIB) / 0.98)
    result = find_micro_batch_size(runs.takes_memory, 1000, memory_budget=budget, prefer="memory")
    assert 350 <= result.micro_batch_size <= 405 and result.mini_steps == 3
    assert Trial(result.micro_batch_size, result.peak, True) in result.trials and len(result.trials) <= 7


def test_row_that_does_not_fit_reports_memory_needed():
    with pytest.raises(ValueError, match=r"'memory_budget' must be at least [\d.]+ MiB, which training with a micro-"):
        find_micro_batch_size(runs.ends_well, 2, memory_budget="10MiB")


@pytest.mark.parametrize(
    ("arguments", "error", "match"),
    [
        ((lambda rows: None, 8, "1GiB"), TypeError, "'trial' must be a function at a module's top level, which a new"),
        ((3, 8, "1GiB"), TypeError, "'trial' must be a function of the rows, but got int"),
        ((runs.ends_well, 0, "1GiB"), ValueError, "'effective_batch' must be an int >= 1, but got 0"),
        (
            (runs.ends_well, 8, "1 GiX"),
            ValueError,
            "'memory_budget' must be an amount of memory above 0, .* got '1 GiX'",
        ),
        ((runs.ends_well, 8, 0), ValueError, "'memory_budget' must be an amount of memory above 0, .* but got 0"),
        ((runs.ends_well, 8, 1.5), TypeError, "'memory_budget' must be an amount of memory above 0, .* but got 1.5"),
        ((runs.ends_well, 8, True), TypeError, "'memory_budget' must be an amount of memory"),
        ((runs.ends_well, 8, None), ValueError, "'memory_budget' must be given on CPU, .* Give for example '2GiB'."),
    ],
)
def test_invalid_arguments_are_rejected(arguments, error, match):
    trial, rows, budget = arguments
    with pytest.raises(error, match=f"For 'find_micro_batch_size', {match}"):
        find_micro_batch_size(trial, rows, memory_budget=budget)
