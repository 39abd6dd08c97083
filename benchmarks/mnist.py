"""The MNIST files that the contenders read."""

from __future__ import annotations

import itertools
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_PREFIX = {"train": "train", "test": "t10k"}
_KINDS = ("images?idx3-ubyte", "labels?idx1-ubyte")


@contextmanager
def files(path: Path) -> Iterator[Path]:
    """Copy the four files of a zip or folder into a temporary one, with train/ and test/ as in the tutorials."""
    with tempfile.TemporaryDirectory() as copied, tempfile.TemporaryDirectory() as unpacked:
        if path.is_file():
            with zipfile.ZipFile(path) as archive:
                archive.extractall(unpacked)
            path = Path(unpacked)
        for (usage, prefix), kind in itertools.product(_PREFIX.items(), _KINDS):
            Path(copied, usage).mkdir(exist_ok=True)
            pattern = f"{prefix}-{kind}"
            name, paths = pattern.replace("?", "-"), sorted(path.rglob(pattern))
            if not paths:
                raise FileNotFoundError(f"MNIST_DATA: '{path}' holds no {name}")
            shutil.copy(paths[0], Path(copied, usage, name))
        yield Path(copied)
