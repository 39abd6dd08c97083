"""Where the files of a data set are, and what their errors say."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Callable, NamedTuple

import numpy as np

from .._check import DataError


class DataFiles(NamedTuple):
    """The files of a data set.

    Attributes:
        title: Its name, and where the files may be, for an error.
        layouts: The function that returns the paths of a split below a folder, in each layout.
        remedy: A sentence about how to get them.
    """

    title: str
    layouts: Callable[[Path, str], list[tuple[Path, ...]]]
    remedy: str

    def find(self, root: Path, usage: str) -> tuple[Path, ...] | None:
        """Return the files of a split, None if it is not complete in any layout."""
        return next((paths for paths in self.layouts(root, usage) if all(path.is_file() for path in paths)), None)

    def locate(self, root: Path, usage: str | None) -> tuple[tuple[Path, ...], str]:
        """Return the files of a split and its name; without `usage`, of the first split that is there.

        Raises:
            FileNotFoundError: If there is none. It names a file that is missing.
        """
        splits = ("train", "test") if usage is None else (usage,)
        for split in splits:
            paths = self.find(root, split)
            if paths:
                return paths, split
        nearest = max(self.layouts(root, splits[0]), key=lambda paths: sum(path.is_file() for path in paths))
        missing = next(path for path in nearest if not path.is_file())
        raise FileNotFoundError(
            f"For 'create_dataset', 'data_path' must be a folder with {self.title}, but got {str(root)!r}: there is no "
            f"file {str(missing)!r}. {self.remedy}"
        )


def check_labels(path: Path, labels: np.ndarray, classes: int, remedy: str) -> None:
    """Raise an error for a label that is not a class."""
    row = int(labels.argmax())
    if labels[row] >= classes:
        raise bad_file(path, f"contain labels from 0 to {classes - 1}", f"label {labels[row]} in row {row}", remedy)


def size_of(path: Path, most: int) -> int:
    """Return the bytes of a file.

    Raises:
        DataError: If there are more than `most`, or it is no file: a program would wait for ever for the other end of a
            pipe, and read a device without end.
    """
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"'{path}' is not a file.")
    if status.st_size > most:
        raise DataError(f"'{path}' has {status.st_size:,} bytes, more than {most:,}.")
    return status.st_size


def bad_file(path: Path, rule: str, got: str, remedy: str) -> DataError:
    """Return the error about a file."""
    return DataError(f"For 'create_dataset', the file {str(path)!r} must {rule}, but got {got}. {remedy}")
