"""How does a file get onto the disk whole?"""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path
from typing import Callable

_STAGING = ".saving-"


def write_whole(path: str | os.PathLike[str], size: int, write: Callable[[str], None]) -> None:
    """Let `write` make and verify a file, which then takes the place of the one at `path`.

    It is made in a folder of its own beside it. Whoever is killed leaves that folder behind, and the old file intact.

    Args:
        path (str): where the file belongs.
        size (int): how many bytes it will have, about, for the wording of errors.
        write (Callable): gets the name to write to.

    Raises:
        OSError: If it can't be written; the old file is untouched.
    """
    name = os.path.realpath(path)  # a link stays one
    folder = os.path.dirname(name)
    try:
        with tempfile.TemporaryDirectory(prefix=_STAGING, dir=folder) as staging:
            whole = os.path.join(staging, os.path.basename(path))  # the format is in the name given
            write(whole)
            os.chmod(whole, _mode_of_new_files(staging))  # MindSpore's own are read-only
            _flush(whole, os.O_RDWR)
            os.replace(whole, name)
        _flush(folder, os.O_RDONLY)
    except Exception as error:  # libraries have errors of their own for a full disk
        raise OSError(f"'{name}' ({size:,} bytes) can't be written: {error}") from error


def remove_leftovers(folder: str | os.PathLike[str], age: float = 0.0) -> None:
    """Remove what killed processes left in a folder, as far as it is so many seconds old: nobody is writing there."""
    for staging in Path(folder).glob(f"{_STAGING}*"):
        with contextlib.suppress(OSError):
            if time.time() - staging.stat().st_mtime >= age:
                shutil.rmtree(staging)


def _mode_of_new_files(folder: str) -> int:
    """Return what the umask, or the folder, leaves of a file's permissions."""
    new = Path(folder, ".new")
    new.touch()
    return stat.S_IMODE(new.stat().st_mode)


def _flush(path: str, mode: int) -> None:
    """Wait until a file, or a folder's list of names, is on the disk."""
    with contextlib.suppress(PermissionError):  # Windows opens no folders
        descriptor = os.open(path, mode)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
