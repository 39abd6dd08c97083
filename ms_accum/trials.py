"""Does a micro-batch fit, tried in a process of its own?"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any, Callable, NamedTuple, NoReturn

import mindspore as ms

from . import _check
from ._end_with import end_with
from .out_of_memory import is_out_of_memory, says_out_of_memory

# At most this often is a trial's memory looked at: at 5 GB/s it goes 50 MB too far.
_SECONDS = 0.01
# How far a trial may go beyond its limit when nobody else looks; and what it may map, where MindSpore's pools, of a
# gigabyte each, and stacks count that are there and not used.
_SLACK, _MAPPED = 2**28, 2**32


class Trial(NamedTuple):
    """What became of a trial."""

    rows: int
    """int, the micro-batch it ran with."""
    peak: int | None
    """Optional[int], bytes: the peak, or what it had reached when it was stopped. None: it died without a word."""
    fits: bool
    """bool, whether it ended well within its limit."""


def on_host() -> bool:
    """Return whether networks compute in the host's memory."""
    return ms.get_context("device_target") == "CPU"


def peak_of(process: int | str) -> int:
    """Return the peak of a process's memory so far, in bytes; 0 where the process is gone."""
    # Not ru_maxrss: a process inherits that of the one that started it.
    return _kilobytes(f"/proc/{process}/status", "VmHWM")


def available_memory() -> int:
    """Return how many bytes of the machine's memory could be had now."""
    return _kilobytes("/proc/meminfo", "MemAvailable")


def run_trial(owner: str, trial: Callable[[int], Any], rows: int, limit: int | None) -> Trial:
    """Call `trial(rows)` in a new process, and stop it when its memory exceeds `limit` bytes.

    Args:
        owner (str): whose trial this is, for the wording of errors.
        trial (Callable): what to run. The new process imports it, so it must stand at a module's top level.
        rows (int): rows of a micro-batch.
        limit (Optional[int]): bytes of the process on CPU, of the device's memory elsewhere. ``None``: what there is.

    Raises:
        TypeError: If the trial can't be sent to another process.
        RuntimeError: If it fails for another reason than memory.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    with tempfile.NamedTemporaryFile("r", errors="replace") as log:
        held = limit if on_host() else None
        process = context.Process(target=_child, args=(trial, rows, held, log.name, sender, os.getpid()))
        _start(owner, process)
        sender.close()
        try:
            end, *facts = _watch(process, receiver, held)
        finally:
            process.kill()
            process.join()
            receiver.close()
        if end == "died" and (process.exitcode == -signal.SIGKILL or says_out_of_memory(log.read())):
            end = "memory"
    if end == "peak":
        return Trial(rows, facts[0], limit is None or facts[0] <= limit)
    if end in ("error", "died"):
        _fail(owner, rows, *(facts or (f"a process that ended with exit code {process.exitcode}",)))
    return Trial(rows, facts[0] if facts else None, False)


def _start(owner: str, process: Any) -> None:
    try:
        process.start()
    except Exception as error:  # each Python has others for what can't be pickled
        rule = "a function at a module's top level, which a new process can import"
        _check.refuse(TypeError, owner, "trial", rule, f"one that can't be sent there ({error})")


def _watch(process: Any, receiver: Any, limit: int | None) -> tuple:
    """Wait for what the child says; return it, or how it ended without a word."""
    while not receiver.poll(_SECONDS):
        used = peak_of(process.pid) if limit is not None else 0
        if limit is not None and used > limit:
            return "killed", used
    try:
        return receiver.recv()
    except EOFError:
        process.join()
        return ("died",)


def _child(trial: Callable[[int], Any], rows: int, limit: int | None, log: str, report: Any, parent: int) -> None:
    """Run the trial and report its peak, its want of memory or its error; what it prints goes into a log.

    It ends with its parent, and keeps near the limit itself: nobody may be there to stop it.
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
        trial(rows)
        report.send(("peak", peak_of("self") if on_host() else ms.runtime.max_memory_allocated()))
    except BaseException as error:
        if is_out_of_memory(error):
            report.send(("memory",))
        else:
            text = str(error).strip().split("\n")[0]
            report.send(("error", f"{type(error).__name__}: {text}", traceback.format_exc()))


def _keep_below(limit: int) -> None:
    """End this process when it takes more bytes."""
    while peak_of("self") <= limit:
        time.sleep(_SECONDS)
    os.kill(os.getpid(), signal.SIGKILL)


def _map_no_more_than(limit: int) -> None:
    """Let memory run out in this process behind so many bytes more, where the system can: nobody may be let look."""
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
