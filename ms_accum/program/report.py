"""What does the user see during a run?"""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
from collections.abc import Sequence
from typing import Any, Callable, TextIO

from mindspore.train import Callback, RunContext
from tqdm import tqdm

from .. import _check
from ..window.callbacks import callbacks_of
from ..window.record import UpdateRecord


def _line(record: UpdateRecord) -> str:
    line = f"epoch: {record.epoch} step: {record.step} loss is {record.loss:.7g}"
    return line + " (skipped: the gradient is not finite)" if record.skipped else line


def _results(args: Any) -> list[str]:
    """Return the line about an evaluation, if there was one."""
    results = args.get("eval_results")
    if not results:
        return []
    shown = ", ".join(
        f"{name} {value:.7g}" if isinstance(value, float) else f"{name} {value}" for name, value in results.items()
    )
    return [f"epoch: {args.cur_epoch_num} evaluation: {shown}"]


class Lines(Callback):
    """Print one line for each update, in the format of MindSpore's tutorial, and one for each evaluation."""

    def on_train_step_end(self, run_context: RunContext) -> None:
        print(_line(run_context.original_args().record), flush=True)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        for line in _results(run_context.original_args()):
            print(line, flush=True)


class Bar(Callback):
    """Show a progress bar for the run."""

    _bar: Any = None

    def on_train_begin(self, run_context: RunContext) -> None:
        total = run_context.original_args().planned
        self._bar = tqdm(total=total, unit="update", dynamic_ncols=True, file=sys.stdout)

    def on_train_step_end(self, run_context: RunContext) -> None:
        record = run_context.original_args().record
        if record.skipped:
            self._bar.write(_line(record), file=sys.stdout)
        self._bar.set_postfix_str(f"epoch {record.epoch}, loss {record.loss:.4f}", refresh=False)
        self._bar.update()

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        for line in _results(run_context.original_args()):
            self._bar.write(line, file=sys.stdout)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def progress() -> Callback:
    """Return a bar if stdout is a terminal, else lines."""
    return Bar() if sys.stdout.isatty() else Lines()


def called_in(owner: str, report: Any, callbacks: Any, *, shows: bool) -> list[Callback]:
    """Return what is called in a run: what shows it, by default `progress`, and the user's callbacks."""
    shown = callbacks_of(owner, "report", progress() if report is None else report)
    return [*(shown if shows else ()), *callbacks_of(owner, "callbacks", callbacks)]


def show(name: str, value: object) -> None:
    """Print one fact about the run before it begins."""
    print(f"{name:16} {value}")


def say(line: str) -> None:
    """Print a line during a run, without damaging a progress bar."""
    tqdm.write(line, file=sys.stdout)
    sys.stdout.flush()


class Opening(Callback):
    """Print lines when the run begins.

    Args:
        name (str): the label of the lines.
        lines (Callable): returns the lines.
    """

    def __init__(self, name: str, lines: Callable[[], Sequence[str]]):
        self._name, self._lines = name, lines

    def on_train_begin(self, run_context: RunContext) -> None:
        del run_context
        for line in self._lines():
            show(self._name, line)


class MetricsFile(Callback):
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

    def on_train_begin(self, run_context: RunContext) -> None:
        del run_context
        try:
            self._open(self._kept())
        except (OSError, ValueError) as error:
            self._give_up(error)

    def on_train_step_end(self, run_context: RunContext) -> None:
        if self._file is None:
            return
        record = run_context.original_args().record
        fields = {name: _plain(value) for name, value in record._asdict().items() if name != "step"}
        try:
            self._file.write(json.dumps(fields) + "\n")
        except OSError as error:
            self._give_up(error)

    def __exit__(self, *error: object) -> None:
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
            self.__exit__()
        self._file = None
        _check.warn(f"metrics are no longer written to '{self._path}': {error}")


def _plain(value: object) -> object:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
