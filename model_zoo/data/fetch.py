"""Downloads a file in bounded time, up to a bounded size.

The package `download` transfers it, in a process of its own, and shows its progress bar on a terminal. The limits are
in that process (`transfer.py`), which can be ended at any time. The file appears under its name when it is complete.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from .._check import one_line
from . import transfer
from .archive import Fingerprint, copy, pieces_of

# Not `python FILE`, which would let the file's folder hide the package `download`, nor the current folder.
_PROGRAM = "import runpy, sys; sys.path[:] = filter(None, sys.path); runpy.run_path(sys.argv[1], run_name='__main__')"
# Links to pages, for which `download` has ways of its own, without limits.
_PAGES = ("dropbox.com", "drive.google.com")


def fetch(url: str, target: Path, *, stall_seconds: float, max_bytes: int, caller: str) -> Fingerprint:
    """Download `url` to the new file `target` of at most `max_bytes`, and return its fingerprint.

    After an error there may be a part of it, named `target` with the ending `.part`.

    Raises:
        TimeoutError: If 8 KiB, or the rest, take longer than `stall_seconds`.
        OSError: If the file can't be downloaded or written, or is too long.
        ImportError: If the package `download` is not installed.
    """
    try:
        _transferred(url, target, stall_seconds, max_bytes)
        with open(target, "rb") as file:
            return copy(pieces_of(file), limit=max_bytes)
    except OSError as error:
        rule, reason = "must be a file that can be downloaded", one_line(error)
        message = f"For '{caller}', 'url' {rule}, but got {url!r}: {reason}. Try again, or give a mirror's address."
        raise (TimeoutError if isinstance(error, TimeoutError) else OSError)(message) from error
    except ImportError as error:
        rule, reason = "must come with the package download installed", f"the error: {one_line(error)}"
        raise ImportError(f"For '{caller}', 'url' {rule}, but got {reason}. Run: pip install download") from error


def _transferred(url: str, target: Path, stall_seconds: float, max_bytes: int) -> None:
    """Transfer the file in a process of its own, which gets the job on its stdin and ends when that is closed."""
    if any(page in url for page in _PAGES):
        raise OSError("a link to a page of a file store is not the address of a file")
    for path in (target, target.with_name(f"{target.name}.part")):
        if os.path.lexists(path):  # `download` would continue it, or take it for the file
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
    shows = sys.stdout is not None and sys.stdout.isatty()
    job = {"url": url, "target": str(target.absolute()), "stall_seconds": stall_seconds, "max_bytes": max_bytes}
    line = json.dumps({**job, "progressbar": shows}).encode() + b"\n"
    command = [sys.executable, "-c", _PROGRAM, transfer.__file__]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": None if shows else subprocess.DEVNULL, "stderr": subprocess.PIPE}
    if shows:
        sys.stdout.flush()
    started: Any = subprocess.Popen(command, **pipes)
    with started as process:
        try:
            with contextlib.suppress(BrokenPipeError):  # it has ended, and its stderr has the reason
                process.stdin.write(line)
                process.stdin.flush()
            stderr = process.stderr.read().decode(errors="replace").strip()
            code = process.wait()
        except BaseException:
            process.kill()
            if shows:
                print()  # the bar's line has no end
            raise
    reason = stderr.rpartition("\n")[2] or f"its process ended with {code}"
    if code == transfer.NOT_INSTALLED:
        raise ImportError(reason)
    if code:
        raise TimeoutError(reason) if code == transfer.STALLED else OSError(reason)
