"""Temporary folders and child processes that end with this process, even if it is killed."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import shutil
import signal
import stat
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Callable

try:
    import fcntl
except ImportError:  # Windows: it can't be found out there whether the process of a folder has ended
    fcntl = None  # type: ignore[assignment]

PREFIX = "ms_accum-"
"""str, what the names of these folders begin with."""
# Locked as long as its process lives. A process id would not show this: ids are used again, and differ in containers.
_LOCK = ".in-use"
_NEW = ".new"
_PR_SET_PDEATHSIG = 1


def scratch_folder() -> str:
    """Create a temporary folder, which is removed when the process ends, and return its path.

    A process that is killed leaves its folder; the first call in another process removes it.

    Raises:
        OSError: If there is no usable temporary folder.
    """
    _remove_abandoned()
    folder = tempfile.mkdtemp(prefix=PREFIX)
    _lock(folder)
    atexit.register(_remove, folder, os.getpid())
    return folder


@contextmanager
def scratch() -> Iterator[Path]:
    """Create a temporary folder for the block.

    Raises:
        OSError: If there is no usable temporary folder.
    """
    folder = scratch_folder()
    try:
        yield Path(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _lock(folder: str) -> None:
    """Lock a folder as long as this process, and those that it forks, live."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError):  # a file system without locks: the folder stays if the process is killed
        path = os.path.join(folder, _NEW)
        fcntl.flock(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600), fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.rename(path, os.path.join(folder, _LOCK))  # now that it is locked


def _remove(folder: str, owner: int) -> None:
    if os.getpid() == owner:  # not a child process that was forked
        shutil.rmtree(folder, ignore_errors=True)


@functools.cache
def _remove_abandoned() -> None:
    """Remove this user's folders whose processes have ended."""
    if fcntl is None:
        return
    with contextlib.suppress(OSError):
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):
                _remove_unless_locked(folder)


def _remove_unless_locked(folder: Path) -> None:
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(folder)
    finally:
        os.close(descriptor)


def end_with(parent: int) -> Callable[[], None] | None:
    """Return a function for the child process, after which it is killed when its parent ends; None if not on Linux.

    Call this before the fork, so that the child need not load a library.

    Args:
        parent (int): process id of the parent.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def request_kill() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return request_kill
