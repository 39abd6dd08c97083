"""How does one file come over the network in bounded time?

The `download` package sets no timeout on a body, so it runs in a child process, which is stopped
when the file stops growing or grows too large. Run as a program, this module is that child; as such
it imports nothing of `model_zoo`, so that it starts in a moment.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any, Callable

_POLL_SECONDS = 0.05
# `-c` puts the working directory first on the path and a script its own folder, where our
# download.py would be taken for the package of that name: neither may be searched.
_START = "import runpy, sys; sys.path[:] = filter(None, sys.path); runpy.run_path(sys.argv.pop(1), run_name='__main__')"


def fetch(url: str, target: Path, *, stall_seconds: float, max_bytes: int, caller: str) -> None:
    """Fetch `url` into the file `target`, whose folder must be empty.

    Args:
        url (str): Address of the file.
        target (Path): Where to put it.
        stall_seconds (float): How long the file may stay as long as it is.
        max_bytes (int): How long the file may become.
        caller (str): Whose argument `url` is, for the wording of errors.

    Raises:
        TimeoutError: If the server stalls.
        OSError: If the file can't be fetched, or is longer than `max_bytes`.
    """
    log = target.with_name("fetch.log")
    unfetched = partial(_unfetched, caller, url)
    with open(log, "wb") as errors:
        child = subprocess.Popen(
            [sys.executable, "-c", _START, __file__, url, str(target)],
            stdin=subprocess.PIPE,
            stdout=None if sys.stdout.isatty() else subprocess.DEVNULL,
            stderr=errors,
        )
        try:
            _watch(child, target, unfetched, stall_seconds=stall_seconds, max_bytes=max_bytes)
        finally:
            child.kill()
            child.communicate()
    if child.returncode != 0 or not target.is_file():
        raise OSError(unfetched(_reason(log)))


def _watch(
    child: subprocess.Popen[bytes],
    target: Path,
    unfetched: Callable[[str], str],
    *,
    stall_seconds: float,
    max_bytes: int,
) -> None:
    """Return when the child has ended; raise when the file stalls or gets too long."""
    size, since = 0, time.monotonic()
    while child.poll() is None:
        time.sleep(_POLL_SECONDS)
        now = _size(target)
        if now > max_bytes:
            raise OSError(unfetched(f"it is longer than {max_bytes} bytes"))
        if now != size:
            size, since = now, time.monotonic()
        elif time.monotonic() - since > stall_seconds:
            reason = f"nothing came for {stall_seconds:g} seconds, after {size} bytes"
            raise TimeoutError(unfetched(reason))


def _size(target: Path) -> int:
    """Return the bytes on disk: the package writes to <target>.part and renames."""
    sizes = [0]
    for path in (target, target.with_name(target.name + ".part")):
        with contextlib.suppress(FileNotFoundError):
            sizes.append(path.stat().st_size)
    return max(sizes)


def _reason(log: Path) -> str:
    """Return what the child said last, without the package's preamble."""
    lines = log.read_text(errors="replace").split("\n")
    said = [line for line in lines if line.strip()]
    return said[-1].rpartition("Error: ")[2].strip() if said else "no reason was given"


def _unfetched(caller: str, url: str, reason: str) -> str:
    return (
        f"For '{caller}', 'url' must be a file that can be fetched, but got {url!r}: "
        f"{reason}. Try again, or give a mirror's address."
    )


def _main(url: str, target: str) -> int:
    """Be the child: fetch with the `download` package, and put an error on one line."""
    _die_with_parent()
    _keep_tls()
    try:
        from download import download

        download(url, target, progressbar=sys.stdout.isatty(), verbose=False)
    except Exception as error:  # the package raises bare Exception and RuntimeError
        print(" ".join(str(error).split()), file=sys.stderr)
        return 1
    return 0


def _die_with_parent() -> None:
    """End when the parent does, however it ended: its end of the pipe closes."""

    def wait() -> None:
        # Not sys.stdin: a thread inside its lock makes the interpreter abort at its end.
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _keep_tls() -> None:
    """Refuse a redirect from https to a scheme in the clear, which urllib follows."""
    handler = urllib.request.HTTPRedirectHandler()
    follow = handler.redirect_request

    def redirect(req: Any, fp: Any, code: int, msg: str, headers: Any, newurl: str) -> Any:
        if req.type == "https" and not newurl.lower().startswith("https:"):
            raise urllib.error.URLError("the server redirects from https to an open connection")
        return follow(req, fp, code, msg, headers, newurl)

    handler.redirect_request = redirect  # type: ignore[method-assign]
    urllib.request.install_opener(urllib.request.build_opener(handler))


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
