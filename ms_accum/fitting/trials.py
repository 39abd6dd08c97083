"""Does a micro-batch fit into memory, tried in a separate process?"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import threading
import time
import traceback
from functools import partial
from pathlib import Path
from typing import Any, Callable, NamedTuple, NoReturn

import mindspore as ms

from .. import _check
from ..ranks.lifetime import end_with, scratch
from .out_of_memory import is_out_of_memory, says_out_of_memory

# Seconds between two checks of a trial's memory: at 5 GB/s it can exceed its limit by 50 MB.
_SECONDS = 0.01
# Bytes above the limit at which a trial kills itself, in case its parent does not; and bytes above the limit that it
# may map, which include unused memory, such as MindSpore's pools of a gigabyte each, and stacks.
_SLACK, _MAPPED = 2**28, 2**32
_RESULT = "result"
_KILL = getattr(signal, "SIGKILL", signal.SIGTERM)  # Windows has no SIGKILL


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


class Apart(NamedTuple):
    """The result of a function that ran in a separate process."""

    end: str
    """str, ``"peak"`` if it returned, else ``"killed"`` or ``"memory"``."""
    peak: int | None
    """Optional[int], bytes: the peak, or the memory in use when it was killed."""
    results: list[tuple]
    """list[tuple], the tuples that it sent."""


def on_host() -> bool:
    """Return whether networks use the host's memory."""
    return ms.get_context("device_target") == "CPU"


def peak_of(process: int | str) -> int:
    """Return the peak memory of a process so far, in bytes; 0 if it has ended, or if the system is not Linux."""
    # Not ru_maxrss: a child process inherits its parent's value.
    return _kilobytes(f"/proc/{process}/status", "VmHWM")


def peak_so_far() -> int:
    """Return the peak of the memory that this process's networks use, in bytes."""
    return peak_of("self") if on_host() else ms.runtime.max_memory_allocated()


def available_memory() -> int:
    """Return the bytes of the machine's memory that are currently available."""
    return _kilobytes("/proc/meminfo", "MemAvailable")


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
    done = run_apart(owner, partial(_once, trial, rows), limit, lambda results: rows)
    fits = done.end == "peak" and (limit is None or done.peak is None or done.peak <= limit)
    return Trial(rows, done.peak, fits)


def _once(trial: Callable[[int], Any], rows: int, send: Callable[[tuple], None]) -> None:
    trial(rows)


def _text_of(log: Path) -> str:
    with contextlib.suppress(OSError):
        return log.read_text(errors="replace")
    return ""


def run_apart(
    owner: str, work: Callable[[Callable], None], limit: int | None, rows_at: Callable[[list[tuple]], int]
) -> Apart:
    """Call `work(send)` in a new process, and kill it when its memory exceeds `limit` bytes.

    Args:
        owner (str): the name used in error messages.
        work (Callable): the function to run; it may send tuples.
        limit (Optional[int]): as for `run_trial`.
        rows_at (Callable): returns, from the tuples sent so far, the rows that were tried, for the error message.

    Raises:
        TypeError: If `work` can't be sent to another process.
        RuntimeError: If it fails for another reason than memory.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    results: list[tuple] = []
    with scratch() as folder:
        (log := folder / "log").touch()
        held = limit if on_host() else None
        process = context.Process(target=_child, args=(work, held, str(log), sender, os.getpid()))
        _start(owner, process)
        sender.close()
        try:
            end, *facts = _watch(process, receiver, held, results)
        finally:
            process.kill()
            process.join()
            receiver.close()
        if end == "died" and (process.exitcode == -_KILL or says_out_of_memory(_text_of(log))):
            end = "memory"
    if end in ("error", "died"):
        _fail(owner, rows_at(results), *(facts or (f"a process that ended with exit code {process.exitcode}",)))
    return Apart(end, facts[0] if facts else None, results)


def _start(owner: str, process: Any) -> None:
    try:
        process.start()
    except Exception as error:  # Python versions raise different errors for what can't be pickled
        rule = "a function at a module's top level, which a new process can import"
        _check.refuse(TypeError, owner, "trial", rule, f"one that can't be sent to it ({error})")


def _watch(process: Any, receiver: Any, limit: int | None, results: list[tuple]) -> tuple:
    """Collect results until the child's last report, and return this report, or how the child ended without one."""
    while True:
        while not receiver.poll(_SECONDS):
            used = peak_of(process.pid) if limit is not None else 0
            if limit is not None and used > limit:
                return "killed", used
        try:
            kind, *facts = receiver.recv()
        except EOFError:
            process.join()
            return ("died",)
        if kind != _RESULT:
            return (kind, *facts)
        results.append(tuple(facts))


def _child(work: Callable[[Callable], None], limit: int | None, log: str, report: Any, parent: int) -> None:
    """Run `work` and report the peak, an out-of-memory error or another error; its output is written to a log.

    The child ends with its parent, and also limits its own memory, in case the parent cannot kill it.
    """
    ask = end_with(parent)
    if ask is not None:
        ask()
    if limit is not None:
        threading.Thread(target=_keep_below, args=(limit + _SLACK,), daemon=True).start()
        _map_no_more_than(limit + _MAPPED)
    output = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        work(lambda result: report.send((_RESULT, *result)))
        report.send(("peak", peak_so_far()))
    except BaseException as error:
        if is_out_of_memory(error):
            report.send(("memory",))
        else:
            text = str(error).strip().split("\n")[0]
            report.send(("error", f"{type(error).__name__}: {text}", traceback.format_exc()))


def _keep_below(limit: int) -> None:
    """Kill this process when its peak memory exceeds `limit` bytes."""
    while peak_of("self") <= limit:
        time.sleep(_SECONDS)
    os.kill(os.getpid(), _KILL)


def _map_no_more_than(limit: int) -> None:
    """Make allocations fail after `limit` more bytes, if the system can: the checking thread may not get to run."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource  # Windows has none

        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (_kilobytes("/proc/self/status", "VmData") + limit, hard))


def _fail(owner: str, rows: int, what: str, details: str = "") -> NoReturn:
    message = f"For '{owner}', 'trial' must be a function that runs with {rows} rows in a new process, but got {what}."
    raise RuntimeError(message) from (RuntimeError(details) if details else None)


def _kilobytes(path: str, name: str) -> int:
    try:
        found = re.search(rf"^{name}:\s+(\d+) kB$", Path(path).read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) * 1024 if found else 0
