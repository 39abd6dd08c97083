"""The callbacks of `train.py`: what is printed and written when a run begins, and its metrics."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, TextIO

import numpy as np
from mindspore.train import Callback, RunContext

from ms_accum import Checkpointer
from ms_accum._check import warn

from .command import show
from .folder import CONFIG, Folder, write_json

_LONGEST = 2**20  # bytes of a line


class Beginning(Callback):
    """Print from which state a run resumes, and write its flags into its folder: now that the state is accepted.

    At the end it checks that the folder is still there.

    Args:
        states (Checkpointer): the states of the run.
        folder (Folder): its folder.
        flags (Mapping): its flags, for the next `--resume`.
    """

    def __init__(self, states: Checkpointer, folder: Folder, flags: Mapping[str, Any]):
        self._states, self._folder, self._flags = states, folder, flags

    def on_train_begin(self, run_context: RunContext) -> None:
        for line in self._states.resumed:
            show("resumed", line)
        if self._folder.writes:
            write_json(os.path.join(self._folder.path, CONFIG), self._flags)

    def on_train_end(self, run_context: RunContext) -> None:
        self._folder.check()  # before the model is written there


class MetricsFile(Callback):
    """Write one line of JSON for each window, with `update`, and one for each evaluation, with `updates`, to a file.

    A resumed run continues the file after the lines of the windows before it. Between two windows is one evaluation: if
    a resumed run makes it again, because no state says that it was made, it replaces the line. If the file can't be
    written, there is one warning, and training continues.

    Args:
        path (str): the file.
        writes (bool): whether this process writes it: with several only rank 0. Default: ``True``.
    """

    def __init__(self, path: str, *, writes: bool = True):
        self._path, self._writes = os.path.abspath(path), writes
        self._file: TextIO | None = None
        self._end_of_windows = 0  # bytes up to the end of the last window's line

    def on_train_begin(self, run_context: RunContext) -> None:
        windows = run_context.original_args().get("cur_step_num", 0)
        if not self._writes:
            return
        try:
            self._file = open(self._path, "a+", encoding="utf-8", buffering=1)
            self._end_of_windows, length = _lengths(self._path, windows)
            self._file.truncate(length)
        except (OSError, ValueError) as error:
            self._give_up(error)

    def on_train_step_end(self, run_context: RunContext) -> None:
        shown = run_context.original_args().record.shown
        self._write({name: value for name, value in shown.items() if name != "step"}, is_window=True)

    def on_eval_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        # Numbers, or arrays with one for each class.
        results = {name: np.asarray(value).tolist() for name, value in args.eval_results.items()}
        self._write({"updates": args.updates, **results}, is_window=False)

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _write(self, fields: Mapping[str, Any], *, is_window: bool) -> None:
        if self._file is None:
            return
        line = {name: None if _is_not_finite(value) else value for name, value in fields.items()}
        try:
            if not is_window:
                self._file.truncate(self._end_of_windows)
            self._file.write(json.dumps(line) + "\n")
            if is_window:
                self._end_of_windows = self._file.tell()
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._file = None
        warn(f"metrics are no longer written to '{self._path}': {error}")


def _is_not_finite(value: object) -> bool:
    """Return whether JSON does not have a value."""
    return isinstance(value, float) and not math.isfinite(value)


def _lengths(path: str, windows: int) -> tuple[int, int]:
    """Return the bytes up to the end of the last of so many windows' lines, and of the evaluations after it."""
    end_of_windows = length = 0
    with open(path, "rb") as file:
        for line in iter(partial(file.readline, _LONGEST), b""):
            is_window = b'"update":' in line
            windows -= is_window
            if windows < 0 or not line.endswith(b"\n"):
                break
            length += len(line)
            end_of_windows = length if is_window else end_of_windows
    return end_of_windows, length
