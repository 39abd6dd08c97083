"""How does the output of a process reach its log and the terminal?"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, TextIO

from .. import _check

COLUMNS = "MS_ACCUM_COLUMNS"
"""str, the environment variable with the maximum width of lines of rank 0 on the launcher's terminal."""
_RANK = b"[0] "
_AT_ONCE = 65536
_ENDS = re.compile(rb"\r?\n|\r(?=[^\n])")
_NOTICE = re.compile(rb"\[(INFO|WARNING)\] [A-Z_]+\(\d+,")


def terminal() -> dict[str, str]:
    """Return the environment variable for rank 0 if its output is shown on a terminal; else an empty dict."""
    if not sys.stdout.isatty():
        return {}
    return {COLUMNS: str(shutil.get_terminal_size().columns - len(_RANK) - 1)}


class Relay:
    """Copies the output of a process from its pipes to a log and, line by line, to this process's streams.

    Args:
        process (Popen): the process, whose streams are pipes.
        log (Path): the file for all output.
    """

    def __init__(self, process: subprocess.Popen, log: Path):
        file = os.open(log, os.O_WRONLY | os.O_APPEND)
        pairs = ((process.stdout, sys.stdout), (process.stderr, sys.stderr))
        self._streams = [_Stream(source, file, terminal.fileno()) for source, terminal in pairs if source]
        for stream in self._streams:
            stream.thread.start()

    def drain(self, seconds: float) -> None:
        """Wait until all output is shown, for at most `seconds`: another process may keep the pipes open."""
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
        """Show complete lines and keep the rest, so that the other stream does not split a line."""
        looked_at = max(len(self._rest) - 1, 0)  # a carriage return at the end may be half of a line's end
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
        with contextlib.suppress(OSError):  # a full disk must not end the run
            _write(self._log, text)

    def _show(self, line: bytes, end: bytes) -> None:
        """Show a line; a line that a progress bar overwrites is shown only on a terminal."""
        overwritten = end == b"\r"
        if _NOTICE.match(line) or (overwritten and not (line and self._bars)):
            return
        with contextlib.suppress(OSError):  # a closed terminal must not end the run
            _write(self._terminal, _RANK + line + (b"\r" if overwritten else b"\n"))


def _write(descriptor: int, data: bytes) -> None:
    """Write all bytes."""
    while data:
        data = data[os.write(descriptor, data) :]


def say(line: str) -> None:
    """Print a line of the launcher between the lines of the process."""
    _print(sys.stdout, line)


def complain(message: str) -> None:
    """Print a one-line error, in the form that all programs of this package use."""
    _print(sys.stderr, f"error: {message}")


def _print(stream: TextIO, line: str) -> None:
    with contextlib.suppress(OSError):
        _write(stream.fileno(), f"{_check.one_line(line, _check.LINE)}\n".encode())
