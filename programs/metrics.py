"""The callbacks of `train.py`: what is printed and written when a run begins, and its metrics."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from functools import partial
from typing import Any, TextIO

from mindspore.train import Callback, RunContext

from ms_accum import Checkpointer
from ms_accum._check import warn

from .command import show
from .folder import CONFIG, Folder, write_json

_LONGEST = 2**20  # bytes of a line


class Beginning(Callback):
    """Print from which state a run resumes, and write its flags into its folder: now that the state is accepted.

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


class MetricsFile(Callback):
    """Write one line of JSON for each window, with `update`, and one for each evaluation, with `updates`, to a file.

    A resumed run continues the file after the lines of the windows before it. If the file can't be written, there is
    one warning, and training continues.

    Args:
        path (str): the file.
        writes (bool): whether this process writes it: with several only rank 0. Default: ``True``.
    """

    def __init__(self, path: str, *, writes: bool = True):
        self._path, self._writes = os.path.abspath(path), writes
        self._file: TextIO | None = None
        self._updates = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        windows = run_context.original_args().get("cur_step_num", 0)
        if not self._writes:
            return
        try:
            self._file = open(self._path, "a+", encoding="utf-8", buffering=1)
            self._file.truncate(_length_of_windows(self._path, windows))
        except (OSError, ValueError) as error:
            self._give_up(error)

    def on_train_step_end(self, run_context: RunContext) -> None:
        record = run_context.original_args().record
        self._updates = record.update
        self._write({name: value for name, value in record.shown.items() if name != "step"})

    def on_eval_end(self, run_context: RunContext) -> None:
        results = run_context.original_args().eval_results
        self._write({"updates": self._updates, **{name: float(value) for name, value in results.items()}})

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _write(self, fields: Mapping[str, Any]) -> None:
        if self._file is None:
            return
        line = {name: None if _is_not_finite(value) else value for name, value in fields.items()}
        try:
            self._file.write(json.dumps(line) + "\n")
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._file = None
        warn(f"metrics are no longer written to '{self._path}': {error}")


def _is_not_finite(value: object) -> bool:
    """Return whether JSON does not have a value."""
    return isinstance(value, float) and not math.isfinite(value)


def _length_of_windows(path: str, windows: int) -> int:
    """Return the bytes of the lines of so many windows, and of the evaluations up to the next one."""
    length = 0
    with open(path, "rb") as file:
        for line in iter(partial(file.readline, _LONGEST), b""):
            windows -= b'"update":' in line
            if windows < 0 or not line.endswith(b"\n"):
                break
            length += len(line)
    return length
