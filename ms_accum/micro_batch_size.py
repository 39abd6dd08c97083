"""Finds the micro-batch with which a window trains fastest, within the memory that there is."""

from __future__ import annotations

import math
import multiprocessing
import re
import time
from pathlib import Path
from typing import Any, Callable, NamedTuple

import mindspore as ms

from . import _check
from .network.out_of_memory import is_out_of_memory

_OWNER = "find_micro_batch_size"
_STATUS = Path("/proc/self/status")
_TIMED = 3  # windows of each size
_KILLED = 9  # what Linux sends to a process that takes too much memory


class MicroBatch(NamedTuple):
    """The result of `find_micro_batch_size`.

    Attributes:
        micro_batch_size (int): the number of rows of the fastest micro-batch.
        mini_steps (int): the number of micro-batches in a window of the effective batch; the last may be shorter.
        trials (tuple[tuple[int, float, int], ...]): the sizes that fit, in order: rows, seconds per window, and peak
            memory in bytes.
    """

    micro_batch_size: int
    mini_steps: int
    trials: tuple[tuple[int, float, int], ...]

    @property
    def table(self) -> str:
        """str, a line for each trial: rows, milliseconds of a window, peak memory in MiB."""
        lines = [f"{'rows':>8} {'ms/window':>10} {'MiB':>8}"]
        lines += [f"{rows:>8,} {1000 * seconds:>10,.1f} {peak / 2**20:>8,.0f}" for rows, seconds, peak in self.trials]
        return "\n".join(lines)


def find_micro_batch_size(
    trial: Callable[[int], Callable[[], Any]], effective_batch: int, *, memory_budget: int | None = None
) -> MicroBatch:
    """Find the micro-batch with which a window of `effective_batch` rows trains fastest.

    The rows are doubled until a trial runs out of memory, exceeds the budget, or has the complete window. Each size is
    timed three times. The trials run one after the other in another process, which may run out of memory.

    Args:
        trial (Callable[[int], Callable]): gets the number of rows of a micro-batch, builds a network, trains one window
            in such micro-batches, and returns a function that trains the window once more. Another process imports it,
            so it must be at a module's top level, in a program whose main code is below
            ``if __name__ == "__main__":``.
        effective_batch (int): the number of rows of a window.
        memory_budget (Optional[int]): bytes: on CPU of the complete process, and required, else of the device.
            Default: ``None``, the memory of the device.

    Returns:
        MicroBatch; use it as ``train_process(..., micro_batch_size=found.micro_batch_size)``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or a micro-batch of 1 row does not fit.
        RuntimeError: If a trial fails for another reason than memory, or on CPU if the system is not Linux.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from functools import partial
        >>> from mindspore import nn
        >>> from model_zoo import MLP, create_dataset
        >>> from ms_accum import GradientAccumulation, find_micro_batch_size
        >>> def trial(rows):
        ...     net = MLP()
        ...     model = GradientAccumulation(net, nn.CrossEntropyLoss(), nn.Adam(net.trainable_params()))
        ...     batch = next(create_dataset(batch_size=8, image_size=28).create_tuple_iterator(num_epochs=1))
        ...     window = partial(model.train_process, 1, [batch], micro_batch_size=rows, report=(), ckpt_path=None)
        ...     window()
        ...     return window
        >>> if __name__ == "__main__":
        ...     found = find_micro_batch_size(trial, 8, memory_budget=4 * 2**30)
        ...     print([rows for rows, _, _ in found.trials])
        [1, 2, 4, 8]
    """
    if not callable(trial):
        _check.raise_invalid(TypeError, _OWNER, "trial", "a function of the rows", type(trial).__name__)
    rows = _check.positive_int(_OWNER, "effective_batch", effective_batch)
    if memory_budget is not None:
        _check.positive_int(_OWNER, "memory_budget", memory_budget)
    elif _on_host():
        rule = "given on CPU, where a process could use all memory of the machine"
        _check.raise_invalid(ValueError, _OWNER, "memory_budget", rule, None, "Give bytes, such as 2 * 2**30.")
    if _on_host() and not _STATUS.exists():
        raise RuntimeError(f"For '{_OWNER}', the system must be Linux, to measure the memory of a process on CPU.")
    trials = _run(trial, rows, memory_budget or math.inf)
    if not trials:
        rule = "enough for a micro-batch of 1 row"
        _check.raise_invalid(ValueError, _OWNER, "memory_budget", rule, memory_budget)
    best, _, _ = min(trials, key=lambda result: result[1])
    return MicroBatch(best, math.ceil(rows / best), tuple(trials))


def _run(trial: Callable, effective_batch: int, budget: float) -> list[tuple[int, float, int]]:
    """Return the results of a new process, which ends with the first size that does not fit."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_try_sizes, args=(trial, effective_batch, sender), daemon=True)
    process.start()
    sender.close()
    results: list[tuple[int, float, int]] = []
    try:
        while True:
            result = receiver.recv()
            if isinstance(result, str):
                raise RuntimeError(f"For '{_OWNER}', 'trial' must run, but got {result}.")
            if result[2] > budget:
                return results
            results.append(result)
    except EOFError:  # the process has ended: all sizes are tried, or memory is exhausted
        process.join()  # before it is killed, so that its exit code is its own
    finally:
        process.kill()
        process.join()
    if process.exitcode and process.exitcode != -_KILLED:
        raise RuntimeError(f"For '{_OWNER}', 'trial' must run, but got a process that ended with {process.exitcode}.")
    return results


def _try_sizes(trial: Callable, effective_batch: int, sender: Any) -> None:
    """Send rows, seconds per window and the peak so far, of each size; a text for an error other than memory."""
    rows = 1
    while True:
        try:
            window = trial(rows)
            if not callable(window):
                raise TypeError(f"a trial that returns {type(window).__name__}, not a function")
            sender.send((rows, min(_seconds(window) for _ in range(_TIMED)), _peak()))
        except Exception as error:
            if not is_out_of_memory(error):
                sender.send(f"{type(error).__name__}: {_check.one_line(_check.first_words(str(error)))}")
            return
        if rows == effective_batch:
            return
        rows = min(2 * rows, effective_batch)


def _seconds(window: Callable[[], Any]) -> float:
    began = time.perf_counter()
    window()
    return time.perf_counter() - began


def _peak() -> int:
    """Return the peak memory so far, in bytes: of this process on CPU, else of the device."""
    if not _on_host():
        return ms.runtime.max_memory_allocated()
    match = re.search(r"VmHWM:\s+(\d+) kB", _STATUS.read_text(encoding="utf-8"))
    return 1024 * int(match[1]) if match else 0


def _on_host() -> bool:
    return ms.get_context("device_target") == "CPU"
