"""Transfers one file with the package `download`, within limits that it does not have itself.

`fetch.py` runs this file as a process of its own. `download` reads by urllib's global opener, which can be replaced by
one with limits only there; and a transfer that takes too long can be ended: urllib has no timeout for a name lookup,
nor for a server that sends single bytes. The process ends with its parent. The file is run by its path and imports
nothing from its folder, because a module there has the name of the package.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any
from urllib.error import HTTPError
from urllib.request import BaseHandler, HTTPRedirectHandler, Request, build_opener, install_opener

DONE, FAILED, STALLED, NOT_INSTALLED = 0, 1, 2, 3
"""int, the exit codes; the last line on stderr is the reason."""

# The bytes that must arrive within `stall_seconds`; if it were one byte, a slow server could take years.
_PIECE = 8192
_POLL_SECONDS = 0.02
# Sockets raise an error for much longer timeouts.
_LONGEST_SECONDS = 86_400.0


class KeepTls(HTTPRedirectHandler):
    """Rejects redirects from https to an unencrypted scheme, and to other schemes, which urllib would follow."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        fp.close()  # otherwise its complete body would be read, without a limit
        old, new = (url.partition(":")[0].lower() for url in (req.full_url, newurl))
        if old == "https" != new:
            raise HTTPError(newurl, code, "the server redirects from https to an unencrypted connection", headers, fp)
        if new not in ("http", "https"):
            raise HTTPError(newurl, code, "the server redirects to an address that is not of the web", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class Bounded(BaseHandler):
    """Counts the bytes of responses, and raises an error above a limit, and at an early end.

    Args:
        max_bytes (int): the maximum number of bytes.
    """

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self.size = 0
        """int, the number of bytes so far."""

    def http_response(self, request: Request, response: Any) -> Any:
        """Return the response, changed so that each read returns a small piece."""
        read = response.read

        def bounded(amount: int | None = None) -> bytes:
            piece: bytes = read(_PIECE)
            self.size += len(piece)
            if self.size > self._max_bytes:
                raise OSError(f"it is longer than {self._max_bytes} bytes")
            if not piece and response.length:
                raise OSError(f"it ended after {self.size} of {self.size + response.length} bytes")
            return piece

        response.read = bounded
        return response

    https_response = http_response


def transfer(url: str, target: str, stall_seconds: float, bounded: Bounded, progressbar: bool) -> Exception | None:
    """Transfer a file; return the error if that fails, a TimeoutError if 8 KiB, or the rest, take too long."""
    from download import download

    install_opener(build_opener(KeepTls, bounded))
    errors: list = []

    def run() -> None:
        options: dict = {"kind": "file", "progressbar": progressbar, "replace": True, "verbose": False}
        try:
            download(url, target, timeout=min(2 * stall_seconds, _LONGEST_SECONDS), **options)
        except Exception as error:
            errors.append(error)

    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    last_size, deadline = 0, time.monotonic() + stall_seconds
    while worker.is_alive():
        worker.join(_POLL_SECONDS)
        if bounded.size >= last_size + _PIECE:
            last_size, deadline = bounded.size, time.monotonic() + stall_seconds
        elif worker.is_alive() and time.monotonic() > deadline:
            return TimeoutError(f"no data arrived for {stall_seconds:g} seconds, after {bounded.size} bytes")
    return _cause(errors[0]) if errors else None


def _cause(error: BaseException) -> Any:
    """Return what went wrong: `download` raises a RuntimeError about it, after a KeyError where it would resume."""
    while isinstance(error, (RuntimeError, KeyError)) and error.__context__ is not None:
        error = error.__context__
    return error


def _end_with_parent() -> None:
    """Wait until the parent has ended or closed the pipe, and end."""
    sys.stdin.buffer.read()
    os._exit(FAILED)


def main() -> int:
    """Read the job from stdin, transfer the file, and return the exit code."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then ends this process
    job = json.loads(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        bounded = Bounded(job["max_bytes"])
        error = transfer(job["url"], job["target"], job["stall_seconds"], bounded, job["progressbar"])
        code = DONE if error is None else STALLED if isinstance(error, TimeoutError) else FAILED
    except ImportError as missing:
        error, code = missing, NOT_INSTALLED
    if error is not None:
        reason = " ".join(str(error).split()) or type(error).__name__
        sys.stderr.buffer.write(f"{reason}\n".encode("utf-8", "backslashreplace"))
        sys.stderr.flush()
    return code


if __name__ == "__main__":
    number = main()
    sys.stdout.flush()
    os._exit(number)  # a thread may still wait for the server
