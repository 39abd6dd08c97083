"""What does the user see during a run?"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Callable, Protocol, TextIO

from tqdm import tqdm

from .. import _check
from ..window.record import UpdateRecord


class Reporter(Protocol):
    """The interface of objects that are called at every update."""

    def start(self, updates: int | None) -> None:
        """A run begins; `updates` is its number of updates, or None if unknown."""

    def update(self, record: UpdateRecord) -> None:
        """A window has ended."""

    def close(self) -> None:
        """The run has ended, also after an error."""


def _line(record: UpdateRecord) -> str:
    line = f"epoch: {record.epoch} step: {record.step} loss is {record.loss:.7g}"
    return line + " (skipped: the gradient is not finite)" if record.skipped else line


class Lines:
    """Print one line for each update, in the format of MindSpore's tutorial."""

    def start(self, updates: int | None) -> None:
        del updates

    def update(self, record: UpdateRecord) -> None:
        print(_line(record), flush=True)

    def close(self) -> None:
        pass


class Bar:
    """Show a progress bar for the run."""

    def start(self, updates: int | None) -> None:
        self._bar = tqdm(total=updates, unit="update", dynamic_ncols=True, file=sys.stdout)

    def update(self, record: UpdateRecord) -> None:
        if record.skipped:
            self._bar.write(_line(record), file=sys.stdout)
        self._bar.set_postfix_str(f"epoch {record.epoch}, loss {record.loss:.4f}", refresh=False)
        self._bar.update()

    def close(self) -> None:
        self._bar.close()


def progress() -> Reporter:
    """Return a bar if stdout is a terminal, else lines."""
    return Bar() if sys.stdout.isatty() else Lines()


def show(name: str, value: object) -> None:
    """Print one fact about the run before it begins."""
    print(f"{name:16} {value}")


def say(line: str) -> None:
    """Print a line during a run, without damaging a progress bar."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


class Opening:
    """Print lines when the run begins.

    Args:
        name (str): the label of the lines.
        lines (Callable): returns the lines.
    """

    def __init__(self, name: str, lines: Callable[[], Sequence[str]]):
        self._name, self._lines = name, lines

    def start(self, updates: int | None) -> None:
        del updates
        for line in self._lines():
            show(self._name, line)

    def update(self, record: UpdateRecord) -> None:
        pass

    def close(self) -> None:
        pass


class MetricsFile:
    """Write one line of JSON for each window to a file.

    If the file can't be written, there is one warning and training continues.

    Args:
        path (str): the file; an existing one is replaced.
        kept (Callable): returns the number of its first lines to keep in a resumed run. Default: none.
    """

    def __init__(self, path: str, kept: Callable[[], int] = lambda: 0):
        self._path = path
        self._kept = kept
        self._file: TextIO | None = None

    def start(self, updates: int | None) -> None:
        del updates
        try:
            self._open(self._kept())
        except (OSError, ValueError) as error:
            self._give_up(error)

    def update(self, record: UpdateRecord) -> None:
        if self._file is None:
            return
        fields = {name: _plain(value) for name, value in record._asdict().items() if name != "step"}
        try:
            self._file.write(json.dumps(fields) + "\n")
        except OSError as error:
            self._give_up(error)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _open(self, count: int) -> None:
        """Open the file after its first `count` lines; these are never removed, not even temporarily."""
        goes_on = bool(count) and os.path.exists(self._path)
        self._file = open(self._path, "r+" if goes_on else "w", encoding="utf-8", buffering=1)
        if goes_on:
            for _ in range(count):
                self._file.readline()
            self._file.seek(self._file.tell())
            self._file.truncate()

    def _give_up(self, error: Exception) -> None:
        with contextlib.suppress(OSError):
            self.close()
        self._file = None
        _check.warn(f"metrics are no longer written to '{self._path}': {error}")


def _plain(value: object) -> object:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
