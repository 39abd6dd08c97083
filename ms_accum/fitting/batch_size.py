"""How large should a micro-batch be?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, NamedTuple, NoReturn

from .. import _check
from ..ranks.group import is_launched
from . import amounts
from .splits import fastest_first, race
from .trials import Trial, available_memory, on_host, peak_of, run_trial

# The peak memory of the same process varies by 1 % from run to run.
MARGIN = 0.02

SPEED, MEMORY = "speed", "memory"

# Peak memory is nearly affine in the rows: up to this number of trials interpolate linearly, later ones bisect.
_ON_A_LINE = 8


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
        for tried in self.trials:
            count, peak = _pieces(self.effective_batch, tried.rows), amounts.short(tried.peak) if tried.peak else ""
            timed = "" if tried.seconds is None else f"{1000 * tried.seconds:,.1f}"
            speed = "" if tried.seconds is None else f"{self.effective_batch / tried.seconds:,.0f}"
            shown = peak if tried.fits else f"does not fit{peak and f', above {peak}'}"
            lines.append(f"{tried.rows:>8,} {count:>6,} {timed:>10} {speed:>8}  {shown}")
        return "\n".join(lines)

    @property
    def advice(self) -> str:
        """str, a sentence if accumulation is not needed; else empty."""
        if self.mini_steps > 1:
            return ""
        why = "and is the fastest" if self.trials[0].seconds is not None else "into memory"
        return f"The complete batch of {self.effective_batch:,} rows fits {why}: you need not accumulate."


def _pieces(rows: int, micro_batch: int) -> int:
    """Return the number of micro-batches in a window with this number of rows."""
    return len(range(0, rows, micro_batch))


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
        >>> from ms_accum import GradientAccumulation, find_micro_batch_size
        >>> from ms_accum.zoo import MLP, create_dataset
        >>> def trial(rows):
        ...     ms.set_context(mode=ms.GRAPH_MODE)
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
        _check.refuse(TypeError, owner, "trial", "a function of the rows", type(trial).__name__)
    rows = _check.positive_int(owner, "effective_batch", effective_batch)
    if is_launched():  # otherwise all ranks would run trials at once, in the same memory
        raise RuntimeError(f"For '{owner}', there must be a single process. Run it once, and give its result to all.")
    if on_host() and not peak_of("self"):
        raise RuntimeError(f"For '{owner}', the system must be Linux, to measure the memory of a process on CPU.")
    fast = _check.one_of(owner, "prefer", prefer, (SPEED, MEMORY)) == SPEED
    limit = _limit(owner, memory_budget)
    attempt = partial(run_trial, owner, trial, limit=limit)
    trials = race(owner, trial, rows, limit) if fast else search(attempt, rows, limit)
    fitting = fastest_first(trials) if fast else sorted((tried for tried in trials if tried.fits), reverse=True)
    if not fitting:
        _refuse_one_row(owner, trial, min(trials), memory_budget)
    best = fitting[0]
    return MicroBatch(best.rows, _pieces(rows, best.rows), best.peak or 0, trials, rows)


def _limit(owner: str, budget: int | str | None) -> int | None:
    """Return the largest allowed peak, or None for the memory of the device."""
    if budget is not None:
        return int(amounts.amount(owner, "memory_budget", budget) * (1 - MARGIN))
    if on_host():
        rule = "given on CPU, where a process could use all memory of the machine"
        _check.refuse(ValueError, owner, "memory_budget", rule, None, "Give for example '2GiB'.")
    return None


def search(attempt: Callable[[int], Trial], most: int, limit: int | None) -> tuple[Trial, ...]:
    """Try sizes from 1 to `most` until the largest that fits is found to within a 16th; return all trials.

    Args:
        attempt (Callable[[int], Trial]): tries a size.
        most (int): the largest size, tried first.
        limit (Optional[int]): the largest peak that fits, for interpolation; ``None`` if unknown.
    """
    trials = [attempt(most)]
    rows = _next_rows(trials, limit)
    while rows is not None:
        trials.append(attempt(rows))
        rows = _next_rows(trials, limit)
    return tuple(trials)


def _next_rows(trials: Sequence[Trial], limit: int | None) -> int | None:
    """Return the size to try next, or None if the largest that fits has been found."""
    fitting = sorted((tried.rows, tried.peak) for tried in trials if tried.fits)
    failing = [tried.rows for tried in trials if not tried.fits]
    low, high = (fitting[-1][0] if fitting else 0), min(failing, default=0)
    step = max(1, low >> 4)
    if high - low <= step:
        return None
    if not fitting:
        return max(1, high >> 2 * len(failing))
    if limit is None or len(trials) >= _ON_A_LINE:
        guess = math.isqrt(low * high)
    elif len(fitting) == 1:
        # Interpolation needs a second point: a smaller size, which fits and runs fast; the smallest are off the line.
        if low >= 8:
            return low >> 2
        guess = math.isqrt(low * high)
    else:
        guess = _on_the_line(fitting[-2:], limit) or math.isqrt(low * high)
    # Keep the required distance from sizes already tried: then interpolation with a small error ends the search.
    return max(min(guess, high - max(1, high >> 4)), low + step)


def _on_the_line(points: Sequence[tuple], limit: int) -> int | None:
    """Return the size at which the line through two peaks reaches the limit; None if the line does not rise."""
    (fewer, lower), (more, higher) = points
    if higher <= lower:
        return None
    return int(more + (limit - higher) * (more - fewer) / (higher - lower))


def _refuse_one_row(owner: str, trial: Callable, smallest: Trial, budget: Any) -> NoReturn:
    """Raise an error with the memory that 1 row needs; on CPU a trial with half of the available memory measures it."""
    if on_host():
        smallest = run_trial(owner, trial, 1, available_memory() >> 1)
    above = "at least" if smallest.fits else "above"
    takes = "more than the device has" if smallest.peak is None else amounts.short(int(smallest.peak / (1 - MARGIN)))
    rule = f"{above} {takes}, which training with a micro-batch of 1 row needs"
    got = None if budget is None else amounts.short(amounts.amount(owner, "memory_budget", budget))
    _check.refuse(ValueError, owner, "memory_budget", rule, got)
