"""How does MNIST get into a folder, verified?

Everything happens in a staging folder on the destination's file system; a file appears under its
name only when it is MNIST's, and in case of an error nothing appears at all.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from os import PathLike
from pathlib import Path
from urllib.parse import urlsplit

from model_zoo._check import DataError, check_path, quote
from model_zoo.archive import Fingerprint, fingerprint, unpack
from model_zoo.fetch import fetch
from model_zoo.mnist import find_split

DEFAULT_URL = "https://mindspore-website.obs.cn-north-4.myhuaweicloud.com/notebook/datasets/MNIST_Data.zip"
FILES: dict[str, Fingerprint] = {
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
}

_NAME = "download_mnist"
# An archive that compresses nothing is as long as its files, and a little.
_ARCHIVE_OVERHEAD = 1 << 20


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
    root = check_path(_NAME, "data_path", data_path)
    _check_url(url)
    _check_seconds(stall_seconds)
    if _is_complete(root):
        return str(root)
    _refuse_strangers(root)
    with tempfile.TemporaryDirectory(prefix=".mnist-", dir=_nearest_folder(root)) as staging:
        incoming = Path(staging, "incoming")
        incoming.mkdir()
        archive = incoming / "MNIST_Data.zip"
        limit = sum(size for size, _ in FILES.values()) + _ARCHIVE_OVERHEAD
        fetch(url, archive, stall_seconds=stall_seconds, max_bytes=limit)
        unpack(archive, Path(staging, "verified"), FILES)
        _publish(Path(staging, "verified"), root)
    return str(root)


def _check_url(url: str) -> None:
    """Refuse an address urllib would read from the disk, or not at all."""
    if not isinstance(url, str):
        raise TypeError(f"For '{_NAME}', 'url' must be a str, but got type {type(url).__name__}.")
    rule = f"For '{_NAME}', 'url' must be an http:// or https:// address, but got {url!r}."
    if any(character <= " " for character in url):
        raise ValueError(rule)
    try:
        parts = urlsplit(url)
        named = bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        raise ValueError(rule) from None
    if parts.scheme not in ("http", "https") or not named:
        raise ValueError(rule)


def _check_seconds(stall_seconds: float) -> None:
    """Refuse a patience that is no positive, finite number."""
    rule = f"For '{_NAME}', 'stall_seconds' must be a number > 0, but got"
    if isinstance(stall_seconds, bool) or not isinstance(stall_seconds, (int, float)):
        raise TypeError(f"{rule} type {type(stall_seconds).__name__}.")
    if not 0 < stall_seconds < math.inf:
        raise ValueError(f"{rule} {stall_seconds}.")


def _is_complete(root: Path) -> bool:
    """Say whether the folder holds MNIST, all of it and nothing but it, where it is looked for."""
    for usage in ("train", "test"):
        found = find_split(root, usage)
        if found is None:
            return False
        expected = [value for name, value in FILES.items() if name.startswith(f"{usage}/")]
        if not all(map(_matches, found, expected)):
            return False
    return True


def _matches(path: Path, expected: Fingerprint) -> bool:
    """Compare sizes first: it costs nothing, and the digest of a long file does."""
    size = expected[0]
    return path.stat().st_size == size and fingerprint(path, limit=size) == expected


def _refuse_strangers(root: Path) -> None:
    """Refuse to replace a file that is not MNIST's: it may be Fashion-MNIST, or all there is."""
    for folder in (root, root / "train", root / "test"):
        if folder.exists() and not folder.is_dir():
            raise DataError(
                f"For '{_NAME}', 'data_path' must be a folder, but got the file {quote(folder)}. Choose another one."
            )
    for name, expected in FILES.items():
        target = root / name
        if os.path.lexists(target) and not (target.is_file() and _matches(target, expected)):
            raise DataError(
                f"For '{_NAME}', 'data_path' must hold MNIST or no such files, but got "
                f"{quote(target)}, which is not MNIST's. Remove it, or choose another folder."
            )


def _nearest_folder(root: Path) -> Path:
    """Return the deepest folder of the path that exists: on the same disk, and not made by us."""
    return next(folder for folder in (root, *root.absolute().parents) if folder.is_dir())


def _publish(verified: Path, root: Path) -> None:
    """Move the files to their names; if one can't be moved, take back those that were."""
    _refuse_strangers(root)
    root = root.absolute()
    folders = (root / "train", root / "test", root, *root.parents)
    made = [folder for folder in folders if not folder.exists()]
    moved: list[Path] = []
    try:
        for name in FILES:
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
