"""What does the user see during a run?"""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, Callable

from mindspore.train import Callback, RunContext
from tqdm import tqdm

from .. import _check
from ..app.processes import COLUMNS
from ..engine.ends import is_full
from ..training.callbacks import UNKNOWN, callbacks_of
from ..training.record import UpdateRecord

# The approximate number of lines per epoch off a terminal, few enough to be read.
_LINES_IN_AN_EPOCH = 20
_ROWS = 24  # of a terminal whose height is unknown

# Milliseconds: on two CPU cores the MLP, whose micro-batches of 32 rows take 2.5, trains 3 times as fast with larger
# ones; LeNet5, with 5, not a third faster.
_SHORT = 4.0


class Speed:
    """The rows a second: the median of the last windows, because a window that compiles takes seconds."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=9)
        self._windows = 0

    def add(self, record: UpdateRecord) -> None:
        """Count a window, but not the first, which always compiles."""
        self._windows += 1
        if self._windows > 1 and record.seconds > 0:
            self._last.append(record.samples / record.seconds)

    @property
    def rows(self) -> float:
        """float, the rows a second; 0 if there is no window to go by."""
        return median(self._last) if self._last else 0.0

    def __str__(self) -> str:
        return f"{self.rows:,.0f} rows/s" if self._last else ""


def _line(record: UpdateRecord) -> str:
    line = f"epoch: {record.epoch} step: {record.step} loss is {record.loss:.7g}"
    why = "the gradient is not finite" if record.samples else "nothing in it counts"
    return f"{line} (skipped: {why})" if record.skipped else line


def _beside(record: UpdateRecord, speed: Speed) -> list[str]:
    """Return the learning rate and the speed as texts, if they are known."""
    lr = "" if math.isnan(record.lr) else f"lr {record.lr:.4g}"
    return list(filter(None, (lr, str(speed))))


def _results(args: Any) -> list[str]:
    """Return the line about an evaluation, if there was one."""
    found = (args.get("eval_results") or {}).items()
    shown = [f"{name} {value:.7g}" if isinstance(value, float) else f"{name} {value}" for name, value in found]
    names = ", ".join(map(_check.one_line, shown))
    return [f"epoch: {args.cur_epoch_num} evaluation: {names}"] if shown else []


class Lines(Callback):
    """Print lines that begin as MindSpore's tutorial prints them, and one for each evaluation.

    Args:
        every (Optional[int]): windows from one line to the next; there is also one at the end of an epoch, and one for
            each skipped window. Default: ``None``, so many that an epoch has about 20 lines at most.
    """

    def __init__(self, every: int | None = None):
        self._every, self._since = every, 0
        self._speed = Speed()
        self._last: UpdateRecord | None = None

    def on_train_step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        self._last, self._since = args.record, self._since + 1
        self._speed.add(args.record)
        if args.record.skipped or is_full(self._since, self._every or _every(args.get("batch_num", 1))):
            self._print(args.record)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        if self._since and self._last is not None:
            self._print(self._last)
        for line in _results(run_context.original_args()):
            print(line, flush=True)

    def _print(self, record: UpdateRecord) -> None:
        self._since = 0
        print(", ".join((_line(record), *_beside(record, self._speed))), flush=True)


class Bar(Callback):
    """Show a progress bar for the run, for a terminal of 80 columns.

    Args:
        columns (Optional[int]): the width. Default: ``None``, that of the terminal.
    """

    def __init__(self, columns: int | None = None):
        self._columns = columns
        self._speed = Speed()
        self._bar: Any = None

    def on_train_begin(self, run_context: RunContext) -> None:
        total = run_context.original_args().planned
        end = "[{elapsed}<{remaining}{postfix}]"
        form = f"{{desc}} {{percentage:3.0f}}%|{{bar}}| {{n_fmt}}/{{total_fmt}} {end}"
        columns = self._columns or _columns_of_a_terminal_without_rows()
        how: dict[str, Any] = {"ncols": columns, "nrows": _ROWS} if columns else {"dynamic_ncols": True}
        how["bar_format"] = form if total is not None else "{desc} {n_fmt} updates [{elapsed}{postfix}]"
        self._bar = tqdm(total=total, file=sys.stdout, **how)

    def on_train_step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        record = args.record
        self._speed.add(record)
        if record.skipped:
            self._bar.write(_line(record), file=sys.stdout)
        last = args.get("initial_epoch", 0) + args.get("epoch_num", record.epoch)
        self._bar.set_description_str(f"epoch {record.epoch}/{last}", refresh=False)
        shown = (f"loss {record.loss:.4f}", *_beside(record, self._speed))
        self._bar.set_postfix_str(", ".join(shown), refresh=False)
        self._bar.update()

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        for line in _results(run_context.original_args()):
            self._bar.write(line, file=sys.stdout)

    def on_train_end(self, run_context: RunContext) -> None:
        del run_context
        self._bar.close()  # before what is printed about the files

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _columns_of_a_terminal_without_rows() -> int | None:
    """Return the width of a terminal that reports no height, as some containers do, where tqdm would show no bar."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return None
    return None if size.lines else size.columns or 80


def _every(windows: int) -> int:
    """Return the windows from one line to the next, in epochs of so many."""
    return _LINES_IN_AN_EPOCH if windows == UNKNOWN else math.ceil(windows / _LINES_IN_AN_EPOCH)


def progress(every: int | None = None) -> Callback:
    """Return a bar if stdout, or the launcher's, is a terminal, else lines, one for `every` so many windows."""
    if sys.stdout.isatty():
        return Bar()
    columns = os.environ.get(COLUMNS, "")
    return Bar(int(columns)) if columns.isdecimal() and int(columns) else Lines(every)


def called_in(owner: str, report: Any, callbacks: Any, *, shows: bool) -> list[Callback]:
    """Return what is called in a run: what shows it, by default `progress`, and the user's callbacks."""
    shown = callbacks_of(owner, "report", progress() if report is None else report)
    return [*(shown if shows else ()), *callbacks_of(owner, "callbacks", callbacks)]


def show(name: str, value: object) -> None:
    """Print one fact about the run before it begins, as one line whatever it contains."""
    print(f"{name:16} {_check.one_line(value, _check.LINE)}")


def say(line: str) -> None:
    """Print a line during a run, without damaging a progress bar."""
    tqdm.write(_check.one_line(line, _check.LINE), file=sys.stdout)
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


class Hint(Callback):
    """Print a hint at the end if micro-batches were so short that the cost of a call dominated.

    Args:
        rows (int): of a micro-batch.
    """

    def __init__(self, rows: int):
        self._rows, self._speed = rows, Speed()

    def on_train_step_end(self, run_context: RunContext) -> None:
        self._speed.add(run_context.original_args().record)

    def on_train_end(self, run_context: RunContext) -> None:
        del run_context
        if self._speed.rows and (took := 1000 * self._rows / self._speed.rows) < _SHORT:
            show("hint", f"a micro-batch takes {took:.1f} ms, mostly the fixed cost of a call;")
            show("", "try --batch_size auto --effective_batch N --memory_budget SIZE")
