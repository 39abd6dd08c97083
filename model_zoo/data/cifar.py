"""Finds the files of CIFAR-10 in a folder, and checks them.

The binary version consists of records of a label and 3 x 32 x 32 bytes, without a header. So only the size of a file
and its labels can be checked, which MindSpore's `Cifar10Dataset` leaves to its reader.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from .files import DataFiles, bad_file, check_labels
from .images import Split

SIDE, CHANNELS, CLASSES = 32, 3, 10
RECORD = 1 + CHANNELS * SIDE * SIDE
ROWS = 10_000  # in each file of the real set; files made for a test may hold fewer
FILES = {"train": tuple(f"data_batch_{number}.bin" for number in range(1, 6)), "test": ("test_batch.bin",)}
TOP = "cifar-10-batches-bin"

# Mean and standard deviation of the training pixels. Tutorials often use (0.2023, 0.1994, 0.2010), the mean of the
# deviations of single images, with which the inputs have a deviation of 1.23 instead of 1.
_MEAN, _STD = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
_REMEDY = "Download CIFAR-10, for example with 'train.py --dataset cifar10 --download --data_path FOLDER'."


def load_cifar10(root: Path, usage: str | None) -> Split:
    """Read one split of CIFAR-10 from a folder of its binary files, or from the parent of that folder.

    Args:
        root (Path): The folder, or its parent.
        usage (str): ``"train"``, ``"test"``, or None for the split that the folder contains (train if both).

    Returns:
        Split, checked, in colour.

    Raises:
        FileNotFoundError: If the folder or a file of the split is missing.
        DataError: If a file is damaged.
    """
    paths, usage = CIFAR10.locate(root, usage)
    parts = [_read(path) for path in paths]
    for path, part in zip(paths, parts):
        if len(part) != len(parts[0]):
            rule = f"contain the same number of records as '{paths[0].name}', {len(parts[0])}"
            raise bad_file(path, rule, f"{len(part)}", _REMEDY)
    images = np.concatenate([part[:, 1:] for part in parts]).reshape(-1, CHANNELS, SIDE, SIDE)
    labels = np.concatenate([part[:, 0] for part in parts]).astype(np.int32)
    return Split(usage, images, labels, mean=_MEAN, std=_STD)


def _layouts(root: Path, usage: str) -> list[tuple[Path, ...]]:
    """Return the files of a split in the folder, and in that of the archive."""
    return [tuple(folder / name for name in FILES[usage]) for folder in (root, root / TOP)]


CIFAR10 = DataFiles(f"CIFAR-10's binary version (in the folder itself or in {TOP}/)", _layouts, _REMEDY)


def _read(path: Path) -> np.ndarray:
    """Return the records of a file, uint8 of shape (N, RECORD)."""
    size = path.stat().st_size  # before the file is read, so that one of any size costs no memory
    if not 0 < size <= ROWS * RECORD or size % RECORD:
        raise bad_file(path, f"contain 1 to {ROWS} complete records of {RECORD} bytes", f"{size} bytes", _REMEDY)
    records = np.fromfile(path, np.uint8, size).reshape(-1, RECORD)
    check_labels(path, records[:, 0], CLASSES, _REMEDY)
    return records
