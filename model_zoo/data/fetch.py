"""How is a file downloaded in bounded time?

urllib has no timeout for DNS, nor for a server that sends single bytes. So it runs in a daemon thread, and the caller
waits at most `stall_seconds` for each piece. Only the caller writes. An abandoned thread ends at its next piece.
"""

from __future__ import annotations

import contextlib
import queue
import sys
import threading
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import HTTPRedirectHandler, Request, build_opener

from .._check import one_line
from .archive import Fingerprint, copy

# The bytes that must arrive within `stall_seconds`; if it were one byte, a slow server could take years.
_PIECE = 8192
_QUEUED = 64  # pieces
# On Windows Ctrl-C interrupts `sleep`, but not the wait for a queue.
_POLL_SECONDS = 0.01
# Sockets raise an error for much longer timeouts.
_LONGEST_SECONDS = 86_400.0


def fetch(url: str, target: Path, *, stall_seconds: float, max_bytes: int, caller: str) -> Fingerprint:
    """Download `url` to the new file `target` of at most `max_bytes`, and return its fingerprint.

    Raises:
        TimeoutError: If 8 KiB, or the rest, take longer than `stall_seconds`.
        OSError: If the file can't be downloaded or written, or is too long.
    """
    try:
        with open(target, "xb") as file, contextlib.closing(_pieces(url, stall_seconds)) as pieces:
            found = copy(pieces, file, limit=max_bytes)
        if found[0] > max_bytes:
            raise OSError(f"it is longer than {max_bytes} bytes")
        return found
    except Exception as error:  # urllib also raises errors that are not OSErrors
        rule, reason = "must be a file that can be downloaded", one_line(error)
        message = f"For '{caller}', 'url' {rule}, but got {url!r}: {reason}. Try again, or give a mirror's address."
        raise (TimeoutError if isinstance(error, TimeoutError) else OSError)(message) from error


def _pieces(url: str, stall_seconds: float) -> Generator[bytes, None, None]:
    """Yield what the thread reads; show a progress bar on a terminal."""
    from tqdm import tqdm

    arrived: queue.Queue = queue.Queue(_QUEUED)
    over, size = threading.Event(), 0
    threading.Thread(target=_read, args=(url, stall_seconds, arrived, over), name="fetch", daemon=True).start()
    try:
        length = _next(arrived, stall_seconds)
        with tqdm(total=length, unit="B", unit_scale=True, ncols=80, file=sys.stdout, disable=None) as bar:
            while piece := _next(arrived, stall_seconds):
                yield piece
                size += len(piece)
                bar.update(len(piece))
        if length not in (None, size):
            raise OSError(f"it ended after {size} of {length} bytes")
    except queue.Empty:
        raise TimeoutError(f"no data arrived for {stall_seconds:g} seconds, after {size} bytes") from None
    finally:
        over.set()
        with contextlib.suppress(queue.Empty):
            arrived.get_nowait()  # unblocks a thread that waits to put


def _next(arrived: queue.Queue, seconds: float) -> Any:
    """Return the thread's next item, or raise its error; raise `queue.Empty` after this number of seconds."""
    end = time.monotonic() + seconds
    while arrived.empty() and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    item = arrived.get_nowait()
    if isinstance(item, Exception):
        raise item
    return item


def _read(url: str, stall_seconds: float, arrived: queue.Queue, over: threading.Event) -> None:
    """Put the announced length or None, then all pieces and an empty one; or the error after a failure."""
    request = Request(url, headers={"User-Agent": "Mozilla/5.0"})  # some servers reject that of urllib
    timeout = min(2 * stall_seconds, _LONGEST_SECONDS)  # longer than the timeout of the caller
    try:
        with build_opener(_KeepTls).open(request, timeout=timeout) as response:
            arrived.put(getattr(response, "length", None))  # FTP gives none
            piece = None
            while piece != b"" and not over.is_set():
                piece = response.read(_PIECE)
                arrived.put(piece)
    except Exception as error:
        if isinstance(error, HTTPError):
            error.close()  # it is also the response
        arrived.put(error)


class _KeepTls(HTTPRedirectHandler):
    """Rejects redirects from https to an unencrypted scheme, which urllib follows."""

    def redirect_request(self, req: Request, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Request | None:
        fp.close()  # otherwise its complete body would be read, without a limit
        if req.full_url.lower().startswith("https:") and not newurl.lower().startswith("https:"):
            raise HTTPError(newurl, code, "the server redirects from https to an unencrypted connection", headers, fp)
        return super().redirect_request(req, fp, code, msg, headers, newurl)
