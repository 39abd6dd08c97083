"""Finds the files of CIFAR-10 in a folder, and checks them.

The binary version consists of records of a label and 3 x 32 x 32 bytes, without a header. So only the size of a file
and its labels can be checked.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np

from .._check import DataError, check_folder, folder_nearby, locate, quote
from .images import Split

SIDE, CHANNELS, CLASSES = 32, 3, 10
RECORD = 1 + CHANNELS * SIDE * SIDE
ROWS = 10_000  # in each file of the real set; files made for a test may hold fewer
FILES = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)}
TOP = "cifar-10-batches-bin"

# Mean and standard deviation of the training pixels. Tutorials often use (0.2023, 0.1994, 0.2010), the mean of the
# deviations of single images, with which the inputs have a deviation of 1.23 instead of 1.
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_FETCH = "for example with 'train.py --dataset cifar10 --download --data_path FOLDER'"


def load_cifar10(root: Path, usage: str | None) -> Split:
    """Read one split of CIFAR-10 from a folder of its binary files, or from the parent of that folder.

    Args:
        root (Path): The folder, or its parent.
        usage (str): ``"train"``, ``"test"``, or None for the split that the folder contains (train if both).

    Returns:
        Split, checked, in colour.

    Raises:
        FileNotFoundError: If the folder or a file of the split is missing.
        DataError: If `root` is a file, or a file is damaged, or the files of the split differ in length.
    """
    check_folder("create_dataset", root, fetch=f"download CIFAR-10 into it, {_FETCH}")
    paths, usage = locate(root, usage, find_split, missing=_missing)
    parts = [_read(path) for path in paths]
    for path, part in zip(paths, parts):
        if len(part) != len(parts[0]):
            rule = f"contain the same number of records as '{paths[0].name}', {len(parts[0])}"
            raise _bad(path, rule, f"{len(part)}")
    images = np.concatenate([part[:, 1:] for part in parts]).reshape(-1, CHANNELS, SIDE, SIDE)
    labels = np.concatenate([part[:, 0] for part in parts]).astype(np.int32)
    return Split(usage, images, labels, mean=_MEAN, std=_STD)


def find_split(root: Path, usage: str) -> tuple[Path, ...] | None:
    """Return the files of a split, or None if one of them is missing."""
    for folder in (root, root / TOP):
        paths = tuple(folder / name for name in FILES[usage])
        if all(path.is_file() for path in paths):
            return paths
    return None


def holds_cifar10(root: Path) -> bool:
    """Return whether there is any file of CIFAR-10 in the folder."""
    names = [name for files in FILES.values() for name in files]
    return any((root / top / name).is_file() for top in ("", TOP) for name in names)


def _missing(root: Path, wanted: tuple[str, ...]) -> str:
    """Return the message about what is missing: one file of several, the binary version, or everything."""
    for folder in (root, root / TOP):
        for usage in wanted:
            present = [name for name in FILES[usage] if (folder / name).is_file()]
            missing = [name for name in FILES[usage] if name not in present]
            if present:
                return (
                    f"For 'create_dataset', the file {quote(folder / missing[0])} is missing next to '{present[0]}'. "
                    f"Download CIFAR-10 again, {_FETCH}."
                )
    if any((root / folder / "test_batch").is_file() for folder in ("", "cifar-10-batches-py")):
        return (
            f"For 'create_dataset', 'data_path' must contain CIFAR-10's binary version, but got {quote(root)} with the "
            f"pickled version for Python. Download the binary version, {_FETCH}."
        )
    names = " or ".join(FILES[usage][0] for usage in wanted)
    nearby = folder_nearby(root, lambda folder: all(find_split(folder, usage) for usage in FILES))
    remedy = f"Download CIFAR-10, {_FETCH}." if nearby is None else f"Give {quote(nearby)}, which contains CIFAR-10."
    return (
        f"For 'create_dataset', 'data_path' must contain CIFAR-10's {names} (in the folder itself or in {TOP}/), "
        f"but got {quote(root)} without it. {remedy}"
    )


def _read(path: Path) -> np.ndarray:
    """Return the records of a file, uint8 of shape (N, RECORD)."""
    # The size is checked first, so that a file of any size costs no memory.
    _check_size(path, os.path.getsize(path))
    content = np.fromfile(path, np.uint8)
    _check_size(path, len(content))
    records = content.reshape(-1, RECORD)
    labels = records[:, 0]
    if labels.max() >= CLASSES:
        row = int(labels.argmax())
        raise _bad(path, f"contain labels from 0 to {CLASSES - 1}", f"label {labels[row]} in row {row}")
    return records


def _check_size(path: Path, size: int) -> None:
    """Raise an error unless a file consists of complete records, at most the number in a file of CIFAR-10."""
    if not size:
        raise _bad(path, f"contain records of {RECORD} bytes", "an empty file")
    if size % RECORD:
        raise _bad(path, f"contain complete records of {RECORD} bytes", f"{size} bytes, {size % RECORD} too many")
    if size > ROWS * RECORD:
        raise _bad(path, f"contain at most {ROWS} records", f"{size // RECORD}")


def _bad(path: Path, rule: str, got: str) -> DataError:
    remedy = f"Remove it and download CIFAR-10 again, {_FETCH}."
    return DataError(f"For 'create_dataset', the file {quote(path)} must {rule}, but got {got}. {remedy}")
