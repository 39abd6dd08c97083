"""Finds the micro-batch with which a window trains fastest, within a budget."""

from __future__ import annotations

import os
import signal
import time
from functools import partial

import numpy as np
import pytest

from ms_accum import find_micro_batch_size, micro_batch_size

pytestmark = pytest.mark.usefixtures("eager")
GIB = 2**30


def costs(rows):
    """A window of 64 rows: a call costs 4 ms, and one with more than 16 rows 100 ms."""

    def window():
        time.sleep(0.004 * len(range(0, 64, rows)) + 0.1 * (rows > 16))

    window()
    return window


def takes_memory(rows):
    """Take 50 MiB a row."""
    arrays = [np.ones(50 * 2**17) for _ in range(rows)]
    return lambda: arrays


def ends(how, most, rows):
    """Fail with more than so many rows."""
    if rows > most:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        raise {"memory": MemoryError(), "error": ValueError("a\nreason")}[how]
    return lambda: None


def test_fastest_is_taken_and_not_the_largest(monkeypatch):
    """By a clock that the windows advance, in this process."""
    now = [0.0]

    def trial(rows):
        seconds = iter([9, {1: 5, 2: 3, 4: 2, 7: 4}[rows], 9])
        return lambda: now.__setitem__(0, now[0] + next(seconds))

    class Sender(list):
        send = list.append

    def run(trial, effective_batch, budget):
        micro_batch_size._try_sizes(trial, effective_batch, results := Sender())
        return results

    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(micro_batch_size, "_run", run)
    found = find_micro_batch_size(trial, 7, memory_budget=GIB)
    assert [(rows, seconds) for rows, seconds, _ in found.trials] == [(1, 5), (2, 3), (4, 2), (7, 4)]
    assert (found.micro_batch_size, found.mini_steps) == (4, 2)


@pytest.mark.slow
def test_budget_ends_the_search():
    found = find_micro_batch_size(takes_memory, 100, memory_budget=GIB)
    assert [rows for rows, _, _ in found.trials] in ([1, 2, 4, 8], [1, 2, 4])
    assert all(peak <= GIB for _, _, peak in found.trials)
    with pytest.raises(ValueError, match="'memory_budget' must be enough for a micro-batch of 1 row, but got 1048576"):
        find_micro_batch_size(takes_memory, 100, memory_budget=2**20)


@pytest.mark.parametrize("how", ["memory", "killed"])
def test_size_that_runs_out_of_memory_ends_the_search(how):
    found = find_micro_batch_size(partial(ends, how, 4), 10, memory_budget=8 * GIB)
    assert [rows for rows, _, _ in found.trials] == [1, 2, 4]


@pytest.mark.parametrize(
    ("trial", "message"),
    [
        (partial(ends, "error", 2), "'trial' must run, but got ValueError: a"),
        (partial(ends, "exit", 2), "'trial' must run, but got a process that ended with 3"),
        (print, "'trial' must run, but got TypeError: a trial that returns NoneType, not a function"),
    ],
)
def test_other_errors_are_raised(trial, message):
    with pytest.raises(RuntimeError, match=message):
        find_micro_batch_size(trial, 10, memory_budget=8 * GIB)


def test_arguments_are_checked():
    for arguments, error, message in (
        ((1, 2), TypeError, "'trial' must be a function of the rows, but got int"),
        ((costs, 0), ValueError, "'effective_batch' must be an int >= 1, but got 0"),
        ((costs, 2), ValueError, "'memory_budget' must be given on CPU"),
    ):
        with pytest.raises(error, match=message):
            find_micro_batch_size(*arguments)
