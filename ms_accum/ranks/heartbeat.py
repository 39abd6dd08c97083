"""How far is each rank of a job?

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
_DIGITS = 20  # and the place of the word that says that the program is over
_OVER = b"over"
_EXCHANGE, _NONE, _PLACE = b"exchange", b"\0" * 8, 2 * _DIGITS


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


@functools.cache
def _file_of(path: str) -> int:
    """Return the descriptor of the launcher's file; -1 if it can't be written."""
    try:
        return os.open(path, os.O_WRONLY | os.O_CREAT, 0o666)
    except OSError:
        return -1


@contextmanager
def exchange() -> Iterator[None]:
    """Record that the block is an exchange that ends only if all ranks take part. For blocks and as a decorator."""
    path = os.environ.get(VARIABLE)
    descriptor = _file_of(path) if path else -1
    if descriptor < 0:
        yield
        return
    with contextlib.suppress(OSError):
        os.pwrite(descriptor, _EXCHANGE, _PLACE)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.pwrite(descriptor, _NONE, _PLACE)


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
        over, exchanges = text[_DIGITS:_PLACE].startswith(_OVER), text[_PLACE:] == _EXCHANGE
        return Beat(done, max(0.0, time.time() - path.stat().st_mtime), over, exchanges)
    except (OSError, ValueError):
        return None
