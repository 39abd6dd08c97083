"""How large can a micro-batch be?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any, Callable, NamedTuple, NoReturn

from .. import _check
from ..ranks.parallel import is_launched
from . import amounts
from .trials import Trial, available_memory, on_host, peak_of, run_trial

# The peak memory of the same process varies by 1 % from run to run.
MARGIN = 0.02

# Peak memory is nearly affine in the rows: up to this many trials use a line, the rest bisects.
_ON_A_LINE = 8


@_check.documented
class MicroBatch(NamedTuple):
    """The largest micro-batch that fits, and how it was found."""

    micro_batch_size: int
    """int, the rows of the micro-batch."""
    mini_steps: int
    """int, micro-batches in a window of the effective batch; the last may be shorter."""
    peak: int
    """int, the peak memory of its trial in bytes: of the process on CPU, else of the device's memory."""
    trials: tuple[Trial, ...]
    """tuple[Trial], all trials in order: rows, peak, whether it fits."""


def find_micro_batch_size(
    trial: Callable[[int], Any], effective_batch: int, *, memory_budget: int | str | None = None
) -> MicroBatch:
    """Find the largest micro-batch whose training fits into a memory budget, by trial runs.

    Each trial runs in a new process, which is killed when it exceeds the budget, so it cannot harm this process. The
    first trial uses the complete effective batch. The next sizes come from a line through the measured peaks, or from
    bisection where the peaks are not on a line: mostly 4 to 7 trials in total. The result was tried and fits. A size
    larger by at most a 16th (below 32 rows: by 1 row) was tried and does not fit. Peaks vary by 1 % from run
    to run, so 2 % of the budget is kept free.

    Args:
        trial (Callable[[int], Any]): builds a network and trains one window, with an update, in micro-batches of the
            given number of rows. The new process imports it, so it must be a function (or a `functools.partial`
            of one) at a module's top level, in a program whose main code is below
            ``if __name__ == "__main__":``.
        effective_batch (int): rows of a window.
        memory_budget (Union[int, str, None]): bytes, or a text such as ``"2GiB"`` or ``"512 MB"``. On CPU it
            limits the complete process, including Python and MindSpore, and is required, because the
            memory that other programs need is unknown. Default: ``None``, the memory of the device.

    Returns:
        MicroBatch, for ``train_process(..., micro_batch_size=found.micro_batch_size)``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or not even 1 row fits; the message has the memory that 1 row needs.
        RuntimeError: If a trial fails for another reason than memory, a launcher started this process, or the
            device is the CPU and the system is not Linux.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
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
        ...     model.train_process(1, [batch], micro_batch_size=rows, report=(), ckpt_path=None)
        >>> if __name__ == "__main__":
        ...     found = find_micro_batch_size(trial, 128, memory_budget="4GiB")
        ...     print(found.micro_batch_size, found.mini_steps, len(found.trials))
        128 1 1
    """
    owner = "find_micro_batch_size"
    if not callable(trial):
        _check.refuse(TypeError, owner, "trial", "a function of the rows", type(trial).__name__)
    rows = _check.positive_int(owner, "effective_batch", effective_batch)
    if is_launched():  # otherwise all ranks would run trials at once, in the same memory
        raise RuntimeError(f"For '{owner}', the process must be alone. Run it once, and give all ranks what it finds.")
    if on_host() and not peak_of("self"):
        raise RuntimeError(f"For '{owner}', the system must be Linux, to measure the memory of a process on CPU.")
    limit = _limit(owner, memory_budget)
    trials = search(partial(run_trial, owner, trial, limit=limit), rows, limit)
    fitting = [tried for tried in trials if tried.fits]
    if not fitting:
        _refuse_one_row(owner, trial, trials[-1], memory_budget)
    best = max(fitting)
    windows = range(0, rows, best.rows)
    return MicroBatch(best.rows, len(windows), best.peak or 0, trials)


def _limit(owner: str, budget: int | str | None) -> int | None:
    """Return the largest peak that fits, or None for the memory of the device."""
    if budget is not None:
        return int(amounts.amount(owner, "memory_budget", budget) * (1 - MARGIN))
    if on_host():
        rule = "given on CPU, where a process may take all the machine has"
        _check.refuse(ValueError, owner, "memory_budget", rule, None, "Give for example '2GiB'.")
    return None


def search(attempt: Callable[[int], Trial], most: int, limit: int | None) -> tuple[Trial, ...]:
    """Try sizes from 1 to `most` until the largest that fits is known to within a 16th; return all trials.

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
    """Return the size to try next, or None if the largest that fits is known."""
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
        # A line needs a second point: a smaller size fits and runs quickly, but the smallest sizes are not on the line.
        if low >= 8:
            return low >> 2
        guess = math.isqrt(low * high)
    else:
        guess = _on_the_line(fitting[-2:], limit) or math.isqrt(low * high)
    # Keep the required distance from known sizes: then a line with a small error ends the search.
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
    rule = f"{above} {takes}, what training with a micro-batch of 1 row takes"
    got = None if budget is None else amounts.short(amounts.amount(owner, "memory_budget", budget))
    _check.refuse(ValueError, owner, "memory_budget", rule, got)
