"""Write files completely or not at all, and nothing outside of a run's folder."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Callable

_STAGING = ".saving-"


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that still names the same file if the program changes its working directory."""
    return os.path.abspath(os.path.expanduser(os.fspath(path)))


def as_given(path: str, user_path: str | os.PathLike[str]) -> str:
    """Return the path that the user gave for `path`, as long as it names the same file; else `path` itself."""
    user_path = os.path.expanduser(os.fspath(user_path))
    return user_path if absolute(user_path) == path else path


def write_whole(path: str | os.PathLike[str], size: int, write: Callable[[str], None]) -> None:
    """Write a file with `write`, which also verifies it, then replace the file at `path` by it.

    It is written in a temporary folder next to `path`. A killed process leaves that folder, and does not change the old
    file.

    Args:
        path (str): the final path of the file.
        size (int): the approximate number of bytes, used in error messages.
        write (Callable): writes and verifies the file; gets the path to write to.

    Raises:
        OSError: If it can't be written; the old file is unchanged.
    """
    name = os.path.realpath(path)  # a link is kept
    folder = os.path.dirname(name)
    if os.path.exists(name) and not os.path.isfile(name):  # replacing /dev/null would break the system
        reason = "it is a folder" if os.path.isdir(name) else "it is not a regular file"
        raise OSError(f"'{path}' can't be written: {reason}")
    try:
        with tempfile.TemporaryDirectory(prefix=_STAGING, dir=folder) as staging:
            new = os.path.join(staging, os.path.basename(path))  # the extension sets the format
            write(new)
            os.chmod(new, _mode_of_new_files(staging))  # files that MindSpore writes are read-only
            _flush(new, os.O_RDWR)
            os.replace(new, name)
        _flush(folder, os.O_RDONLY)
    except Exception as error:  # libraries raise their own errors for a full disk
        raise OSError(f"'{name}' ({size:,} bytes) can't be written: {error}") from error


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file with this content, or leave the old one unchanged.

    Raises:
        OSError: If it can't be written; the old file is unchanged.
    """

    def write(name: str) -> None:
        Path(name).write_bytes(content)

    write_whole(path, len(content), write)


def check_inside(folder: str | os.PathLike[str], *paths: str | os.PathLike[str]) -> None:
    """Raise an error for a path in a folder that is a link out of it, or below one. The folder itself may be a link.

    Somebody else may have made the run's folder: the targets of its links would be replaced, truncated or removed.

    Raises:
        OSError: If there is such a link, also if it leads to nothing.
    """
    root = os.path.realpath(folder)
    for path in paths:
        target = os.path.realpath(path)
        if os.path.commonpath([root, target]) != root:
            raise OSError(f"'{path}' can't be written: it leads to '{target}', out of its folder. Remove the link.")


def break_hard_link(path: str | os.PathLike[str]) -> None:
    """Replace a file that has a second name by a copy, so that a change in place does not change the other one.

    Raises:
        OSError: If it can't be written; it is unchanged.
    """
    if os.path.isfile(path) and os.stat(path).st_nlink > 1:
        write_whole(path, os.path.getsize(path), partial(shutil.copyfile, path))


def remove_leftovers(folder: str | os.PathLike[str], age: float = 0.0) -> None:
    """Remove temporary folders of killed processes. Those younger than `age` seconds may be in use, and are kept."""
    for staging in Path(folder).glob(f"{_STAGING}*"):
        with contextlib.suppress(OSError):
            if time.time() - staging.stat().st_mtime >= age:
                shutil.rmtree(staging)


def _mode_of_new_files(folder: str) -> int:
    """Return the permissions of new files, as set by the umask or the folder."""
    path = Path(folder, ".new")
    path.touch()
    return stat.S_IMODE(path.stat().st_mode)


def _flush(path: str, mode: int) -> None:
    """Wait until a file, or a folder's directory entry, is on the disk."""
    with contextlib.suppress(PermissionError):  # Windows can't open folders
        descriptor = os.open(path, mode)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
