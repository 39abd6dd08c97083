"""Shows how a run proceeds: a progress bar in a terminal or notebook, elsewhere about 20 lines per epoch."""

from __future__ import annotations

import math
import shutil
import sys
import warnings
from collections import deque
from statistics import median
from typing import Any

from mindspore.train import Callback, RunContext
from tqdm import TqdmWarning

from .. import _check
from .callbacks import UNKNOWN, UpdateRecord

_LINES_IN_AN_EPOCH = 20  # few enough to be read
_ROWS = 24  # given, because some containers' terminals report a height of 0, for which tqdm would show no bar


def progress() -> Callback:
    """Return a bar in a terminal or a notebook, else lines."""
    return Bar() if _in_notebook() or sys.stdout.isatty() else Lines()


def _in_notebook() -> bool:
    return "ipykernel.zmqshell" in sys.modules  # as tqdm finds out


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


class Lines(Callback):
    """Print lines that begin as MindSpore's tutorial prints them, and one for each evaluation.

    Args:
        every (Optional[int]): windows from one line to the next; there is also one before each evaluation, one at the
            end of an epoch, and one for each skipped window. Default: ``None``, so many that an epoch has about 20
            lines at most.
    """

    def __init__(self, every: int | None = None):
        self._every = every
        self._windows_since_line = 0
        self._speed = Speed()

    def on_train_step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        self._windows_since_line += 1
        self._speed.add(args.record)
        if args.record.skipped or self._windows_since_line >= (self._every or _windows_per_line(args.batch_num)):
            self._print_last(args)

    def on_eval_end(self, run_context: RunContext) -> None:
        self._print_last(run_context.original_args())
        print(_evaluation_line(run_context.original_args()), flush=True)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self._print_last(run_context.original_args())

    def on_train_end(self, run_context: RunContext) -> None:
        _print_stop(run_context.original_args())

    def _print_last(self, args: Any) -> None:
        """Print the line of the last window, unless it is printed."""
        if self._windows_since_line:
            self._windows_since_line = 0
            terms = [f"{_check.one_line(name)} {value:.4g}" for name, value in args.record.terms.items()]
            print(", ".join([_line(args.record), *terms, *_rates(args.record, self._speed)]), flush=True)


class Bar(Callback):
    """Show a progress bar for the run, in a terminal or a notebook."""

    def __init__(self) -> None:
        self._speed = Speed()
        self._bar: Any = None

    def on_train_begin(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        done = args.cur_step_num  # of a resumed run: windows before it
        total = None if args.planned is None else done + args.planned
        bar_format = "{desc} {n_fmt} samples [{elapsed}{postfix}]"
        if total is not None:
            bar_format = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]"
        width: dict[str, Any] = {"dynamic_ncols": True}
        if not _in_notebook():
            width = {"ncols": shutil.get_terminal_size().columns, "nrows": _ROWS}
        # The remaining time is that of the windows to come.
        initial = 0 if total is None else done
        self._bar = _tqdm()(total=total, initial=initial, file=sys.stdout, bar_format=bar_format, **width)

    def on_train_step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        record = args.record
        self._speed.add(record)
        if record.skipped:
            self._bar.write(_line(record), file=sys.stdout)
        self._bar.set_description_str(f"epoch {record.epoch}/{_last_epoch(args)}", refresh=False)
        self._bar.set_postfix_str(", ".join([f"loss {record.loss:.4f}", *_rates(record, self._speed)]), refresh=False)
        self._bar.update(record.samples if self._bar.total is None else 1)

    def on_eval_end(self, run_context: RunContext) -> None:
        self._bar.write(_evaluation_line(run_context.original_args()), file=sys.stdout)

    def on_train_end(self, run_context: RunContext) -> None:
        self._bar.close()  # before what is printed about the files
        _print_stop(run_context.original_args())

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()


def _tqdm() -> Any:
    """Return the bar's class: the notebook's, or the terminal's, also in a notebook without ipywidgets."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", TqdmWarning)  # the notebook's is experimental, or ipywidgets are missing
        from tqdm.auto import tqdm
    return tqdm


def _line(record: UpdateRecord) -> str:
    line = f"epoch: {record.epoch} step: {record.step} loss is {record.loss:.7g}"
    reason = "the gradient is not finite" if record.samples else "nothing in it counts"
    reason = "by a stage" if math.isfinite(record.grad_norm) else reason
    return f"{line} (skipped: {reason})" if record.skipped else line


def _rates(record: UpdateRecord, speed: Speed) -> list[str]:
    """Return the learning rate and the speed as texts, if they are known."""
    texts = [] if math.isnan(record.lr) else [f"lr {record.lr:.4g}"]
    return [*texts, f"{speed.rows:,.0f} rows/s"] if speed.rows else texts


def _evaluation_line(args: Any) -> str:
    results = args.eval_results.items()
    texts = [f"{name} {value:.7g}" if isinstance(value, float) else f"{name} {value}" for name, value in results]
    return f"epoch: {args.cur_epoch_num} update: {args.updates} evaluation: {', '.join(map(_check.one_line, texts))}"


def _print_stop(args: Any) -> None:
    """Print a line if a callback has stopped the run: it is shorter than planned."""
    if args.stopped:
        print(f"stopped by a callback in epoch {args.cur_epoch_num} of {_last_epoch(args)}", flush=True)


def _last_epoch(args: Any) -> int:
    return args.initial_epoch + args.epoch_num


def _windows_per_line(windows: int) -> int:
    """Return the number of windows per line, for epochs with this number of windows."""
    return _LINES_IN_AN_EPOCH if windows == UNKNOWN else math.ceil(windows / _LINES_IN_AN_EPOCH)
