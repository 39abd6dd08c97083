"""Searches for the micro-batch that is the fastest, or the largest that fits into memory, and keeps the result."""

from __future__ import annotations

import contextlib
import gc
import json
import math
import os
import platform
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Callable, NamedTuple, NoReturn

import mindspore as ms

from .. import _check
from ..ranks.group import is_launched
from . import amounts
from .trials import Trial, available_memory, on_host, peak_of, peak_so_far, run_in_new_process, run_trial

_MARGIN = 0.02  # the peak memory of the same process varies by 1 % from run to run
SPEED, MEMORY = "speed", "memory"


@_check.documented
class MicroBatch(NamedTuple):
    """The result of `find_micro_batch_size`: the fastest or the largest micro-batch that fits into memory."""

    micro_batch_size: int
    """int, the number of rows of the micro-batch."""
    mini_steps: int
    """int, the number of micro-batches in a window of the effective batch; the last may be shorter."""
    peak: int
    """int, the peak memory of its trial in bytes: of the process on CPU, else of the device."""
    trials: tuple[Trial, ...]
    """tuple[Trial], all trials in order: rows, peak, whether it fits, seconds per window."""
    effective_batch: int = 0
    """int, the number of rows of the window."""

    @property
    def table(self) -> str:
        """str, a line for each trial: rows, micro-batches per window, time per window, rows per second, peak."""
        lines = [f"{'rows':>8} {'N':>6} {'ms/window':>10} {'rows/s':>8}  peak"]
        for trial in self.trials:
            count = math.ceil(self.effective_batch / trial.rows)
            peak = amounts.short(trial.peak) if trial.peak else ""
            time_of_window = "" if trial.seconds is None else f"{1000 * trial.seconds:,.1f}"
            speed = "" if trial.seconds is None else f"{self.effective_batch / trial.seconds:,.0f}"
            if not trial.fits:
                peak = f"does not fit, above {peak}" if peak else "does not fit"
            lines.append(f"{trial.rows:>8,} {count:>6,} {time_of_window:>10} {speed:>8}  {peak}")
        return "\n".join(lines)

    @property
    def advice(self) -> str:
        """str, a sentence if accumulation is not needed; else empty."""
        if self.mini_steps > 1:
            return ""
        reason = "and is the fastest" if self.trials[0].seconds is not None else "into memory"
        rows = _check.quantity(self.effective_batch, "row")
        return f"The complete batch of {rows} fits {reason}: you need not accumulate."


def find_micro_batch_size(
    trial: Callable[[int], Any],
    effective_batch: int,
    *,
    memory_budget: int | str | None = None,
    prefer: str = "speed",
) -> MicroBatch:
    """Find the fastest or the largest micro-batch that fits into a memory budget, by trial runs.

    Trials run in another process, which is killed when it exceeds the budget. Peaks vary by 1 % from run to run, so
    2 % of the budget is kept free.

    With ``"speed"``, the window is timed in 1, 2, 4, ... to 32 parts, or in more parts if these do not fit. The fastest
    split usually does not have the largest micro-batches: each call has a cost, but small micro-batches stay in the
    cache.

    With ``"memory"``, the first trial uses the complete effective batch. The next sizes are found by linear
    interpolation of the measured peaks or by bisection, mostly 4 to 7 trials in total. The result is at most a 16th
    (below 32 rows: 1 row) smaller than a size that was tried and does not fit.

    Args:
        trial (Callable[[int], Any]): gets the number of rows of a micro-batch, builds a network, trains one window in
            such micro-batches, with an update, and returns a function that trains the window once more (not needed for
            ``"memory"``). Another process imports it, so it must be a function at a module's top level, or a
            `functools.partial` of one, in a program whose main code is below ``if __name__ == "__main__":``.
        effective_batch (int): the number of rows of a window.
        memory_budget (Union[int, str, None]): bytes, or a text such as ``"2GiB"`` or ``"512 MB"``. On CPU it is
            required, and limits the complete process, including Python and MindSpore. Default: ``None``, the memory of
            the device.
        prefer (str): ``"speed"`` or ``"memory"``. Default: ``"speed"``.

    Returns:
        MicroBatch; use it as ``train_process(..., micro_batch_size=found.micro_batch_size)``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or a micro-batch of 1 row does not fit; the message contains the
            memory that 1 row needs.
        RuntimeError: If a trial fails for another reason than memory, a launcher started this process, or the
            device is the CPU and the system is not Linux.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from functools import partial
        >>> import mindspore as ms
        >>> from mindspore import nn
        >>> from model_zoo import MLP, create_dataset
        >>> from ms_accum import GradientAccumulation, find_micro_batch_size
        >>> def trial(rows):
        ...     net = MLP()
        ...     optimizer = nn.Adam(net.trainable_params())
        ...     model = GradientAccumulation(net, nn.CrossEntropyLoss(), optimizer)
        ...     dataset = create_dataset(batch_size=128, image_size=28)
        ...     batch = next(dataset.create_tuple_iterator(num_epochs=1))
        ...     window = partial(model.train_process, 1, [batch], micro_batch_size=rows, report=(), ckpt_path=None)
        ...     window()
        ...     return window
        >>> if __name__ == "__main__":
        ...     found = find_micro_batch_size(trial, 128, memory_budget="4GiB")
        ...     print([tried.rows for tried in found.trials], found.micro_batch_size in (64, 128))
        [4, 8, 16, 32, 64, 128] True
    """
    owner = "find_micro_batch_size"
    if not callable(trial):
        _check.raise_invalid(TypeError, owner, "trial", "a function of the rows", type(trial).__name__)
    rows = _check.positive_int(owner, "effective_batch", effective_batch)
    if is_launched():  # otherwise all ranks would run trials at once, in the same memory
        raise RuntimeError(f"For '{owner}', there must be a single process. Run it once, and give its result to all.")
    if on_host() and not peak_of("self"):
        raise RuntimeError(f"For '{owner}', the system must be Linux, to measure the memory of a process on CPU.")
    by_speed = _check.one_of(owner, "prefer", prefer, (SPEED, MEMORY)) == SPEED
    if memory_budget is None and on_host():
        rule = "given on CPU, where a process could use all memory of the machine"
        _check.raise_invalid(ValueError, owner, "memory_budget", rule, None, "Give for example '2GiB'.")
    budget = None if memory_budget is None else amounts.amount(owner, "memory_budget", memory_budget)
    limit = _limit_of(budget)
    if by_speed:
        trials = _time_splits(owner, trial, rows, limit)
    else:
        trials = search(partial(run_trial, owner, trial, limit=limit), rows, limit)
    fitting = [result for result in trials if result.fits]
    if not fitting:
        _raise_budget_too_small(owner, trial, min(trials), budget)
    best_trial = min(fitting, key=lambda result: (result.seconds or 0, result.rows)) if by_speed else max(fitting)
    return MicroBatch(best_trial.rows, math.ceil(rows / best_trial.rows), best_trial.peak or 0, trials, rows)


def _limit_of(budget: int | None) -> int | None:
    """Return the peak memory in bytes up to which a trial fits into a budget."""
    return None if budget is None else int(budget * (1 - _MARGIN))


def _raise_budget_too_small(owner: str, trial: Callable, smallest: Trial, budget: int | None) -> NoReturn:
    """Raise an error with the memory that 1 row needs; on CPU a trial with half of the available memory measures it."""
    if on_host():
        smallest = run_trial(owner, trial, 1, available_memory() // 2)
    needed = "more than the device has"
    if smallest.peak is not None:
        needed = amounts.short(int(smallest.peak / (1 - _MARGIN)))
    rule = f"{'at least' if smallest.fits else 'above'} {needed}, which training with a micro-batch of 1 row needs"
    _check.raise_invalid(ValueError, owner, "memory_budget", rule, None if budget is None else amounts.short(budget))


# The largest that fits

# Peak memory is nearly affine in the rows: up to this number of trials interpolate linearly, later ones bisect.
_INTERPOLATED = 8


def search(attempt: Callable[[int], Trial], max_rows: int, limit: int | None) -> tuple[Trial, ...]:
    """Try sizes from 1 to `max_rows` until the largest that fits is found to within a 16th; return all trials.

    Args:
        attempt (Callable[[int], Trial]): tries a size.
        max_rows (int): the largest size, tried first.
        limit (Optional[int]): the largest peak that fits, for interpolation; ``None`` if unknown.
    """
    trials = [attempt(max_rows)]
    while True:
        rows = _next_rows(trials, limit)
        if rows is None:
            return tuple(trials)
        trials.append(attempt(rows))


def _next_rows(trials: Sequence[Trial], limit: int | None) -> int | None:
    """Return the size to try next, or None if the largest that fits has been found."""
    fitting = sorted((trial.rows, trial.peak) for trial in trials if trial.fits)
    failing = [trial.rows for trial in trials if not trial.fits]
    low = fitting[-1][0] if fitting else 0
    high = min(failing, default=0)
    step = max(1, low // 16)
    if high - low <= step:
        return None
    if not fitting:
        return max(1, high // 4 ** len(failing))
    guess = math.isqrt(low * high)
    if limit is not None and len(trials) < _INTERPOLATED:
        if len(fitting) > 1:
            guess = _interpolated_rows(fitting[-2:], limit) or guess
        elif low >= 8:  # a second point for the line: it fits and runs fast, but the smallest sizes are off the line
            return low // 4
    # Keep the required distance from sizes already tried: then interpolation with a small error ends the search.
    return max(min(guess, high - max(1, high // 16)), low + step)


def _interpolated_rows(points: Sequence[tuple], limit: int) -> int | None:
    """Return the size at which the line through two peaks reaches the limit; None if the line does not rise."""
    (smaller, lower), (larger, higher) = points
    if higher <= lower:
        return None
    return int(larger + (limit - higher) * (larger - smaller) / (higher - lower))


# The fastest

_DOUBLINGS = 5  # from 32 micro-batches in a window to 1
_WINDOWS = 3  # timed of each split, unless they take longer than _MOST_SECONDS
_LEAST_SECONDS, _MOST_SECONDS = 0.4, 5.0
_CLOSE_RATIO = 1.1  # splits at most this much slower than the fastest are timed once more


def sizes(rows: int, max_rows: int) -> list[int]:
    """Return the micro-batch sizes to try, smallest first: the window in 1, 2, 4, ... parts, up to `max_rows` rows."""
    halves = {math.ceil(rows / 2**doublings) for doublings in range(rows.bit_length() + 1)}
    return sorted(size for size in halves if size <= max_rows)[-_DOUBLINGS - 1 :]


def _time_splits(owner: str, trial: Callable[[int], Any], rows: int, limit: int | None) -> tuple[Trial, ...]:
    """Time different splits of a window in a separate process; return all trials, smallest micro-batch first.

    If even the smallest does not fit, smaller ones are tried.
    """
    max_rows = rows
    failed: list[Trial] = []
    while True:
        trials = _time_sizes(owner, trial, sizes(rows, max_rows), limit)
        if trials[0].fits or trials[0].rows == 1:
            return (*trials, *failed)
        failed = [trials[0], *failed]
        max_rows = trials[0].rows - 1


def _time_sizes(owner: str, trial: Callable, candidates: Sequence[int], limit: int | None) -> list[Trial]:
    """Time these sizes, smallest first, in one process, until one does not fit."""
    outcome = run_in_new_process(owner, partial(_time_in_child, trial, candidates), candidates, limit)
    seconds: dict[int, float] = {}
    peaks: dict[int, int] = {}
    for size, duration, peak in outcome.results:
        if duration is None:
            rule = "a function that returns a function, which trains the window once more"
            remedy = "Return one, or use prefer='memory'."
            _check.raise_invalid(TypeError, owner, "trial", rule, f"one that returns {peak}", remedy)
        seconds[size] = min(duration, seconds.get(size, duration))
        peaks.setdefault(size, peak)  # of the first pass: the second pass begins with the largest size
    trials = [Trial(size, peaks[size], limit is None or peaks[size] <= limit, seconds[size]) for size in peaks]
    if len(peaks) < len(candidates):
        trials.append(Trial(candidates[len(peaks)], outcome.peak, False))
    return trials


def _time_in_child(trial: Callable[[int], Any], candidates: Sequence[int], send: Callable[[tuple], None]) -> None:
    """Time each size, smallest first because a process's peak only rises; then time the fastest once more.

    Sends the size, the seconds and the peak; in the place of the last two None and a type if `trial` returns no window.
    """
    seconds: dict[int, float] = {}
    for rows in candidates:
        window = trial(rows)
        if not callable(window):
            send((rows, None, type(window).__name__))
            return
        seconds[rows] = _time(window)
        del window
        gc.collect()  # a network has reference cycles, and keeps its memory until collected
        send((rows, seconds[rows], peak_so_far()))
    close = [rows for rows in reversed(candidates) if seconds[rows] <= _CLOSE_RATIO * min(seconds.values())]
    if len(close) > 1:
        for rows in close:
            send((rows, _time(trial(rows)), peak_so_far()))
            gc.collect()


def _time(window: Callable[[], Any]) -> float:
    """Return the seconds of the fastest window: other load on the machine can only slow a window down."""
    durations: list[float] = []
    while sum(durations) < _LEAST_SECONDS or (len(durations) < _WINDOWS and sum(durations) < _MOST_SECONDS):
        start = time.perf_counter()
        window()
        durations.append(time.perf_counter() - start)
    return min(durations)


# Results of earlier searches


class SearchCache:
    """A JSON file with the results of searches, by settings. If it can't be used, the search is repeated.

    Args:
        path (str): the file; its folder is created when a result is stored.
        **settings (Any): what the result depends on, besides the machine, the device and the version of MindSpore.
    """

    def __init__(self, path: str | os.PathLike[str], **settings: Any):
        self._path = Path(path)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
        environment = {"machine": platform.node(), "cores": cores, "device": ms.get_context("device_target")}
        self._key = json.dumps({**settings, **environment, "mindspore": ms.__version__}, sort_keys=True)

    def get(self) -> MicroBatch | None:
        """Return the result of an earlier search with the same settings, or None."""
        with contextlib.suppress(KeyError, TypeError):
            fields = self._read()[self._key]
            return MicroBatch(**{**fields, "trials": tuple(Trial(*trial) for trial in fields["trials"])})
        return None

    def store(self, result: MicroBatch) -> None:
        """Store a result."""
        text = json.dumps({**self._read(), self._key: result._asdict()}, indent=1)
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.unlink(missing_ok=True)  # not written into: it may be a link
            self._path.write_text(text, encoding="utf-8")

    def _read(self) -> dict[str, Any]:
        with contextlib.suppress(OSError, ValueError):
            if self._path.is_file():  # a pipe would be waited for
                results = json.loads(self._path.read_text(encoding="utf-8"))
                return results if isinstance(results, dict) else {}
        return {}
