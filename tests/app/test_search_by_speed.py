"""The search finds the fastest split of a window that fits, and stores it."""

from __future__ import annotations

import json
import os
from functools import partial

import pytest

import memory_runs as runs
from ms_accum import find_micro_batch_size
from ms_accum.app.search import MicroBatch, SearchCache, sizes
from ms_accum.app.trials import Trial, run_trial

MIB = 2**20
on_linux = pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="peak memory is read from /proc")


@pytest.mark.parametrize(
    ("rows", "max_rows", "expected"),
    [
        (512, 512, [16, 32, 64, 128, 256, 512]),
        (512, 15, [1, 2, 4, 8]),
        (250, 250, [8, 16, 32, 63, 125, 250]),
        (6, 6, [1, 2, 3, 6]),
        (1, 1, [1]),
    ],
)
def test_sizes_to_try(rows, max_rows, expected):
    assert sizes(rows, max_rows) == expected


@on_linux
@pytest.mark.slow
def test_fastest_is_preferred_to_largest():
    result = find_micro_batch_size(runs.costs, 64, memory_budget="8GiB")
    assert (result.micro_batch_size, result.mini_steps, result.effective_batch) == (16, 4, 64)
    assert [trial.rows for trial in result.trials] == [2, 4, 8, 16, 32, 64] and all(t.fits for t in result.trials)
    assert result.trials[3].seconds == pytest.approx(0.016, rel=0.5) and result.trials[4].seconds > 0.1
    assert result.advice == "" and len(result.table.splitlines()) == 7
    assert result.table.splitlines()[4].split()[:2] == ["16", "4"]


@on_linux
@pytest.mark.slow
def test_largest_is_found_on_request():
    result = find_micro_batch_size(runs.costs, 64, memory_budget="8GiB", prefer="memory")
    assert (result.micro_batch_size, result.mini_steps) == (64, 1) and result.trials[0].seconds is None
    assert result.advice == "The complete batch of 64 rows fits into memory: you need not accumulate."


@on_linux
@pytest.mark.slow
def test_size_that_does_not_fit_is_not_chosen():
    idle = run_trial("test", runs.ends_well, 1, None).peak
    result = find_micro_batch_size(runs.takes_memory_and_time, 64, memory_budget=int((idle + 250 * MIB) / 0.98))
    assert [trial.fits for trial in result.trials] == [True, True, True, True, False]  # of 32 rows; 64 are not tried
    assert result.micro_batch_size == 2 and "does not fit, above" in result.table.splitlines()[-1]


@on_linux
@pytest.mark.slow
def test_smaller_sizes_are_tried_if_none_fits():
    idle = run_trial("test", runs.ends_well, 1, None).peak
    result = find_micro_batch_size(runs.takes_memory_and_time, 640, memory_budget=int((idle + 120 * MIB) / 0.98))
    assert result.micro_batch_size in (1, 2, 3, 5, 10) and result.trials[-1] == max(result.trials)
    assert not result.trials[-1].fits and result.trials[0].rows == 1


@on_linux
@pytest.mark.slow
@pytest.mark.parametrize(
    ("trial", "error", "message"),
    [
        (
            runs.ends_well,
            TypeError,
            "'trial' must be a function that returns a function, which trains the window once more, but got one that "
            "returns NoneType. Return one, or use prefer='memory'.",
        ),
        (partial(runs.costs, most=8), RuntimeError, "runs with 16 rows in a new process, but got ValueError: 16 are"),
    ],
)
def test_invalid_trials_are_rejected(trial, error, message):
    with pytest.raises(error, match=message):
        find_micro_batch_size(trial, 64, memory_budget="8GiB")


def test_unknown_preference_is_rejected():
    with pytest.raises(ValueError, match="'prefer' must be one of"):
        find_micro_batch_size(runs.costs, 64, memory_budget="8GiB", prefer="both")


FOUND = MicroBatch(32, 2, 10**8, (Trial(32, 10**8, True, 0.5), Trial(64, None, False)), 64)


def test_result_is_stored(tmp_path):
    path = tmp_path / "folder" / "found.json"
    assert SearchCache(path, model="mlp").get() is None
    SearchCache(path, model="mlp").store(FOUND)
    SearchCache(path, model="lenet5").store(FOUND._replace(micro_batch_size=64))
    assert SearchCache(path, model="mlp").get() == FOUND
    assert SearchCache(path, model="lenet5").get().micro_batch_size == 64
    assert SearchCache(path, model="mlp", amp="O2").get() is None  # another run


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", None])
def test_unusable_file_gives_no_result(tmp_path, text):
    path = tmp_path / "found.json"
    SearchCache(path, model="mlp").store(FOUND)
    key = next(iter(json.loads(path.read_text())))
    path.write_text(json.dumps({key: {"trials": 3}}) if text is None else text)
    assert SearchCache(path, model="mlp").get() is None
    SearchCache(path, model="mlp").store(FOUND)
    assert SearchCache(path, model="mlp").get() == FOUND


def test_failed_store_is_not_an_error(tmp_path):
    (tmp_path / "file").write_text("")
    SearchCache(tmp_path / "file" / "found.json").store(FOUND)
