"""Write files completely or not at all, and read those of strangers."""

from __future__ import annotations

import errno
import glob
import os
import re
import shutil
import stat
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Callable

_STAGING = ".saving-"
_STATE = re.compile(r"state-([0-9]{8,})\.safetensors")
# Windows can't open a folder, and some file systems can't flush one. The file in it is complete all the same.
_FOLDER_CAN_NOT_BE_FLUSHED = {errno.EACCES, errno.EPERM, errno.EINVAL, errno.ENOTSUP}


def absolute(path: str | os.PathLike[str]) -> str:
    """Return a path that still names the same file if the program changes its working directory."""
    return os.path.abspath(os.path.expanduser(os.fspath(path)))


def states_in(folder: str | os.PathLike[str]) -> list[Path]:
    """Return the paths of the training states in a folder, newest first: those with names that a run gives."""
    named = [path for path in Path(folder).glob("state-*") if _STATE.fullmatch(path.name)]
    return sorted(named, key=number_of, reverse=True)


def number_of(state: Path) -> int:
    """Return the number of a training state."""
    return int(state.stem.partition("-")[2])


def read_file(path: str | os.PathLike[str], most: int) -> bytes:
    """Return the content of a file of at most `most` bytes.

    Raises:
        OSError: If it can't be read, is larger, or is no file: a program would wait for ever for the other end of a
            pipe, and read a device without end.
    """
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a file", os.fspath(path))
    if status.st_size > most:
        raise OSError(errno.EFBIG, f"{status.st_size:,} bytes, more than {most:,}", os.fspath(path))
    with open(path, "rb") as file:
        return file.read(most)


def check_own(*paths: str | os.PathLike[str], in_place: bool = False) -> None:
    """Raise an error for what has the name of a file that a program writes, and is none of its own.

    Args:
        paths (str): the paths.
        in_place (bool): whether the content of the file is changed, not the file replaced. Default: ``False``.

    Raises:
        OSError: If it is a link, which may lead to any file, or a pipe or a device, or if a file that is changed in
            place has other names.
    """
    for path in paths:
        with suppress(FileNotFoundError):
            status = os.lstat(path)
            is_file, fault = stat.S_ISREG(status.st_mode), None
            if not (is_file or stat.S_ISDIR(status.st_mode)):
                fault = "a link" if stat.S_ISLNK(status.st_mode) else "not a file"
            elif in_place and is_file and status.st_nlink > 1:
                fault = "has other names (hard links)"
            if fault is not None:
                raise OSError(errno.EINVAL, f"{fault}, to which nothing is written. Remove it", os.fspath(path))


def write_whole(
    path: str | os.PathLike[str], size: int, write: Callable[[str], None], *, keeps_link: bool = False
) -> None:
    """Write a file with `write`, which also verifies it, then replace the file at `path` by it.

    It is written in a temporary folder next to `path`. A killed process leaves that folder, and does not change the old
    file.

    Args:
        path (str): the final path of the file.
        size (int): the approximate number of bytes, used in error messages; 0 if it is not known.
        write (Callable): writes and verifies the file; gets the path to write to.
        keeps_link (bool): whether a link at `path` is kept, and the file that it names replaced. Default: ``False``,
            the link is replaced, because in a stranger's folder it may name any file.

    Raises:
        OSError: If it can't be written; the old file is unchanged.
    """
    name = os.path.realpath(path) if keeps_link else os.path.abspath(path)
    folder = os.path.dirname(name)
    if os.path.exists(name) and not os.path.isfile(name):  # replacing /dev/null would break the system
        reason = "it is a folder" if os.path.isdir(name) else "it is not a regular file"
        raise OSError(f"'{path}' can't be written: {reason}")
    try:
        with tempfile.TemporaryDirectory(prefix=f"{_STAGING}{os.path.basename(name)}-", dir=folder) as staging:
            new = os.path.join(staging, os.path.basename(path))  # the extension sets the format
            write(new)
            os.chmod(new, _mode_of_new_files(staging))  # files that MindSpore writes are read-only
            _flush(new, os.O_RDWR)
            os.replace(new, name)
        _flush_folder(folder)
    except Exception as error:  # libraries raise their own errors for a full disk
        shown = f"'{name}' ({size:,} bytes)" if size else f"'{name}'"
        raise OSError(f"{shown} can't be written: {error}") from error


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file with this content, or leave the old one unchanged.

    Raises:
        OSError: If it can't be written; the old file is unchanged.
    """

    def write(name: str) -> None:
        Path(name).write_bytes(content)

    write_whole(path, len(content), write)


def remove_leftovers(folder: str | os.PathLike[str], name: str | None = None) -> None:
    """Remove the temporary folders of killed processes, in a folder or for a file that no other process is using.

    Args:
        folder (str): the folder.
        name (Optional[str]): the name of the file in it; None: of all files.
    """
    random = "?" * 8  # what `tempfile` adds
    for staging in Path(folder).glob(f"{_STAGING}*" if name is None else f"{_STAGING}{glob.escape(name)}-{random}"):
        shutil.rmtree(staging, ignore_errors=True)


def _mode_of_new_files(folder: str) -> int:
    """Return the permissions of new files, as set by the umask or the folder."""
    path = Path(folder, ".new")
    path.touch()
    return stat.S_IMODE(path.stat().st_mode)


def _flush_folder(folder: str) -> None:
    """Wait until the names in a folder are on the disk, where that is possible."""
    try:
        _flush(folder, os.O_RDONLY)
    except OSError as error:
        if error.errno not in _FOLDER_CAN_NOT_BE_FLUSHED:
            raise


def _flush(path: str, mode: int) -> None:
    """Wait until a file, or a folder's directory entry, is on the disk."""
    descriptor = os.open(path, mode)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
