"""What is written to stdout and stderr, and what happens if that fails?"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import _check

_GONE = (errno.EPIPE, errno.EBADF, errno.EIO)
_UP = "\x1b[A"  # how tqdm moves up, by a write of its own


class _Stream:
    """A stream whose errors never end the program, and that shows control characters instead of obeying them.

    Errors are: closed, disconnected, disk full, or a character not encodable.

    Args:
        stream (TextIO): the stream to write to while it works.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Write the text, or discard it if that fails."""
        try:
            self._stream.write(_shown(text))
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        """Flush the buffer, or discard it if that fails."""
        try:
            self._stream.flush()
        except OSError as error:
            self._drop(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self, error: OSError) -> None:
        """Discard the buffer, which would fail again; if the reader is gone, also discard all later output."""
        number = self._stream.fileno()
        kept = None if error.errno in _GONE else os.dup(number)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, number)
        os.close(nowhere)
        if kept is not None:  # a full disk may have room again
            self._stream.flush()
            os.dup2(kept, number)
            os.close(kept)


def _shown(text: str) -> str:
    """Return a text whose control characters can be seen, except those with which a progress bar redraws its line."""
    if text and not text.replace(_UP, ""):
        return text
    redrawn = "\r" if text.startswith("\r") else ""
    return redrawn + _check.visible(text[len(redrawn) :])


def open_streams() -> None:
    """Redirect closed streams to the null device; otherwise the next opened file would receive the output."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Keep stdout and stderr usable inside the block, even if their readers are gone."""
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


class MindSporeLog:
    """MindSpore's log, including its warnings, in a file instead of on the terminal."""

    path: str | None = None
    """Optional[str], the file to write it to, set when the run has a folder."""

    def divert(self) -> None:
        """Divert the log before MindSpore is imported, unless the user has set its variables or a launcher logs it."""
        if "MS_ROLE" in os.environ or any(name.startswith("GLOG_") for name in os.environ):
            return
        from ..ranks.lifetime import scratch_folder

        try:
            folder = scratch_folder()
        except OSError:  # such as a full disk: then only what is critical is logged, on the terminal
            os.environ["GLOG_v"] = "4"
            return
        os.environ.update(GLOG_logtostderr="0", GLOG_stderrthreshold="4", GLOG_log_dir=folder)
        atexit.register(self._keep, folder, os.getpid())

    def _keep(self, folder: str, owner: int) -> None:
        """Write what was logged to `path`, if anything, before the temporary folder is removed."""
        if os.getpid() != owner:  # a child process that was forked
            return
        with contextlib.suppress(OSError):
            logged = "".join(path.read_text(errors="replace") for path in sorted(Path(folder).rglob("*.log.*")))
            if logged and self.path is not None:
                Path(self.path).unlink(missing_ok=True)  # not written into: it may be a link
                Path(self.path).write_text(logged, encoding="utf-8")


MINDSPORE_LOG = MindSporeLog()
"""The log of this process; a process has one such object."""
