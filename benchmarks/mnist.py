"""The MNIST files that the benchmarks read: the real ones, or random bytes."""

from __future__ import annotations

import itertools
import os
import shutil
import struct
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

TRAIN_ROWS, TEST_ROWS = 60_000, 10_000
_PREFIX = {"train": "train", "test": "t10k"}
_KINDS = ("images?idx3-ubyte", "labels?idx1-ubyte")


def real() -> Path | None:
    """Return the zip or folder with the real MNIST that the environment variable MNIST_DATA names, or None."""
    path = Path(os.environ.get("MNIST_DATA") or "/nowhere")
    return path if path.exists() else None


def source(short: bool) -> str:
    """Say which files `files` will write."""
    if short:
        return "random bytes, small"
    return "MNIST" if real() else "random bytes of MNIST's size (MNIST_DATA names the real one)"


@contextmanager
def files(short: bool) -> Iterator[Path]:
    """Write the four files into a temporary folder, with train/ and test/ as in MindSpore's tutorials.

    A fresh copy each time: whatever a contender leaves beside its data, the next one does not find it.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = None if short else real()
        if path is None:
            _write_random(folder, *((640, 128) if short else (TRAIN_ROWS, TEST_ROWS)))
        else:
            _copy(path, folder)
        yield folder


def drop_page_cache(folder: Path) -> None:
    """Have the next reader fetch the files from the disk, as after a boot, and not from the page cache."""
    for path in folder.rglob("*-ubyte"):
        with open(path, "rb") as file:
            os.fsync(file.fileno())  # pages that are not yet written stay
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _copy(path: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as unpacked:
        if path.is_file():
            with zipfile.ZipFile(path) as archive:
                archive.extractall(unpacked)
            path = Path(unpacked)
        for (usage, prefix), kind in itertools.product(_PREFIX.items(), _KINDS):
            (folder / usage).mkdir(exist_ok=True)
            pattern = f"{prefix}-{kind}"
            name, paths = pattern.replace("?", "-"), sorted(path.rglob(pattern))
            if not paths:
                raise FileNotFoundError(f"MNIST_DATA: '{path}' holds no {name}")
            shutil.copy(paths[0], folder / usage / name)


def _write_random(folder: Path, *rows: int) -> None:
    random = np.random.default_rng(1)
    for (usage, prefix), count in zip(_PREFIX.items(), rows):
        (folder / usage).mkdir()
        images = struct.pack(">4I", 2051, count, 28, 28) + random.bytes(count * 28 * 28)
        labels = struct.pack(">2I", 2049, count) + random.integers(0, 10, count, np.uint8).tobytes()
        (folder / usage / f"{prefix}-images-idx3-ubyte").write_bytes(images)
        (folder / usage / f"{prefix}-labels-idx1-ubyte").write_bytes(labels)
