"""How does a data set get into a folder, verified?

Everything happens in a staging folder on the destination's file system; a file appears under its
name only when it is the data set's, and in case of an error nothing appears at all.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from os import PathLike
from pathlib import Path
from typing import Callable, NamedTuple
from urllib.parse import urlsplit

from model_zoo import cifar, mnist
from model_zoo._check import DataError, check_path, quote
from model_zoo.archive import OVERHEAD, Files, Fingerprint, agree, fingerprint, refused, unpack_zip
from model_zoo.fetch import fetch
from model_zoo.tarball import unpack_tar


class Source(NamedTuple):
    """A data set that can be fetched.

    Attributes:
        caller: The function that fetches it, for the wording of errors.
        title: Its name.
        url: Address of its archive.
        files: The files that come out, in the order in which `find` gives those of a split.
        unpack: What takes them out of the archive.
        sha256: Of the archive, where that is what is known.
        find: What says where a folder has the files of a split.
    """

    caller: str
    title: str
    url: str
    files: Files
    unpack: Callable[[Path, Path, Files], Files]
    sha256: str | None
    find: Callable[[Path, str], tuple[Path, ...] | None]


MNIST = Source(
    "download_mnist",
    "MNIST",
    "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/MNIST_Data.zip",
    {
        "train/train-images-idx3-ubyte": (
            47_040_016,
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
        ),
        "train/train-labels-idx1-ubyte": (
            60_008,
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
        ),
        "test/t10k-images-idx3-ubyte": (
            7_840_016,
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
        ),
        "test/t10k-labels-idx1-ubyte": (
            10_008,
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    },
    unpack_zip,
    None,
    mnist.find_split,
)
CIFAR10 = Source(
    "download_cifar10",
    "CIFAR-10",
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    # Of single files only the size is known; so the archive is verified, before it is opened.
    {f"{cifar.TOP}/{name}": (cifar.ROWS * cifar.RECORD, None) for split in cifar.FILES.values() for name in split},
    unpack_tar,
    # As published; the archive itself was not at hand when this was written.
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
    cifar.find_split,
)
DEFAULT_URL = MNIST.url


def download_mnist(data_path: str | PathLike[str], url: str = DEFAULT_URL, *, stall_seconds: float = 60.0) -> str:
    """Fetch MNIST into `data_path`/train and `data_path`/test, verified by SHA-256.

    Does nothing where the folder holds MNIST already, in any layout `create_dataset` reads, and
    never replaces a file that is not MNIST's.

    Args:
        data_path (str): The folder; made if it does not exist.
        url (str): Address of the tutorials' archive. Default: MindSpore's own.
        stall_seconds (float): How long the server may send nothing. Default: ``60.0``.

    Returns:
        str, the folder.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is out of range; its kind DataError: if the archive is not MNIST's,
            or the folder holds other files under these names.
        OSError: If the archive can't be fetched, or the disk can't hold it.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)
    """
    return _download(MNIST, data_path, url, stall_seconds)


def download_cifar10(data_path: str | PathLike[str], url: str = CIFAR10.url, *, stall_seconds: float = 60.0) -> str:
    """Fetch CIFAR-10's binary form into `data_path`/cifar-10-batches-bin, from an archive verified by SHA-256.

    Does nothing where the folder holds six files of its sizes already, and never replaces a file.

    Args:
        data_path (str): The folder; made if it does not exist.
        url (str): Address of the official archive. Default: its author's.
        stall_seconds (float): How long the server may send nothing. Default: ``60.0``.

    Returns:
        str, the folder.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is out of range; its kind DataError: if the archive is another one,
            or the folder holds other files under these names.
        OSError: If the archive can't be fetched, or the disk can't hold it.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)
    """
    return _download(CIFAR10, data_path, url, stall_seconds)


DOWNLOADS = {"mnist": download_mnist, "cifar10": download_cifar10}


def _download(source: Source, data_path: str | PathLike[str], url: str, stall_seconds: float) -> str:
    root = check_path(source.caller, "data_path", data_path)
    _check_url(source.caller, url)
    _check_seconds(source.caller, stall_seconds)
    if _is_complete(source, root):
        return str(root)
    _refuse_strangers(source, root, source.files)
    with tempfile.TemporaryDirectory(prefix=f".{source.title.lower()}-", dir=_nearest_folder(root)) as staging:
        incoming, verified = Path(staging, "incoming"), Path(staging, "verified")
        incoming.mkdir()
        archive = incoming / "archive"
        limit = sum(size for size, _ in source.files.values()) + OVERHEAD
        fetch(url, archive, stall_seconds=stall_seconds, max_bytes=limit, caller=source.caller)
        try:
            _check_archive(archive, source.sha256, limit=limit)
            files = source.unpack(archive, verified, source.files)
        except DataError as error:
            raise DataError(f"For '{source.caller}', {error}") from error
        _publish(source, verified, root, files)
    return str(root)


def _check_archive(archive: Path, sha256: str | None, *, limit: int) -> None:
    """Refuse another archive than the one that is known."""
    size, found = fingerprint(archive, limit=limit)
    if sha256 not in (None, found):
        raise refused(f"have the SHA-256 {sha256}", f"{found} ({size} bytes)")


def _check_url(caller: str, url: str) -> None:
    """Refuse an address urllib would read from the disk, or not at all."""
    if not isinstance(url, str):
        raise TypeError(f"For '{caller}', 'url' must be a str, but got type {type(url).__name__}.")
    rule = f"For '{caller}', 'url' must be an http:// or https:// address, but got {url!r}."
    if any(character <= " " for character in url):
        raise ValueError(rule)
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        raise ValueError(rule) from None
    if parts.scheme not in ("http", "https") or not named:
        raise ValueError(rule)


def _check_seconds(caller: str, stall_seconds: float) -> None:
    """Refuse a patience that is no positive, finite number."""
    rule = f"For '{caller}', 'stall_seconds' must be a number > 0, but got"
    if isinstance(stall_seconds, bool) or not isinstance(stall_seconds, (int, float)):
        raise TypeError(f"{rule} type {type(stall_seconds).__name__}.")
    if not 0 < stall_seconds < math.inf:
        raise ValueError(f"{rule} {stall_seconds}.")


def _is_complete(source: Source, root: Path) -> bool:
    """Say whether the folder holds the data set, all of it and nothing but it, where it is looked for."""
    for usage in ("train", "test"):
        found = source.find(root, usage)
        # Names of training files have no "test" in them, here and there.
        expected = [value for name, value in source.files.items() if ("test" in name) == (usage == "test")]
        if found is None or not all(map(_matches, found, expected)):
            return False
    return True


def _matches(path: Path, expected: Fingerprint) -> bool:
    """Compare sizes first: it costs nothing, and the digest of a long file does."""
    size, digest = expected
    if path.stat().st_size != size or digest is None:
        return path.stat().st_size == size
    return agree(fingerprint(path, limit=size), expected)


def _refuse_strangers(source: Source, root: Path, files: Files) -> None:
    """Refuse to replace a file that is not the data set's: it may be another one, or all there is."""
    for folder in _folders(root, files):
        if folder.exists() and not folder.is_dir():
            rule, got = "be a folder", f"the file {quote(folder)}. Choose another one."
            raise DataError(f"For '{source.caller}', 'data_path' must {rule}, but got {got}")
    for name, expected in files.items():
        target = root / name
        if os.path.lexists(target) and not (target.is_file() and _matches(target, expected)):
            raise DataError(
                f"For '{source.caller}', 'data_path' must hold {source.title} or no such files, but got "
                f"{quote(target)}, which is not {source.title}'s. Remove it, or choose another folder."
            )


def _folders(root: Path, files: Files) -> list[Path]:
    """Return the folders that the files are in, the innermost first."""
    return [*dict.fromkeys((root / name).parent for name in files), root]


def _nearest_folder(root: Path) -> Path:
    """Return the deepest folder of the path that exists: on the same disk, and not made by us."""
    return next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())


def _publish(source: Source, verified: Path, root: Path, files: Files) -> None:
    """Move the files to their names; if one can't be moved, take back those that were."""
    _refuse_strangers(source, root, files)
    root = root.absolute()
    made = [folder for folder in (*_folders(root, files), *root.parents) if not folder.exists()]
    moved: list[Path] = []
    try:
        for name in files:
            target = root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if not target.exists():
                moved.append(target)
                os.replace(verified / name, target)
    except BaseException:
        for target in moved:
            with contextlib.suppress(OSError):
                target.unlink()
        for folder in made:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
