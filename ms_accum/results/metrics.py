"""Which lines does a run write about its updates and its evaluations?"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Callable, TextIO

from mindspore.train import Callback, RunContext

from .. import _check
from ..saving.files import absolute, break_hard_link

# The line of a window has "update", that of an evaluation "updates": those before it.
_EVALUATION = '"updates": '
_LONGEST = 2**16  # bytes of a line
_OTHER_NAMES = {"acc": "accuracy"}  # MindSpore has two names for one metric


class MetricsFile(Callback):
    """Write one line of JSON for each window, and one for each evaluation, to a file.

    If the file can't be written, there is one warning and training continues.

    Args:
        path (str): the file; an existing one is replaced.
        kept (Callable): returns the number of windows whose lines are kept in a resumed run, with the evaluations up to
            the last of them. Default: none.
    """

    def __init__(self, path: str, kept: Callable[[], int] = lambda: 0):
        self._given, self._kept = path, kept
        self._path = absolute(path)
        self._file: TextIO | None = None
        self._writes = False
        self._epoch = self._updates = 0

    def on_train_begin(self, run_context: RunContext) -> None:
        del run_context
        try:
            self._open(self._kept())
        except (OSError, ValueError) as error:
            self._give_up(error)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self._epoch = run_context.original_args().cur_epoch_num

    def on_train_step_end(self, run_context: RunContext) -> None:
        record = run_context.original_args().record
        self._epoch, self._updates = record.epoch, record.update
        self._write({name: _plain(value) for name, value in record.shown.items() if name != "step"})

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        results = run_context.original_args().get("eval_results")
        if results and self._updates:
            self.evaluated(self._updates, results)

    def evaluated(self, updates: int, results: Mapping[str, Any]) -> None:
        """Write the results of an evaluation, during the run or after it; of a run that has not begun, nothing."""
        self._write({"epoch": self._epoch, "updates": updates, **number_attributes(results)})

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()
        self._file = None

    def _open(self, windows: int) -> None:
        """Open the file after the lines that are kept; these are never removed, not even temporarily."""
        break_hard_link(self._path)
        if os.path.exists(self._path) and stat.S_ISFIFO(os.stat(self._path).st_mode):
            raise OSError("it is a pipe, whose reader the run would wait for")
        resumes = bool(windows) and os.path.exists(self._path)
        length = _length(self._path, windows) if resumes else 0
        self._file = open(self._path, "r+" if resumes else "w", encoding="utf-8", buffering=1)
        self._writes = True
        if resumes:
            last = _last_line(self._path, length)
            self._epoch = last.get("epoch", 0)
            self._file.seek(length)
            self._file.truncate()

    def _write(self, fields: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        line = json.dumps(fields) + "\n"
        try:
            if self._file is not None:
                self._file.write(line)
                return
            with open(self._path, "a", encoding="utf-8") as file:
                file.write(line)
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        with contextlib.suppress(OSError):
            self.__exit__()
        self._file, self._writes = None, False
        _check.warn(f"metrics are no longer written to '{self._given}': {error}")


def _length(path: str, windows: int) -> int:
    """Return the bytes of the lines of so many windows, and of the evaluations before and directly after the last."""
    length = seen = 0
    with open(path, "rb") as file:
        for line in file:
            is_window = _EVALUATION not in line.decode()
            if (is_window and seen == windows) or not line.endswith(b"\n"):
                break
            seen, length = seen + is_window, length + len(line)
    return length


def ends_with_evaluation(path: str) -> bool:
    """Return whether the last line of a file of metrics is that of an evaluation."""
    try:
        return os.path.isfile(path) and "updates" in _last_line(path, os.path.getsize(path))
    except OSError:
        return False


def _last_line(path: str, length: int) -> dict[str, Any]:
    """Return the fields of the last line in the first `length` bytes of a file of metrics; none if there are none."""
    with open(path, "rb") as file:
        file.seek(max(0, length - _LONGEST))
        lines = file.read(min(length, _LONGEST)).splitlines()
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(lines[-1]) if lines else {}
        return found if isinstance(found, dict) else {}
    return {}


def logged(
    evaluate: Callable[..., Sequence[int]], logs: Sequence[Any], updates: Callable[[], int]
) -> Callable[..., Sequence[int]]:
    """Return a function that evaluates, and writes the accuracy to the logs.

    Args:
        evaluate (Callable): returns the number of right answers and the number of rows.
        logs (Sequence): have a method `evaluated`, as `MetricsFile` has.
        updates (Callable): returns the number of updates so far.
    """

    def evaluated(*given: Any) -> Sequence[int]:
        correct, rows = counts = evaluate(*given)
        for log in logs:
            log.evaluated(updates(), {"accuracy": correct / rows, "correct": correct, "total": rows})
        return counts

    return evaluated


def number_attributes(results: Mapping[str, Any]) -> dict[str, int | float]:
    """Return the results of an evaluation that are finite numbers, each under one name."""
    found = {_OTHER_NAMES.get(name, name): value for name, value in results.items() if isinstance(value, Real)}
    return {name: _number(value) for name, value in found.items() if math.isfinite(value)}


def _number(value: Any) -> int | float:
    return value if type(value) is int else float(value)


def _plain(value: object) -> object:
    """Replace NaN and infinity, which JSON does not have, by None."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
