"""Downloads a data set into a folder, and verifies it.

The package `download` fetches the archive, as a file, into an empty folder: it takes any file of that name for the
result, and a part of one for its beginning. It compares no SHA-256 and unpacks whatever an archive contains, so both is
done here. A file appears under its name only after all have been verified.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any, Callable, NamedTuple

from .._check import DataError, check_path, one_line
from . import cifar, mnist
from .files import DataFiles

TIMEOUT = 60.0
"""float, the seconds after which a server that sends nothing is given up."""
_MORE = 2**24  # bytes that an archive may have in addition to those of its files, which it compresses


class Source(NamedTuple):
    """A data set that can be downloaded.

    Attributes:
        title: Its name.
        files: The SHA-256 and the size of each of its files, in the order in which `data_files` has those of a split.
        data_files: Where they may be in a folder.
        sha256: The SHA-256 of the archive, which is then compared before the archive is opened.
    """

    title: str
    files: dict[str, tuple[str, int]]
    data_files: DataFiles
    sha256: str | None = None


_TOP = "MNIST_Data/"  # the folder in the tutorials' archive
DEFAULT_URL = "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/MNIST_Data.zip"
MNIST = Source(
    "MNIST",
    {
        "train/train-images-idx3-ubyte": ("ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db", 47040016),
        "train/train-labels-idx1-ubyte": ("65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5", 60008),
        "test/t10k-images-idx3-ubyte": ("0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7", 7840016),
        "test/t10k-labels-idx1-ubyte": ("ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2", 10008),
    },
    mnist.MNIST,
)
_CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
_CIFAR10_SHA256 = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
CIFAR10 = Source(
    "CIFAR-10",
    {f"{cifar.TOP}/{name}": (sha256, cifar.ROWS * cifar.RECORD) for name, sha256 in _CIFAR10_SHA256.items()},
    cifar.CIFAR10,
    # As published; not compared with the archive itself, which could not be downloaded here.
    sha256="c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)


def download_mnist(data_path: str | PathLike[str], url: str = DEFAULT_URL) -> str:
    """Download MNIST into `data_path`/train and `data_path`/test, verified by SHA-256.

    It does nothing if the folder already contains MNIST in any layout that `create_dataset` reads, and never replaces
    another file.

    Args:
        data_path (str): The folder; it is created if it does not exist.
        url (str): The address of the tutorials' archive. Default: that of MindSpore.

    Returns:
        str, the folder.

    Raises:
        TypeError: If `data_path` is not a path.
        DataError: If the archive is not that of MNIST, or the folder contains other files under these names.
        OSError: If the archive can't be downloaded, or the disk is full.
        ImportError: If the package `download` is not installed.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)
    """
    return _download("download_mnist", MNIST, data_path, url)


def download_cifar10(data_path: str | PathLike[str], url: str = _CIFAR10_URL) -> str:
    """Download CIFAR-10's binary version into `data_path`/cifar-10-batches-bin, verified by SHA-256.

    It does nothing if the folder already contains the six files, and never replaces another file.

    Args:
        data_path (str): The folder; it is created if it does not exist.
        url (str): The address of the official archive. Default: that of its author.

    Returns:
        str, the folder.

    Raises:
        TypeError: If `data_path` is not a path.
        DataError: If the archive is not that of CIFAR-10, or the folder contains other files under these names.
        OSError: If the archive can't be downloaded, or the disk is full.
        ImportError: If the package `download` is not installed.

    Supported Platforms:
        ``CPU`` (``GPU`` and ``Ascend``: not run here)
    """
    return _download("download_cifar10", CIFAR10, data_path, url)


DOWNLOADS = {"mnist": download_mnist, "cifar10": download_cifar10}


def _download(caller: str, source: Source, data_path: str | PathLike[str], url: str) -> str:
    root = check_path(caller, "data_path", data_path)
    if _is_complete(source, root):
        return str(root)
    for name, facts in source.files.items():
        if os.path.lexists(root / name) and not _is(root / name, *facts):
            raise DataError(
                f"For '{caller}', 'data_path' must contain {source.title} or no such files, but got "
                f"{str(root / name)!r}, which does not belong to {source.title}. Remove it, or choose another folder."
            )
    above = next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())  # on the same disk
    with tempfile.TemporaryDirectory(prefix=".download-", dir=above) as staging:
        archive, verified = Path(staging, "archive"), Path(staging, "verified")
        _fetch(caller, url, archive, sum(size for _, size in source.files.values()) + _MORE)
        _unpack(caller, source, archive, verified)
        for name in source.files:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            os.replace(verified / name, root / name)
    return str(root)


def _is_complete(source: Source, root: Path) -> bool:
    """Return whether the folder contains the data set, unchanged, where `create_dataset` would find it."""
    found = [path for usage in ("train", "test") for path in source.data_files.find(root, usage) or ()]
    return len(found) == len(source.files) and all(_is(p, *facts) for p, facts in zip(found, source.files.values()))


def _is(path: Path, sha256: str, size: int) -> bool:
    """Return whether a file is the expected one; the size is compared first."""
    return path.is_file() and path.stat().st_size == size and _sha256(path) == sha256


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        for piece in iter(partial(file.read, 1 << 20), b""):
            digest.update(piece)
    return digest.hexdigest()


class _AtMost(urllib.request.BaseHandler):
    """Ends what is larger than it can be: `download` would take from a server whatever it sends, without an end."""

    handler_order = 0  # before those that read

    def __init__(self, most: int):
        self._most = self._left = most

    def http_response(self, request: Any, response: Any) -> Any:
        read = response.read

        def read_at_most(size: int | None = None) -> bytes:
            rest = self._left + 1
            piece = read(rest if size is None or size < 0 else min(size, rest))
            self._left -= len(piece)
            if self._left < 0:
                response.close()  # which `download` leaves open
                raise ValueError(f"it is larger than {self._most:,} bytes")
            return piece

        response.read = read_at_most
        return response

    https_response = http_response

    def ftp_open(self, request: Any) -> None:
        raise ValueError("it is not one of http or https")


def _fetch(caller: str, url: str, archive: Path, most: int) -> None:
    """Download a file of at most so many bytes, with a progress bar on a terminal."""
    from download import download  # here, because only this needs it

    shows = sys.stdout is not None and sys.stdout.isatty()
    before, opener = socket.getdefaulttimeout(), urllib.request._opener  # type: ignore[attr-defined]
    socket.setdefaulttimeout(TIMEOUT)  # of the transfer, for which `download` sets none
    urllib.request.install_opener(urllib.request.build_opener(_AtMost(most)))
    try:
        download(url, str(archive), kind="file", progressbar=shows, replace=True, timeout=TIMEOUT, verbose=False)
    except Exception as error:
        reason = one_line(error.__context__ or error)  # `download` raises a RuntimeError about it
        raise OSError(
            f"For '{caller}', 'url' must be a file that can be downloaded, but got {url!r}: {reason}. "
            "Try again, or give a mirror's address."
        ) from error
    finally:
        socket.setdefaulttimeout(before)
        urllib.request.install_opener(opener)


def _unpack(caller: str, source: Source, archive: Path, folder: Path) -> None:
    """Unpack the files of the data set, and nothing else, if each has the right size and SHA-256.

    No name in the archive is used as a path, and no link is made.
    """
    try:
        # tarfile may read a crafted archive for ever, so that one is opened only if its SHA-256 is known.
        if source.sha256 is None and not zipfile.is_zipfile(archive):
            raise ValueError("it is not a zip archive")
        if source.sha256 not in (None, _sha256(archive)):
            raise ValueError(f"its SHA-256 is not {source.sha256}")
        with _entries(archive) as entries:
            for name, (_, size) in source.files.items():
                if entries.get(name, (0,))[0] != size:
                    raise ValueError(f"it has no file {name} of {size} bytes")
            for name, facts in source.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                with entries[name][1]() as packed, open(folder / name, "xb") as file:
                    shutil.copyfileobj(packed, file)
                if not _is(folder / name, *facts):
                    raise ValueError(f"the SHA-256 of {name} is not {facts[0]}")
    except OSError:
        raise  # such as a full disk
    except Exception as error:  # readers of archives raise many kinds if one is damaged
        raise DataError(
            f"For '{caller}', the archive must be that of {source.title}, but got another one: {one_line(error)}. "
            "Nothing was kept; try again, or give another 'url'."
        ) from error


@contextmanager
def _entries(archive: Path) -> Iterator[dict[str, tuple[int, Callable[[], Any]]]]:
    """Open an archive; yield the size of each entry, and a function that opens it, by its name."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as packed:
            yield {e.filename.removeprefix(_TOP): (e.file_size, partial(packed.open, e)) for e in packed.infolist()}
    else:
        with tarfile.open(archive, "r:gz") as tape:
            yield {e.name: (e.size, partial(tape.extractfile, e)) for e in tape if e.isreg()}
