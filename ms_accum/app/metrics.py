"""Writes the metrics of a run: a line of JSON for each window, and one for each evaluation."""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections import deque
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, TextIO

from mindspore.train import Callback, RunContext

from .. import _check
from ..saving.files import absolute, break_hard_link

# The line of a window has "update", that of an evaluation "updates": those before it.
_EVALUATION = b'"updates": '


class MetricsFile(Callback):
    """Write one line of JSON for each window, and one for each evaluation, to a file.

    A resumed run keeps the lines of the windows before it, with the evaluations up to the last of them. If the file
    can't be written, there is one warning and training continues.

    Args:
        path (str): the file; that of another run is replaced.
    """

    def __init__(self, path: str):
        self._shown_path = path
        self._path = absolute(path)
        self._file: TextIO | None = None
        self._writes = False
        self._epoch = 0
        self._updates = 0
        self._evaluated: int | None = None  # the updates before the evaluation in the last line

    def on_train_begin(self, run_context: RunContext) -> None:
        try:
            self._open(run_context.original_args().get("cur_step_num", 0))
        except (OSError, ValueError) as error:
            self._give_up(error)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self._epoch = run_context.original_args().cur_epoch_num

    def on_train_step_end(self, run_context: RunContext) -> None:
        record = run_context.original_args().record
        self._epoch = record.epoch
        self._updates = record.update
        self._evaluated = None
        self._write({name: _in_json(value) for name, value in record.shown.items() if name != "step"})

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        results = run_context.original_args().get("eval_results")
        if results and self._updates:
            self.evaluated(self._updates, results)

    def evaluated(self, updates: int, results: Mapping[str, Any]) -> None:
        """Write the results of an evaluation, during the run or after it; of a run that has not begun, nothing.

        A resumed run may repeat the last evaluation before it, which is not written again.
        """
        if updates != self._evaluated:
            self._evaluated = updates
            self._write({"epoch": self._epoch, "updates": updates, **numbers_of(results)})

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _open(self, windows: int) -> None:
        """Open the file after the lines that are kept; these are never removed, not even temporarily."""
        length, last_line = 0, b""
        if os.path.exists(self._path):
            if stat.S_ISFIFO(os.stat(self._path).st_mode):
                raise OSError("it is a pipe, whose reader the run would wait for")
            break_hard_link(self._path)
            length, last_line = _kept_lines(self._path, windows) if windows else (0, b"")
        self._file = open(self._path, "a", encoding="utf-8", buffering=1)
        self._writes = True
        self._epoch = _fields(last_line).get("epoch", 0)
        self._evaluated = _fields(last_line).get("updates")
        if os.path.getsize(self._path) > length:
            self._file.truncate(length)

    def _write(self, fields: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        try:
            line = json.dumps(fields) + "\n"
            if self._file is not None:
                self._file.write(line)
            else:  # after the run
                with open(self._path, "a", encoding="utf-8") as file:
                    file.write(line)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        with contextlib.suppress(OSError):
            self.__exit__()
        self._file = None
        self._writes = False
        _check.warn(f"metrics are no longer written to '{self._shown_path}': {error}")


def _kept_lines(path: str, windows: int) -> tuple[int, bytes]:
    """Return the bytes of the lines of so many windows and the evaluations up to the next window, and the last line."""
    length = windows_read = 0
    last_line = b""
    with open(path, "rb") as file:
        for line in file:
            is_window = _EVALUATION not in line
            if (is_window and windows_read == windows) or not line.endswith(b"\n"):
                break
            line.decode()
            windows_read += is_window
            length += len(line)
            last_line = line
    return length, last_line


def ends_with_evaluation(path: str) -> bool:
    """Return whether the last line of a file of metrics is that of an evaluation."""
    last_lines: Sequence[bytes] = ()
    with contextlib.suppress(OSError):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                last_lines = deque(file, maxlen=1)
    return any("updates" in _fields(line) for line in last_lines)


def _fields(line: bytes) -> Mapping[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        fields = json.loads(line)
        return fields if isinstance(fields, dict) else {}
    return {}


def numbers_of(results: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the results of an evaluation that are finite numbers, each under one name."""
    numbers: dict[str, int | float] = {}
    for name, value in results.items():
        if isinstance(value, Real) and math.isfinite(value):
            name = "accuracy" if name == "acc" else name  # MindSpore has two names for this metric
            numbers[name] = value if type(value) is int else float(value)
    return numbers


def _in_json(value: object) -> object:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
