"""Which split of a window is the fastest?"""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable

from .. import _check
from .trials import Trial, peak_so_far, run_apart

_MOST = 5  # doublings: from 32 micro-batches in a window to 1
_WINDOWS, _LEAST, _MUCH = 3, 0.4, 5.0  # windows per split, and the minimum and maximum of their seconds in total
_CLOSE = 1.1  # splits at most this much slower than the fastest are timed once more
_NOTHING = "nothing"


def sizes(rows: int, most: int) -> list[int]:
    """Return the micro-batch sizes to try, smallest first: the window in 1, 2, 4, ... parts, up to `most` rows."""
    parts = [-(-rows >> doublings) for doublings in range(rows.bit_length() + 1)]
    fitting = [size for size in dict.fromkeys(parts) if size <= most]
    return fitting[: _MOST + 1][::-1]


def fastest_first(trials: Sequence[Trial]) -> list[Trial]:
    """Return the trials that fit, the fastest first."""
    return sorted((tried for tried in trials if tried.fits), key=lambda tried: (tried.seconds or 0, tried.rows))


def race(owner: str, trial: Callable[[int], Any], rows: int, limit: int | None) -> tuple[Trial, ...]:
    """Time different splits of a window in a separate process; return all trials, smallest micro-batch first.

    If even the smallest does not fit, smaller ones are tried.
    """
    most = rows
    failed: list[Trial] = []
    while True:
        trials = _round(owner, trial, sizes(rows, most), limit)
        if trials[0].fits or trials[0].rows == 1:
            return (*trials, *failed)
        failed = [trials[0], *failed]
        most = trials[0].rows - 1


def _round(owner: str, trial: Callable, candidates: list[int], limit: int | None) -> list[Trial]:
    """Time these sizes in one process, until one does not fit."""

    def rows_at(results: list[tuple]) -> int:
        return candidates[min(len(results), len(candidates) - 1)]

    done = run_apart(owner, partial(_time_all, trial, candidates), limit, rows_at)
    if done.results and done.results[-1][0] == _NOTHING:
        rule = "a function that returns a function, which trains the window once more"
        remedy = "Return one, or use prefer='memory'."
        _check.refuse(TypeError, owner, "trial", rule, f"one that returns {done.results[-1][1]}", remedy)
    seconds: dict[int, float] = {}
    peaks: dict[int, int] = {}
    for size, took, peak in done.results:
        seconds[size] = min(took, seconds.get(size, took))
        peaks.setdefault(size, peak)  # of the first pass: the second pass begins with the largest size
    trials = [Trial(size, peaks[size], limit is None or peaks[size] <= limit, seconds[size]) for size in peaks]
    if len(peaks) < len(candidates):
        trials.append(Trial(candidates[len(peaks)], done.peak, False))
    return trials


def _time_all(trial: Callable[[int], Any], candidates: list[int], send: Callable[[tuple], None]) -> None:
    """Time each size, smallest first because a process's peak only rises; then time the fastest once more."""
    seconds: dict[int, float] = {}
    for rows in candidates:
        window = trial(rows)
        if not callable(window):
            return send((_NOTHING, type(window).__name__))
        seconds[rows] = _time(window)
        del window
        gc.collect()  # a network has reference cycles, and keeps its memory until collected
        send((rows, seconds[rows], peak_so_far()))
    limit = _CLOSE * min(seconds.values())
    again = [rows for rows in reversed(candidates) if seconds[rows] <= limit]
    for rows in again if len(again) > 1 else ():
        send((rows, _time(trial(rows)), peak_so_far()))
        gc.collect()
    return None


def _time(window: Callable[[], Any]) -> float:
    """Return the seconds of the fastest window: other load on the machine can only slow a window down."""
    took: list[float] = []
    while sum(took) < _LEAST or (len(took) < _WINDOWS and sum(took) < _MUCH):
        start = time.perf_counter()
        window()
        took.append(time.perf_counter() - start)
    return min(took)
