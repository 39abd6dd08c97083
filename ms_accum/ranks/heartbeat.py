"""How far is each rank of a job?

A rank that waits too long for another ends with a MindSpore error that names no rank. So each rank writes its number of
finished micro-batches to a file given by the launcher, and the launcher can name the late rank. A rank also records
that its program has ended, because MindSpore's own exit, which follows, hangs if the scheduler is gone.
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
    """Writes the number of finished micro-batches of this process to the launcher's file, if there is one."""

    def __init__(self) -> None:
        path, self._done = os.environ.get(VARIABLE), 0
        self._file = -1
        if path:
            with contextlib.suppress(OSError):  # the job can run without this file
                self._file = os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
                atexit.register(self._write, _OVER, _DIGITS)  # runs before MindSpore's exit, which was registered first

    def beat(self) -> None:
        """Count one micro-batch."""
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
    """Return the heartbeat of this process."""
    return Heartbeat()


class Beat(NamedTuple):
    """The content of a rank's file."""

    done: int
    """The number of finished micro-batches."""
    age: float
    """Seconds since the file was written."""
    over: bool
    """Whether its program has ended."""


def read(path: Path) -> Beat | None:
    """Return the content of a rank's file; None if it is not valid."""
    try:
        text = path.read_bytes()
        done = int(text[:_DIGITS].strip(b" \0") or 0)
        return Beat(done, max(0.0, time.time() - path.stat().st_mtime), text.endswith(_OVER))
    except (OSError, ValueError):
        return None
