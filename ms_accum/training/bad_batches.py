"""Writes micro-batches that are not finite to a folder, for a later look at them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .. import _check
from ..network.parameters import as_array
from ..ranks.group import Group

MOST = 100
"""int, the maximum number of files that a run writes, so that a failing run does not fill the disk."""


class BadBatches:
    """Writes micro-batches whose loss or gradient is not finite to a folder, each as an ``.npz`` of its columns.

    If only the gradient of a window is not finite, all its micro-batches are written.

    Args:
        folder (str): the folder, created with the first file. Existing files are not replaced.
        group (Optional[Group]): the ranks; file names contain the rank.
    """

    def __init__(self, folder: Any, group: Group | None = None):
        owner = "GradientAccumulation"
        _check.instance(owner, "save_bad_batches", folder, (str, os.PathLike), "a path")
        self._folder = Path(os.path.abspath(os.path.expanduser(folder)))
        if os.path.exists(self._folder) and not os.path.isdir(self._folder):
            _check.raise_invalid(ValueError, owner, "save_bad_batches", "a folder", f"the file '{folder}'")
        self._copies: dict[int, list[np.ndarray]] = {}
        self._left = MOST
        self._prefix = "" if group is None else f"rank-{group.rank}-"

    def keep(self, number: int, micro_batch: tuple) -> None:
        """Keep a copy of a micro-batch, with its number in the window, until the window has ended."""
        if number == 1:
            self._copies.clear()
        self._copies[number] = [as_array(column).copy() for column in micro_batch]

    def window_ended(self, record: Any, bad: Sequence[int]) -> None:
        """Write the micro-batches of the window that were not finite; `bad` contains their numbers in the window."""
        copies, self._copies = self._copies, {}
        if not (bad or record.skipped) or record.overflow or not record.samples:
            return
        if not bad and self._prefix:  # it may be a micro-batch of another rank
            return
        offset = record.bad[0] - bad[0] if bad else 0
        for number in [number for number in (bad or copies) if number in copies][: self._left]:
            part = f"micro-batch-{number + offset}" if bad else f"part-{number}"
            self._write(f"{self._prefix}epoch-{record.epoch}-window-{record.step}-{part}", copies[number])

    def _write(self, name: str, columns: Sequence[np.ndarray]) -> None:
        self._left -= 1
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            np.savez(_free(self._folder, name), *columns)
        except OSError as error:  # the run continues
            self._left = 0
            _check.warn(f"'{self._folder / name}' can't be written: {error.strerror}. No more such files are written.")


def _free(folder: Path, name: str) -> Path:
    """Return a path that does not exist: runs may share a folder."""
    suffixes = itertools.chain([""], (f"-{copy}" for copy in itertools.count(2)))
    paths = (folder / f"{name}{suffix}.npz" for suffix in suffixes)
    return next(path for path in paths if not path.exists())
