"""What a launched rank and its launcher send to each other.

A rank that waits too long for another ends with a MindSpore error that names no rank. So each rank writes its number of
finished micro-batches to a file given by the launcher, and the launcher can name the late rank. A rank also records
that its program has ended, because MindSpore's own exit, which follows, hangs if the scheduler is gone; and that it is
in an exchange with all ranks, which it can't leave: if one of them has failed, the launcher need not wait for it.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

VARIABLE = "MS_ACCUM_HEARTBEAT"
"""str, the environment variable with the file that a rank writes to."""
COLUMNS = "MS_ACCUM_COLUMNS"
"""str, the environment variable with the maximum width of lines of rank 0 on the launcher's terminal."""
# The file: the number of micro-batches, the word for an ended program, and the word for an exchange.
_DIGITS = 20
_OVER = b"over"
_EXCHANGE = b"exchange"
_EXCHANGE_OFFSET = 2 * _DIGITS


@functools.cache
def _open(path: str | None) -> int:
    """Return the descriptor of the launcher's file; -1 if there is none, or if it can't be written: the job can run."""
    with contextlib.suppress(OSError):
        return os.open(path, os.O_WRONLY | os.O_CREAT, 0o666) if path else -1
    return -1


class Heartbeat:
    """Writes the number of finished micro-batches of this process to the launcher's file, if there is one."""

    def __init__(self) -> None:
        self._done = 0
        self._file = _open(os.environ.get(VARIABLE))
        if self._file >= 0:
            atexit.register(self._write, _OVER, _DIGITS)  # runs before MindSpore's exit, which was registered first

    def beat(self) -> None:
        """Count one micro-batch."""
        if self._file >= 0:
            self._done += 1
            self._write(str(self._done).rjust(_DIGITS).encode(), 0)

    def _write(self, text: bytes, offset: int) -> None:
        try:
            os.pwrite(self._file, text, offset)
        except OSError:
            self._file = -1


@functools.cache
def heartbeat() -> Heartbeat:
    """Return the heartbeat of this process."""
    return Heartbeat()


@contextmanager
def exchange() -> Iterator[None]:
    """Record that the block is an exchange that ends only if all ranks take part. For blocks and as a decorator."""
    descriptor = _open(os.environ.get(VARIABLE))
    if descriptor < 0:
        yield
        return
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, _EXCHANGE, _EXCHANGE_OFFSET)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.pwrite(descriptor, bytes(len(_EXCHANGE)), _EXCHANGE_OFFSET)


class Beat(NamedTuple):
    """The content of a rank's file."""

    done: int
    """The number of finished micro-batches."""
    age: float
    """Seconds since the file was written."""
    over: bool
    """Whether its program has ended."""
    exchanges: bool
    """Whether it is in an exchange with all ranks."""


def read(path: Path) -> Beat | None:
    """Return the content of a rank's file; None if it is not valid."""
    try:
        text = path.read_bytes()
        done = int(text[:_DIGITS].strip(b" \0") or 0)
        age = max(0.0, time.time() - path.stat().st_mtime)
        over = text[_DIGITS:_EXCHANGE_OFFSET].startswith(_OVER)
        return Beat(done, age, over, text[_EXCHANGE_OFFSET:] == _EXCHANGE)
    except (OSError, ValueError):
        return None
