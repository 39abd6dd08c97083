"""Shows how a run proceeds: a progress bar on a terminal, elsewhere about 20 lines per epoch."""

from __future__ import annotations

import math
import os
import sys
from collections import deque
from statistics import median
from typing import Any

from mindspore.train import Callback, EarlyStopping, RunContext
from tqdm import tqdm

from .. import _check
from .callbacks import UNKNOWN, callbacks_of
from .record import UpdateRecord

_LINES_IN_AN_EPOCH = 20  # few enough to be read
_ROWS = 24  # of a terminal whose height is unknown


def callbacks_of_run(owner: str, report: Any, callbacks: Any, *, shows: bool) -> list[Callback]:
    """Return the callbacks of a run: those that show it, by default `progress`, and the user's."""
    reports = callbacks_of(owner, "report", progress() if report is None else report)
    return [*(reports if shows else ()), *callbacks_of(owner, "callbacks", callbacks)]


def progress(every: int | None = None) -> Callback:
    """Return a bar if stdout is a terminal, else lines, one per `every` windows."""
    return Bar() if sys.stdout.isatty() else Lines(every)


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
        """float, the rows a second; 0 if it is not known yet."""
        return median(self._last) if self._last else 0.0


class Stop:
    """The line about a run that a callback has stopped: by which one, where, and which epoch was the best."""

    def __init__(self) -> None:
        self._epoch = 0  # the last one that has ended
        self._lowest: tuple[float, int] | None = None  # the lowest evaluation loss, and its epoch
        self._best: dict[EarlyStopping, tuple[float, int]] = {}

    def epoch_begin(self, args: Any) -> None:
        """Note whether the last epoch was the best, which the other callbacks have decided at its end."""
        stoppers = [callback for callback in args.get("list_callback", ()) if isinstance(callback, EarlyStopping)]
        for stopper in stoppers:
            value = float(stopper.best)
            if math.isfinite(value) and (stopper not in self._best or self._best[stopper][0] != value):
                self._best[stopper] = value, self._epoch

    def epoch_end(self, args: Any) -> None:
        """Note the epoch and its evaluation loss."""
        self._epoch = args.cur_epoch_num
        loss = (args.get("eval_results") or {}).get("eval_loss", math.nan)
        if loss < (self._lowest or (math.inf,))[0]:
            self._lowest = float(loss), self._epoch

    def line(self, args: Any) -> str:
        """Return the line at the end of a run, an empty text if no callback of any rank has stopped it."""
        if not args.get("stopped", False):
            return ""
        stopper, epoch = args.get("stopped_by"), args.cur_epoch_num
        last = args.get("initial_epoch", 0) + args.get("epoch_num", epoch)
        self.epoch_begin(args)
        name = "a callback of another rank" if stopper is None else _check.one_line(type(stopper).__name__)
        position = f"epoch {epoch} of {last}"
        if "record" in args:
            position += f", update {args.record.update}"
        return f"stopped{' early' if epoch < last else ''} by {name}: {position}{self._best_epoch(stopper)}"

    def _best_epoch(self, stopper: Callback | None) -> str:
        if isinstance(stopper, EarlyStopping):
            if stopper not in self._best:
                return ""
            value, epoch = self._best[stopper]
            restored = ", whose weights are restored" if stopper.restore_best_weights else ""
            return f"; best {_check.one_line(stopper.monitor)}: {value:.7g} in epoch {epoch}{restored}"
        return "" if self._lowest is None else f"; lowest eval_loss: {self._lowest[0]:.7g} in epoch {self._lowest[1]}"


class Lines(Callback):
    """Print lines that begin as MindSpore's tutorial prints them, and one for each evaluation.

    Args:
        every (Optional[int]): windows from one line to the next; there is also one at the end of an epoch, and one for
            each skipped window. Default: ``None``, so many that an epoch has about 20 lines at most.
    """

    def __init__(self, every: int | None = None):
        self._every = every
        self._windows_since_line = 0
        self._speed = Speed()
        self._last: UpdateRecord | None = None
        self._stop = Stop()

    def on_train_begin(self, run_context: RunContext) -> None:
        del run_context
        self._stop = Stop()

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self._stop.epoch_begin(run_context.original_args())

    def on_train_step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        self._last = args.record
        self._windows_since_line += 1
        self._speed.add(args.record)
        every = self._every or _windows_per_line(args.get("batch_num", 1))
        if args.record.skipped or self._windows_since_line >= every:
            self._print(args.record)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        if self._windows_since_line and self._last is not None:
            self._print(self._last)
        evaluation = _evaluation_line(run_context.original_args())
        if evaluation:
            print(evaluation, flush=True)
        self._stop.epoch_end(run_context.original_args())

    def on_train_end(self, run_context: RunContext) -> None:
        line = self._stop.line(run_context.original_args())
        if line:
            print(line, flush=True)

    def _print(self, record: UpdateRecord) -> None:
        self._windows_since_line = 0
        terms = [f"{_check.one_line(name)} {value:.4g}" for name, value in record.terms.items()]
        print(", ".join([_line(record), *terms, *_rates(record, self._speed)]), flush=True)


class Bar(Callback):
    """Show a progress bar for the run, for a terminal of 80 columns.

    Args:
        columns (Optional[int]): the width. Default: ``None``, that of the terminal.
    """

    def __init__(self, columns: int | None = None):
        self._columns = columns
        self._speed = Speed()
        self._bar: Any = None
        self._stop = Stop()

    def on_train_begin(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        done = args.get("cur_step_num", 0)  # of a resumed run: windows before it
        total = None if args.planned is None else done + args.planned
        self._stop = Stop()
        columns = self._columns or _columns_of_a_terminal_without_rows()
        bar_format = "{desc} {n_fmt} updates [{elapsed}{postfix}]"
        if total is not None:
            bar_format = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        self._bar = tqdm(
            total=total,
            initial=done,  # the remaining time is that of the windows to come
            file=sys.stdout,
            bar_format=bar_format,
            ncols=columns,
            nrows=_ROWS if columns else None,
            dynamic_ncols=not columns,
        )

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        self._stop.epoch_begin(run_context.original_args())

    def on_train_step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        record = args.record
        self._speed.add(record)
        if record.skipped:
            self._bar.write(_line(record), file=sys.stdout)
        last_epoch = args.get("initial_epoch", 0) + args.get("epoch_num", record.epoch)
        self._bar.set_description_str(f"epoch {record.epoch}/{last_epoch}", refresh=False)
        self._bar.set_postfix_str(", ".join([f"loss {record.loss:.4f}", *_rates(record, self._speed)]), refresh=False)
        self._bar.update()

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        evaluation = _evaluation_line(run_context.original_args())
        if evaluation:
            self._bar.write(evaluation, file=sys.stdout)
        self._stop.epoch_end(run_context.original_args())

    def on_train_end(self, run_context: RunContext) -> None:
        self._bar.close()  # before what is printed about the files
        line = self._stop.line(run_context.original_args())
        if line:
            print(line, flush=True)

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _line(record: UpdateRecord) -> str:
    line = f"epoch: {record.epoch} step: {record.step} loss is {record.loss:.7g}"
    reason = "the gradient is not finite" if record.samples else "nothing in it counts"
    return f"{line} (skipped: {reason})" if record.skipped else line


def _rates(record: UpdateRecord, speed: Speed) -> list[str]:
    """Return the learning rate and the speed as texts, if they are known."""
    texts = [] if math.isnan(record.lr) else [f"lr {record.lr:.4g}"]
    return [*texts, f"{speed.rows:,.0f} rows/s"] if speed.rows else texts


def _evaluation_line(args: Any) -> str:
    """Return the line about the evaluation of an epoch, or an empty text if there was none."""
    results = (args.get("eval_results") or {}).items()
    texts = [f"{name} {value:.7g}" if isinstance(value, float) else f"{name} {value}" for name, value in results]
    return f"epoch: {args.cur_epoch_num} evaluation: {', '.join(map(_check.one_line, texts))}" if texts else ""


def _windows_per_line(windows: int) -> int:
    """Return the number of windows per line, for epochs with this number of windows."""
    return _LINES_IN_AN_EPOCH if windows == UNKNOWN else math.ceil(windows / _LINES_IN_AN_EPOCH)


def _columns_of_a_terminal_without_rows() -> int | None:
    """Return the width of a terminal that reports no height, as some containers do, where tqdm would show no bar."""
    try:
        size = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return None
    return None if size.lines else size.columns or 80
