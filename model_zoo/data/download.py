"""Downloads a data set into a folder, and verifies it.

Files are unpacked in a staging folder on the file system of the destination. A file appears under its name only after
all files have been verified; after an error there is none.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from os import PathLike
from pathlib import Path
from typing import Callable, NamedTuple
from urllib.parse import urlsplit

from .._check import DataError, check_path, check_seconds, quote
from . import cifar, mnist
from .archive import Files, Fingerprint, bound_of, copy, pieces_of, rejected, unpack_tar, unpack_zip
from .fetch import fetch


class Source(NamedTuple):
    """A data set that can be downloaded.

    Attributes:
        caller: The name of the function that downloads it, for error messages.
        title: Its name.
        files: Its files, in the order in which `find` returns those of a split.
        unpack: The function that unpacks them.
        sha256: The SHA-256 of the archive, if only that is published, or None.
        find: The function that finds the files of a split in a folder.
    """

    caller: str
    title: str
    files: Files
    unpack: Callable[[Path, Path, Files], Files]
    sha256: str | None
    find: Callable[[Path, str], tuple[Path, ...] | None]


DEFAULT_URL = "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/MNIST_Data.zip"
_MNIST_FILES: Files = {
    "train/train-images-idx3-ubyte": (47_040_016, "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db"),
    "train/train-labels-idx1-ubyte": (60_008, "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5"),
    "test/t10k-images-idx3-ubyte": (7_840_016, "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7"),
    "test/t10k-labels-idx1-ubyte": (10_008, "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2"),
}
MNIST = Source("download_mnist", "MNIST", _MNIST_FILES, unpack_zip, None, mnist.find_split)

_CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
# As published; not compared with the archive itself, which could not be downloaded here.
_CIFAR10_SHA256 = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
_CIFAR10_FILES: Files = {
    f"{cifar.TOP}/{name}": (cifar.ROWS * cifar.RECORD, None) for split in cifar.FILES.values() for name in split
}
CIFAR10 = Source("download_cifar10", "CIFAR-10", _CIFAR10_FILES, unpack_tar, _CIFAR10_SHA256, cifar.find_split)


def download_mnist(data_path: str | PathLike[str], url: str = DEFAULT_URL, *, stall_seconds: float = 60.0) -> str:
    """Download MNIST into `data_path`/train and `data_path`/test, verified by SHA-256.

    It does nothing if the folder already contains MNIST in any layout that `create_dataset` reads, and never replaces a
    file that does not belong to MNIST.

    Args:
        data_path (str): The folder; it is created if it does not exist.
        url (str): The address of the tutorials' archive. Default: that of MindSpore.
        stall_seconds (float): The maximum number of seconds to wait for the next 8 KiB. Default: ``60.0``.

    Returns:
        str, the folder.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
        DataError: If the archive is not that of MNIST, or the folder contains other files under these names.
        OSError: If the archive can't be downloaded, or the disk is full.
        ImportError: If the package `download`, which transfers it, is not installed.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)
    """
    return _download(MNIST, data_path, url, stall_seconds)


def download_cifar10(data_path: str | PathLike[str], url: str = _CIFAR10_URL, *, stall_seconds: float = 60.0) -> str:
    """Download CIFAR-10's binary version into `data_path`/cifar-10-batches-bin; the archive is verified by SHA-256.

    It does nothing if the folder already contains its six files in the right sizes, and never replaces a file.

    Args:
        data_path (str): The folder; it is created if it does not exist.
        url (str): The address of the official archive. Default: that of its author.
        stall_seconds (float): The maximum number of seconds to wait for the next 8 KiB. Default: ``60.0``.

    Returns:
        str, the folder.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.
        DataError: If the archive is not that of CIFAR-10, or the folder contains other files under these names.
        OSError: If the archive can't be downloaded, or the disk is full.
        ImportError: If the package `download`, which transfers it, is not installed.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)
    """
    return _download(CIFAR10, data_path, url, stall_seconds)


DOWNLOADS = {"mnist": download_mnist, "cifar10": download_cifar10}


def _download(source: Source, data_path: str | PathLike[str], url: str, stall_seconds: float) -> str:
    root = check_path(source.caller, "data_path", data_path)
    _check_url(source.caller, url)
    check_seconds(source.caller, "stall_seconds", stall_seconds)
    if _is_complete(source, root):
        return str(root)
    _reject_other_files(source, root, source.files)
    with tempfile.TemporaryDirectory(prefix=f".{source.title.lower()}-", dir=_nearest_folder(root)) as staging:
        archive, verified = Path(staging, "archive"), Path(staging, "verified")
        limit = bound_of(source.files)
        size, sha256 = fetch(url, archive, stall_seconds=stall_seconds, max_bytes=limit, caller=source.caller)
        try:
            if source.sha256 not in (None, sha256):
                raise rejected(f"have the SHA-256 {source.sha256}", f"{sha256} ({size} bytes)")
            files = source.unpack(archive, verified, source.files)
        except DataError as error:
            raise DataError(f"For '{source.caller}', {error}") from error
        _publish(source, verified, root, files)
    return str(root)


def _check_url(caller: str, url: str) -> None:
    """Raise an error for an address that urllib would read from the disk, or can't read."""
    if not isinstance(url, str):
        raise TypeError(f"For '{caller}', 'url' must be a str, but got type {type(url).__name__}.")
    try:
        parts = urlsplit(url)
        valid = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:  # brackets or port
        valid = False
    if not valid or any(character <= " " for character in url):
        raise ValueError(f"For '{caller}', 'url' must be an http:// or https:// address, but got {url!r}.")


def _is_complete(source: Source, root: Path) -> bool:
    """Return whether the folder contains the data set, unchanged, where `create_dataset` would find it."""
    for usage in ("train", "test"):
        paths = source.find(root, usage)
        # In both data sets, only names of test files contain "test".
        expected = [value for name, value in source.files.items() if ("test" in name) == (usage == "test")]
        if paths is None or not all(map(_matches, paths, expected)):
            return False
    return True


def _matches(path: Path, expected: Fingerprint) -> bool:
    """Return whether a file has the expected size and, if it is published, SHA-256; the size is compared first."""
    size, sha256 = expected
    if sha256 is None or path.stat().st_size != size:
        return path.stat().st_size == size
    with open(path, "rb") as file:
        return copy(pieces_of(file), limit=size) == expected


def _reject_other_files(source: Source, root: Path, files: Files) -> None:
    """Raise an error if there is another file under the name of an expected one: it may be the only copy."""
    for folder in _folders(root, files):
        if folder.exists() and not folder.is_dir():
            rule, got = "be a folder", f"the file {quote(folder)}. Choose another one."
            raise DataError(f"For '{source.caller}', 'data_path' must {rule}, but got {got}")
    for name, expected in files.items():
        target = root / name
        if os.path.lexists(target) and not (target.is_file() and _matches(target, expected)):
            raise DataError(
                f"For '{source.caller}', 'data_path' must contain {source.title} or no such files, but got "
                f"{quote(target)}, which does not belong to {source.title}. Remove it, or choose another folder."
            )


def _folders(root: Path, files: Files) -> list[Path]:
    """Return the folders of the files, innermost first."""
    return [*dict.fromkeys((root / name).parent for name in files), root]


def _nearest_folder(root: Path) -> Path:
    """Return the deepest existing folder of the path, which is on the same disk."""
    return next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())


def _publish(source: Source, verified: Path, root: Path, files: Files) -> None:
    """Move the files to their names, all or none."""
    _reject_other_files(source, root, files)
    root, undo = root.absolute(), contextlib.ExitStack()
    try:
        for folder in reversed([*_folders(root, files), *root.parents]):
            if not folder.exists():
                undo.callback(folder.rmdir)
                folder.mkdir(exist_ok=True)
        for target in (root / name for name in files):
            if not target.exists():
                undo.callback(target.unlink, missing_ok=True)
                os.replace(verified / target.relative_to(root), target)
    except BaseException:
        with contextlib.suppress(OSError):
            undo.close()
        raise
