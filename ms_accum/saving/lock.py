"""Lets one run at a time write into a folder."""

from __future__ import annotations

import os
from contextlib import suppress

from filelock import FileLock, Timeout

from .files import check_own


class Lock:
    """A file that is locked while a run uses its folder, or a file beside it, and until the process ends.

    Args:
        path (str): the path of the file.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self._given = os.fspath(path)
        self.path = os.path.abspath(path)
        self._lock: FileLock | None = None

    def take(self) -> bool:
        """Lock the file; return False if another process has locked it.

        Raises:
            OSError: If it is a link, or can't be written.
        """
        # Filelock before 3.20.1, which needs Python 3.10, empties the file to which a link leads.
        check_own(self._given, in_place=True)
        self._lock = FileLock(self.path)
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            return False
        self._status = os.stat(self.path)
        return True

    def is_in_place(self) -> bool:
        """Return whether its path still leads to the locked file: the folder may have been moved or removed."""
        with suppress(OSError):
            return os.path.samestat(os.stat(self.path), self._status)
        return False

    def release(self) -> None:
        """Unlock the file, if it is locked."""
        if self._lock is not None:
            self._lock.release()
