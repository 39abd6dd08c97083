"""Finds the files of MNIST in a folder, and checks them.

The numbers in the header of an IDX file are not trusted: nothing is allocated or returned before they agree with the
size of the file. So a header of 2**32-1 images costs 16 bytes.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import numpy as np

from .._check import DataError, check_folder, folder_nearby, locate, quote
from .cifar import holds_cifar10
from .images import Split

SIDE, CLASSES = 28, 10
# The constants of MindSpore's tutorials: mean and standard deviation of MNIST's training pixels.
_MEAN, _STD = 0.1307, 0.3081
_PREFIX = {"train": "train", "test": "t10k"}
_GZIP = b"\x1f\x8b"
_KINDS = {b"\x00\x00\x08\x03": "images", b"\x00\x00\x08\x01": "labels"}
_FETCH = "for example with 'train.py --download --data_path FOLDER'"
_REMEDY = f"Remove it and download MNIST again, {_FETCH}."


def load_mnist(root: Path, usage: str | None) -> Split:
    """Read one split of MNIST from a folder in any of the usual layouts.

    Args:
        root (Path): The folder.
        usage (str): ``"train"``, ``"test"``, or None for the split that the folder contains (train if both).

    Returns:
        Split, checked.

    Raises:
        FileNotFoundError: If the folder or a file of the split is missing.
        DataError: If `root` is a file, or a file is damaged, or the files do not belong together.
    """
    check_folder("create_dataset", root, fetch=f"download MNIST into it, {_FETCH}")
    (images_path, labels_path), usage = locate(root, usage, find_split, missing=_missing)
    images, labels = _read(images_path, "images", item=(SIDE, SIDE)), _read(labels_path, "labels", item=())
    if labels.max() >= CLASSES:
        row = int(labels.argmax())
        raise _bad(labels_path, f"contain labels from 0 to {CLASSES - 1}", f"label {labels[row]} in row {row}")
    if len(images) != len(labels):
        raise DataError(
            f"For 'create_dataset', the files {quote(images_path)} and {quote(labels_path)} must "
            f"contain the same number of items, but got {len(images)} images and {len(labels)} labels. "
            "One of them belongs to another data set: download both again."
        )
    return Split(usage, images, labels.astype(np.int32), mean=_MEAN, std=_STD)


def find_split(root: Path, usage: str) -> tuple[Path, ...] | None:
    """Return the image file and the label file of a split, or None if one of them is missing."""
    for folder in _folders(root, usage):
        images, labels = _find(folder, usage, "images-idx3"), _find(folder, usage, "labels-idx1")
        if images and labels:
            return images, labels
    return None


def _missing(root: Path, wanted: tuple[str, ...]) -> str:
    """Return the message about what is missing: one file of a pair, unpacked files, or everything."""
    folders = [(folder, usage) for usage in wanted for folder in _folders(root, usage)]
    for folder, usage in folders:
        for kind, missing_kind in (("images-idx3", "labels-idx1"), ("labels-idx1", "images-idx3")):
            present = _find(folder, usage, kind)
            if present:
                path = folder / f"{_PREFIX[usage]}-{missing_kind}-ubyte"
                return (
                    f"For 'create_dataset', the file {quote(path)} is missing next to "
                    f"'{present.name}'. Download MNIST again, {_FETCH}."
                )
    for folder, usage in folders:
        packed = folder / f"{_PREFIX[usage]}-images-idx3-ubyte.gz"
        if packed.is_file():
            return (
                f"For 'create_dataset', the files of 'data_path' must be unpacked, but got "
                f"{quote(packed)}. Run gunzip on the .gz files in that folder."
            )
    if holds_cifar10(root):
        return (
            f"For 'create_dataset', 'data_path' must contain MNIST, but got {quote(root)} with CIFAR-10. "
            "Give dataset='cifar10', or '--dataset cifar10'."
        )
    names = " or ".join(f"{_PREFIX[usage]}-images-idx3-ubyte" for usage in wanted)
    nearby = folder_nearby(root, lambda folder: all(find_split(folder, usage) for usage in _PREFIX))
    remedy = f"Download MNIST, {_FETCH}." if nearby is None else f"Give {quote(nearby)}, which contains MNIST."
    return (
        f"For 'create_dataset', 'data_path' must contain MNIST's {names} (in the folder itself, in "
        f"train/ and test/, or in MNIST/raw/), but got {quote(root)} without it. "
        f"{remedy}"
    )


def _folders(root: Path, usage: str) -> tuple[Path, ...]:
    """Return the folders where a split may be: tutorial, flat, torchvision (two levels), unzipped here."""
    names = (usage, "", "raw", "MNIST/raw", f"MNIST_Data/{usage}")
    return tuple(root / name for name in names)


def _find(folder: Path, usage: str, kind: str) -> Path | None:
    """Return the path of a file, whose name may have a dash (the original) or a dot (some unpackers)."""
    stem = f"{_PREFIX[usage]}-{kind}-ubyte"
    for name in (stem, stem.replace("-idx", ".idx")):
        if (folder / name).is_file():
            return folder / name
    return None


def _read(path: Path, kind: str, *, item: tuple[int, ...]) -> np.ndarray:
    """Return the items of a file if its header and its size agree."""
    length = 8 + 4 * len(item)
    with open(path, "rb") as file:
        header = file.read(length)
        _check_magic(path, kind, header=header)
        if len(header) < length:
            raise _bad(path, f"begin with a header of {length} bytes", f"{len(header)}")
        count, *shape = struct.unpack(f">{1 + len(item)}I", header[4:])
        if tuple(shape) != item:
            raise _bad(path, f"contain images of {SIDE}x{SIDE}", "x".join(map(str, shape)))
        content_bytes = os.fstat(file.fileno()).st_size - length
        _check_count(path, kind, count=count, size=math.prod(item), content_bytes=content_bytes)
        items = np.fromfile(file, np.uint8, count=content_bytes)
    # Fewer only if the file was truncated meanwhile.
    _check_count(path, kind, count=count, size=math.prod(item), content_bytes=len(items))
    return items.reshape(count, *item)


def _check_magic(path: Path, kind: str, *, header: bytes) -> None:
    """Raise an error for a file that is empty or of another kind."""
    if not header:
        raise _bad(path, f"be an IDX file of {kind}", "an empty file")
    if header.startswith(_GZIP):
        raise _bad(path, f"be an IDX file of {kind}", "a gzip file", remedy="Run gunzip on it.")
    actual = _KINDS.get(header[:4])
    if actual != kind:
        got = f"a file of {actual}" if actual else f"a file that begins with 0x{header[:4].hex()}"
        raise _bad(path, f"be an IDX file of {kind}", got)


def _check_count(path: Path, kind: str, *, count: int, size: int, content_bytes: int) -> None:
    """Compare the count in the header with the number of bytes after it."""
    if count == 0:
        raise _bad(path, f"contain at least one of its {kind}", "a header with the number 0")
    if content_bytes != count * size:
        rule = f"contain the {count} {kind} of its header ({count * size} bytes)"
        raise _bad(path, rule, f"{content_bytes} bytes after the header")


def _bad(path: Path, rule: str, got: str, *, remedy: str = _REMEDY) -> DataError:
    return DataError(f"For 'create_dataset', the file {quote(path)} must {rule}, but got {got}. {remedy}")
