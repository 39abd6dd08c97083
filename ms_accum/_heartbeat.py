"""How far is each rank of a job?

Who waits in vain for another ends with an error of MindSpore's that names nobody. So each rank writes how many
micro-batches it has done into a file that the launcher names, and the launcher says who was late. At its end it writes
so: what comes then is MindSpore's, and waits for ever where the scheduler is gone.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
from pathlib import Path
from typing import NamedTuple

VARIABLE = "MS_ACCUM_HEARTBEAT"
_DIGITS = 20
_OVER = b"over"


class Heartbeat:
    """Counts this process's micro-batches in the file that its launcher named, if one did."""

    def __init__(self) -> None:
        path, self._done = os.environ.get(VARIABLE), 0
        self._file = -1
        if path:
            with contextlib.suppress(OSError):  # a job does not end for want of it
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
                atexit.register(self._write, _OVER, _DIGITS)  # before MindSpore's, which were there first

    def beat(self) -> None:
        """Count a micro-batch."""
        if self._file >= 0:
            self._done += 1
            self._write(str(self._done).rjust(_DIGITS).encode(), 0)

    def _write(self, text: bytes, where: int) -> None:
        try:
            os.pwrite(self._file, text, where)
        except OSError:
            self._file = -1


@functools.cache
def heartbeat() -> Heartbeat:
    """Return that of this process."""
    return Heartbeat()


class Beat(NamedTuple):
    """What a rank's file says."""

    done: int
    """How many micro-batches it has done."""
    age: float
    """How many seconds ago."""
    over: bool
    """Whether its program has ended."""


def read(path: Path) -> Beat | None:
    """Return what a rank has written; None where it has not."""
    try:
        text = path.read_bytes()
        done = int(text[:_DIGITS].strip(b" \0") or 0)
        return Beat(done, max(0.0, time.time() - path.stat().st_mtime), text.endswith(_OVER))
    except (OSError, ValueError):
        return None
