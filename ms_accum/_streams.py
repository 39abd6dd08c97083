"""Does a program survive what it prints?"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_GONE = (errno.EPIPE, errno.EBADF, errno.EIO)


class _Stream:
    """A stream that was closed, leads nowhere any more, or knows no such letter: nothing that a program says ends it.

    Args:
        stream (TextIO): where it goes as long as that works.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Write, or say it to nobody."""
        try:
            self._stream.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Flush, or forget it."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        """Lead what is in the buffer nowhere, where it would fail again, and all that follows if nobody is there."""
        number = self._stream.fileno()
        kept = None if error.errno in _GONE else os.dup(number)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
        if kept is not None:  # a full disk may have room again
            self._stream.flush()
            os.dup2(kept, number)
            os.close(kept)


def open_streams() -> None:
    """Lead streams that are closed nowhere: else the next file that is opened gets what is printed."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # has the lowest number that is free: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Let stdout and stderr last as long as the block, whatever becomes of who reads them."""
    open_streams()
    kept = sys.stdout, sys.stderr
    lasting = [_Stream(stream) for stream in kept]
    sys.stdout, sys.stderr = lasting
    try:
        yield
    finally:
        for stream in lasting:
            stream.flush()
        sys.stdout, sys.stderr = kept
