"""How does what a process says reach its log and the terminal?"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

_AT_ONCE = 65536
_ENDS = re.compile(rb"\r?\n|\r(?=[^\n])")
_NOTICE = re.compile(rb"\[(INFO|WARNING)\] [A-Z_]+\(\d+,")


class Relay:
    """What a process says on its pipes, on its way to a log and, line by line, to our own streams.

    Args:
        process (Popen): the process, whose streams are pipes.
        log (Path): the file that all of it goes into.
    """

    def __init__(self, process: subprocess.Popen, log: Path):
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        self._streams = [_Stream(source, file, terminal.fileno()) for source, terminal in pairs if source]
        for stream in self._streams:
            stream.thread.start()

    def drain(self, seconds: float) -> None:
        """Wait until all is shown; not for long, because a process of another session may hold the pipes."""
        for stream in self._streams:
            stream.thread.join(seconds)


class _Stream:
    def __init__(self, source: IO[bytes], log: int, terminal: int):
        self._source, self._log, self._terminal = source, log, terminal
        self._bars = os.isatty(terminal)
        self._rest = bytearray()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def _run(self) -> None:
        while data := os.read(self._source.fileno(), _AT_ONCE):
            self._take(data)
        self._flush()

    def _take(self, data: bytes) -> None:
        """Pass the lines on that are whole, and keep what is left: the other stream must not cut a line in two."""
        looked_at = max(len(self._rest) - 1, 0)  # up to a carriage return, which may be half a line's end
        self._rest += data
        ends, done = [end.span() for end in _ENDS.finditer(self._rest, looked_at)], 0
        for start, stop in ends:
            self._show(bytes(self._rest[done:start]), bytes(self._rest[start:stop]))
            done = stop
        self._keep(bytes(self._rest[:done]))
        del self._rest[:done]
        if len(self._rest) > _AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        rest = bytes(self._rest)
        self._rest.clear()
        self._keep(rest)
        if rest.strip(b"\r"):
            self._show(rest.strip(b"\r"), b"\n")

    def _keep(self, text: bytes) -> None:
        with contextlib.suppress(OSError):  # a full disk does not end the run
            _write(self._log, text)

    def _show(self, line: bytes, end: bytes) -> None:
        """Show a line; what a bar overwrites is shown where it can be overwritten only."""
        overwritten = end == b"\r"
        if _NOTICE.match(line) or (overwritten and not (line and self._bars)):
            return
        with contextlib.suppress(OSError):  # nor does a terminal that was closed
            _write(self._terminal, b"[0] " + line + (b"\r" if overwritten else b"\n"))


def _write(descriptor: int, data: bytes) -> None:
    """Write all of it."""
    while data:
        data = data[os.write(descriptor, data) :]


def say(line: str) -> None:
    """Say something of our own between what the process says."""
    with contextlib.suppress(OSError):
        _write(sys.stdout.fileno(), f"{line}\n".encode(errors="replace"))


def complain(message: str) -> None:
    """Say what went wrong, in one line, as programs do."""
    with contextlib.suppress(OSError):
        _write(sys.stderr.fileno(), f"error: {message}\n".encode(errors="replace"))
