"""Finds the files of MNIST in a folder, and checks them.

MindSpore's `MnistDataset` reads them too, but takes labels above 9, mixes the splits, and knows one layout only. The
numbers in the header of an IDX file are compared with the size of the file before anything is allocated: a header of
2**32-1 images costs 16 bytes.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path

import numpy as np

from .files import DataFiles, bad_file, check_labels
from .images import Split

SIDE, CLASSES = 28, 10
# The constants of MindSpore's tutorials: mean and standard deviation of MNIST's training pixels.
_MEAN, _STD = 0.1307, 0.3081
_MOST = 1_000_000  # rows; sets in this format have up to 814,255
_MAGIC = {"images": b"\x00\x00\x08\x03", "labels": b"\x00\x00\x08\x01"}
_REMEDY = "Download MNIST, for example with 'train.py --download --data_path FOLDER'."


def load_mnist(root: Path, usage: str | None) -> Split:
    """Read one split of MNIST from a folder in any of the usual layouts.

    Args:
        root (Path): The folder.
        usage (str): ``"train"``, ``"test"``, or None for the split that the folder contains (train if both).

    Returns:
        Split, checked.

    Raises:
        FileNotFoundError: If the folder or a file of the split is missing.
        DataError: If a file is damaged, or the files do not belong together.
    """
    (images_path, labels_path), usage = MNIST.locate(root, usage)
    images, labels = _read(images_path, "images", (SIDE, SIDE)), _read(labels_path, "labels", ())
    check_labels(labels_path, labels, CLASSES, _REMEDY)
    if len(images) != len(labels):
        rule = f"have a label for each of the {len(images)} images in '{images_path.name}'"
        raise bad_file(labels_path, rule, f"{len(labels)} labels", _REMEDY)
    return Split(usage, images, labels.astype(np.int32), mean=_MEAN, std=_STD)


def _layouts(root: Path, usage: str) -> list[tuple[Path, ...]]:
    """Return the image file and the label file in each layout: the tutorials', flat, torchvision's, unpacked here.

    Their names have a dash (the original) or a dot (some unpackers).
    """
    stem = "train" if usage == "train" else "t10k"
    return [
        tuple(root / folder / f"{stem}-{kind}-ubyte" for kind in (f"images{dash}idx3", f"labels{dash}idx1"))
        for folder in (usage, "", "raw", "MNIST/raw", f"MNIST_Data/{usage}")
        for dash in "-."
    ]


MNIST = DataFiles(
    "MNIST's four files, unpacked (in the folder itself, in train/ and test/, or in MNIST/raw/)", _layouts, _REMEDY
)


def _read(path: Path, kind: str, item: tuple[int, ...]) -> np.ndarray:
    """Return the items of a file if its header and its size agree."""
    length = 8 + 4 * len(item)
    with open(path, "rb") as file:
        header = file.read(length)
    if len(header) < length or header[:4] != _MAGIC[kind]:
        raise bad_file(path, f"be an IDX file of {kind}", f"one that begins with 0x{header[:4].hex()}", _REMEDY)
    count, *shape = struct.unpack(f">{1 + len(item)}I", header[4:])
    if tuple(shape) != item:
        raise bad_file(path, f"contain images of {SIDE}x{SIDE}", "x".join(map(str, shape)), _REMEDY)
    size, expected = path.stat().st_size - length, count * math.prod(item)
    if not 0 < count <= _MOST or size != expected:
        rule = f"contain the {count} {kind} of its header ({expected} bytes), and at least one, at most {_MOST:,}"
        raise bad_file(path, rule, f"{size} bytes after the header", _REMEDY)
    return np.fromfile(path, np.uint8, expected, offset=length).reshape(count, *item)
