"""Runs a function in a separate process within a limit of memory, and measures its peak."""

from __future__ import annotations

import multiprocessing
import os
import re
import signal
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Callable, NamedTuple

import mindspore as ms

from .. import _check
from ..network.out_of_memory import is_out_of_memory, says_out_of_memory
from ..ranks.lifetime import end_with, scratch

# Seconds between two checks of a trial's memory: at 5 GB/s it can exceed its limit by 50 MB.
_CHECK_SECONDS = 0.01
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL
# The kinds of messages of a trial; the first may come several times, and one of the others comes last.
_RESULT, _DONE, _OUT_OF_MEMORY, _ERROR = "result", "done", "out of memory", "error"


@_check.documented
class Trial(NamedTuple):
    """The result of a trial."""

    rows: int
    """int, the number of rows of a micro-batch."""
    peak: int | None
    """Optional[int], bytes: the peak, or the memory in use when it was killed. None: out of memory, amount unknown."""
    fits: bool
    """bool, whether it succeeded within its limit."""
    seconds: float | None = None
    """Optional[float], seconds per window; None if it was not timed."""


class Outcome(NamedTuple):
    """What became of a function that ran in a separate process."""

    returned: bool
    """Whether it returned; else it ran out of memory, or was killed at its limit."""
    peak: int | None
    """Bytes: the peak, or the memory in use when it was killed; None if it ran out of memory itself."""
    results: list[tuple]
    """The tuples that it sent."""


def on_host() -> bool:
    """Return whether networks use the host's memory."""
    return ms.get_context("device_target") == "CPU"


def peak_of(process: int | str) -> int:
    """Return the peak memory of a process so far, in bytes; 0 if it has ended, or if the system is not Linux."""
    # Not ru_maxrss: a child process inherits its parent's value.
    return _bytes_in(f"/proc/{process}/status", "VmHWM")


def peak_so_far() -> int:
    """Return the peak of the memory that this process's networks use, in bytes."""
    return peak_of("self") if on_host() else ms.runtime.max_memory_allocated()


def available_memory() -> int:
    """Return the bytes of the machine's memory that are currently available."""
    return _bytes_in("/proc/meminfo", "MemAvailable")


def _bytes_in(path: str, field: str) -> int:
    try:
        match = re.search(rf"^{field}:\s+(\d+) kB$", Path(path).read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0


def run_trial(owner: str, trial: Callable[[int], Any], rows: int, limit: int | None) -> Trial:
    """Call `trial(rows)` in a new process, and kill it when its memory exceeds `limit` bytes.

    Args:
        owner (str): the name used in error messages.
        trial (Callable): the function to run. The new process imports it, so it must be at a module's top level.
        rows (int): rows of a micro-batch.
        limit (Optional[int]): bytes of the process on CPU, else of the device. ``None``: all memory of the device.

    Raises:
        TypeError: If the trial can't be sent to another process.
        RuntimeError: If it fails for another reason than memory.
    """
    outcome = run_in_new_process(owner, partial(_call, trial, rows), [rows], limit)
    fits = outcome.returned and (limit is None or outcome.peak is None or outcome.peak <= limit)
    return Trial(rows, outcome.peak, fits)


def _call(trial: Callable[[int], Any], rows: int, send: Callable[[tuple], None]) -> None:
    trial(rows)


def run_in_new_process(
    owner: str, work: Callable[[Callable], None], sizes: Sequence[int], limit: int | None
) -> Outcome:
    """Call `work(send)` in a new process, and kill it when its memory exceeds `limit` bytes.

    Args:
        owner (str): the name used in error messages.
        work (Callable): the function to run; it may send tuples.
        sizes (Sequence[int]): the rows that it tries, one after the other, and sends a tuple for each.
        limit (Optional[int]): as for `run_trial`.

    Raises:
        TypeError: If `work` can't be sent to another process.
        RuntimeError: If it fails for another reason than memory.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    if not on_host():
        limit = None  # of a device: its driver stops the trial
    results: list[tuple] = []
    with scratch() as folder:
        log = folder / "log"
        process = context.Process(target=_child, args=(work, str(log), sender, os.getpid()))
        try:
            process.start()
        except Exception as error:  # Python versions raise different errors for what can't be pickled
            rule = "a function at a module's top level, which a new process can import"
            _check.raise_invalid(TypeError, owner, "trial", rule, f"one that can't be sent to it ({error})")
        sender.close()
        try:
            while True:
                while not receiver.poll(_CHECK_SECONDS):
                    used = peak_of(process.pid or 0) if limit is not None else 0
                    if limit is not None and used > limit:
                        return Outcome(False, used, results)
                kind, *facts = receiver.recv()
                if kind != _RESULT:
                    break
                results.append(tuple(facts))
        except EOFError:  # it died without a last message
            process.join()
            output = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
            out_of_memory = process.exitcode == -_KILL or says_out_of_memory(output)
            kind = _OUT_OF_MEMORY if out_of_memory else _ERROR
            facts = [f"a process that ended with exit code {process.exitcode}", output[-4000:]]
        finally:
            process.kill()
            process.join()
            receiver.close()
    if kind == _ERROR:
        value, details = facts
        rows = _check.quantity(sizes[min(len(results), len(sizes) - 1)], "row")
        rule = f"a function that runs with {rows} in a new process"
        raise RuntimeError(f"For '{owner}', 'trial' must be {rule}, but got {value}.") from RuntimeError(details)
    return Outcome(kind == _DONE, facts[0] if kind == _DONE else None, results)


def _child(work: Callable[[Callable], None], log: str, sender: Any, parent: int) -> None:
    """Run `work` and send how it ended; its output is written to a log. The child ends with its parent."""
    end_with_parent = end_with(parent)
    if end_with_parent is not None:
        end_with_parent()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        work(lambda result: sender.send((_RESULT, *result)))
        sender.send((_DONE, peak_so_far()))
    except BaseException as error:
        if is_out_of_memory(error):
            sender.send((_OUT_OF_MEMORY,))
        else:
            first_line = str(error).strip().split("\n")[0]
            sender.send((_ERROR, f"{type(error).__name__}: {first_line}", traceback.format_exc()))
