"""How is an IDX file read safely?

Every number in a header is a claim. Nothing is allocated or returned before the claim agrees with
the size the file really has, so a header of 2**32-1 images costs 16 bytes.
"""

from __future__ import annotations

import math
import os
import struct
from pathlib import Path

import numpy as np

from model_zoo._check import DataError, quote

SIDE = 28
CLASSES = 10
REMEDY = "Remove it and fetch MNIST again, for example with 'train.py --download'."

_GZIP = b"\x1f\x8b"
_KINDS = {b"\x00\x00\x08\x03": "images", b"\x00\x00\x08\x01": "labels"}


def read_images(path: Path) -> np.ndarray:
    """Read an IDX file of 28x28 gray images.

    Args:
        path (Path): The file.

    Returns:
        numpy.ndarray, uint8 of shape (N, 28, 28).

    Raises:
        DataError: If the file is not exactly such a file.
    """
    return _read(path, "images", item=(SIDE, SIDE))


def read_labels(path: Path) -> np.ndarray:
    """Read an IDX file of labels 0 to 9.

    Args:
        path (Path): The file.

    Returns:
        numpy.ndarray, int32 of shape (N,).

    Raises:
        DataError: If the file is not exactly such a file.
    """
    labels = _read(path, "labels", item=())
    highest = int(labels.max())
    if highest >= CLASSES:
        where = int(labels.argmax())
        raise _bad(path, f"hold labels 0 to {CLASSES - 1}", f"label {highest} at row {where}")
    return labels.astype(np.int32)


def _read(path: Path, kind: str, *, item: tuple[int, ...]) -> np.ndarray:
    """Return the items, when header and size agree that there are that many."""
    length = 8 + 4 * len(item)
    with open(path, "rb") as file:
        header = file.read(length)
        _check_magic(path, kind, header=header)
        if len(header) < length:
            raise _bad(path, f"begin with a header of {length} bytes", f"{len(header)}")
        count, *shape = struct.unpack(f">{1 + len(item)}I", header[4:])
        if tuple(shape) != item:
            raise _bad(path, f"hold images of {SIDE}x{SIDE}", "x".join(map(str, shape)))
        behind = os.fstat(file.fileno()).st_size - length
        _check_count(path, kind, claimed=count, size=math.prod(item), behind=behind)
        items = np.fromfile(file, np.uint8, count=behind)
    # Short only if the file shrank in this moment.
    _check_count(path, kind, claimed=count, size=math.prod(item), behind=len(items))
    return items.reshape(count, *item)


def _check_magic(path: Path, kind: str, *, header: bytes) -> None:
    """Refuse a file that is empty or of another kind, saying what it is where that is known."""
    if not header:
        raise _bad(path, f"be an IDX file of {kind}", "an empty file")
    if header.startswith(_GZIP):
        raise _bad(path, f"be an IDX file of {kind}", "a gzip file", remedy="Run gunzip on it.")
    found = _KINDS.get(header[:4])
    if found != kind:
        got = f"a file of {found}" if found else f"a file that begins with 0x{header[:4].hex()}"
        raise _bad(path, f"be an IDX file of {kind}", got)


def _check_count(path: Path, kind: str, *, claimed: int, size: int, behind: int) -> None:
    """Compare the header's count with the bytes that are behind it."""
    if claimed == 0:
        raise _bad(path, f"hold at least one of its {kind}", "a header that announces 0")
    if behind != claimed * size:
        rule = f"hold the {claimed} {kind} its header announces ({claimed * size} bytes)"
        raise _bad(path, rule, f"{behind} bytes behind the header")


def _bad(path: Path, rule: str, got: str, *, remedy: str = REMEDY) -> DataError:
    return DataError(f"For 'create_dataset', the file {quote(path)} must {rule}, but got {got}. {remedy}")
