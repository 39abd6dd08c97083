"""Do the network and the loss accept the columns of a micro-batch?

If not, MindSpore raises its error while it compiles, with more than a hundred lines about the graph. A trial with two
rows outside graphs takes milliseconds, before anything is compiled, and can also find out what would be accepted.
"""

from __future__ import annotations

import ast
import functools
import inspect
import itertools
import os
import re
import textwrap
import traceback
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, NoReturn

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from .. import _check
from ..network.restoring import can_be_restored, restoring, synchronously
from ..ranks.lifetime import scratch
from .columns import has_class_numbers, highest, is_of_classes, part, shown, strange_label, warn_unless_pairs
from .gradients import scalar

# What MindSpore raises about inputs. Other errors are mistakes in the network or the loss, and are raised unchanged.
_ABOUT_INPUTS = (TypeError, ValueError, RuntimeError, IndexError)
# Errors that allow no conclusion about graph mode: about memory, or a kernel that exists in graphs only.
_UNCLEAR = re.compile(r"unregistered|kernelmod|memory|alloc", re.IGNORECASE)
_ROWS, _LONGEST = 2, 300


def check_compiles(loss_fn: Any, name: str = "loss_fn", owner: str = "train_process") -> None:
    """Raise an error for a lambda that MindSpore can't compile: it parses the line, which must contain nothing else."""
    while isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    if getattr(loss_fn, "__name__", None) != "<lambda>":
        return
    try:
        statement = ast.parse(textwrap.dedent(inspect.getsource(loss_fn))).body[0]
    except (OSError, SyntaxError, IndexError):
        statement = ast.Pass()
    if not isinstance(getattr(statement, "value", None), ast.Lambda):
        _check.refuse(
            ValueError,
            owner,
            name,
            "a function that MindSpore can compile",
            "a lambda inside a larger statement",
            "Define it with 'def' in a file, or assign it to a name on a line of its own.",
        )


def check_taken(
    network: nn.Cell,
    loss_fn: Any,
    forward: nn.Cell,
    micro_batch: tuple,
    trained: Collection[Any],
    data: _check.Argument = _check.TRAIN,
    of_window: bool = False,
) -> bool:
    """Raise a one-line error if the network or the loss does not accept a micro-batch. Nothing is changed.

    Returns whether the loss is known to take labels for numbers of rows, so that it compares the rows of a batch.

    Runs two rows outside graphs and in evaluation mode; if that fails, all rows; if that fails too, the forward as in
    training, so that a network which runs only in graphs or only in training mode is not rejected.

    Args:
        network (Cell): gets the first column, or all columns if there is no loss function.
        loss_fn (Union[Cell, Callable, None]): gets the network's output and the other columns.
        forward (Cell): both together.
        micro_batch (tuple): the columns, with at least one row.
        trained (Collection[Parameter]): Parameters that a forward does not change.
        data (Argument): the name of the data set in messages. Default: that of `train_process`.
        of_window (bool): whether labels may be numbers of rows of a larger window. Default: ``False``.
    """
    if of_window and highest(micro_batch[1:]) >= (rows := micro_batch[0].shape[0]):
        own = np.arange(rows)
        micro_batch = tuple(Tensor(own, c.dtype) if has_class_numbers(c) else c for c in micro_batch)
    if not can_be_restored(forward, trained):
        return False
    trial, few = _Trial(network, loss_fn), _few(micro_batch)
    with restoring(forward, trained, training=False), synchronously():
        error = trial.error(few) and trial.error(micro_batch)
        who, output = trial.who, trial.output
        if _takes_numbers_of_rows(trial, loss_fn, micro_batch, error):
            check_numbers(micro_batch, data)
            return True
        _check_classes(trial, loss_fn, micro_batch, data)
        remedy = "" if error is None or _is_unclear(error) else _remedy(trial, few)
    if error is None:
        warn_unless_pairs(data.owner, loss_fn, output, micro_batch[1:])
    elif not (_is_unclear(error) or _runs(forward, micro_batch, trained)):
        _refuse(error, who, output, micro_batch, remedy, data)
    return False


class _Trial:
    """A forward outside graphs.

    Args:
        network (Cell), loss_fn: as for `check_taken`.
    """

    def __init__(self, network: nn.Cell, loss_fn: Any):
        self._network, self._loss_fn = network, loss_fn
        self.who = ""
        """str, what raised the last error; empty if both ran, but did not return a loss."""
        self.output: Any = None
        """Any, the last output of the network, for the loss."""
        self.needs_all_columns = loss_fn is None
        """bool, whether there is no loss, so that the network gets all columns."""

    def output_shape(self, columns: tuple) -> tuple | None:
        """Return the shape of the network's output; None if it is not one tensor."""
        try:
            output = self._network(columns[0])
        except Exception:
            return None
        return output.shape if isinstance(output, Tensor) else None

    def error(self, columns: tuple) -> Exception | None:
        """Return the error that these columns raise; None if they are accepted."""
        try:
            self._run(columns)
        except Exception as error:
            return error
        return None

    def _run(self, columns: tuple) -> None:
        self.who, self.output = "the network", None
        if self._loss_fn is None:
            loss = self._network(*columns)
        else:
            self.output = self._network(columns[0])
            self.who = "'loss_fn'"
            loss = self._loss_fn(self.output, *columns[1:])
        if isinstance(loss, Tensor):  # waits for the kernels, which may raise errors about values
            loss.astype(ms.float32).asnumpy()
        self.who = ""
        scalar("GradientAccumulation", loss, self._loss_fn is not None)


def _takes_numbers_of_rows(trial: _Trial, loss_fn: Any, micro_batch: tuple, error: Exception | None) -> bool:
    """Return whether the loss takes labels for numbers of rows: it accepts those below the number of rows.

    No trial here raises an error where the micro-batch was accepted: an error of a kernel is a risk in PyNative mode.
    """
    few, rows = _few(micro_batch), micro_batch[0].shape[0]
    if few is micro_batch or rows <= _ROWS or highest(micro_batch[1:]) < 0:
        return False
    if is_of_classes(loss_fn):
        # The number of classes is that of the rows, not only by chance.
        return all(trial.output_shape(columns) == (columns[0].shape[0],) * 2 for columns in (few, micro_batch))
    if error is None or highest(micro_batch[1:]) < rows:
        return False

    def accepts(columns: tuple, label: int) -> bool:
        labelled = tuple(ops.full_like(c, label) if has_class_numbers(c) else c for c in columns)
        return trial.error(labelled) is None

    # Of 2 rows 1 is the last, and 2 is none.
    return not accepts(few, _ROWS) and accepts(few, _ROWS - 1) and accepts(micro_batch, rows - 1)


def check_numbers(micro_batch: tuple, data: _check.Argument) -> None:
    """Raise an error if labels, which number the rows of a batch, are those of a larger one."""
    rows, last = micro_batch[0].shape[0], highest(micro_batch[1:])
    if last >= rows:
        rule = f"one whose labels are numbers of rows of the micro-batch, from 0 to {rows - 1}"
        data.refuse(ValueError, rule, last, "The loss compares the rows of a batch: use CoupledLoss.")


def _check_classes(trial: _Trial, loss_fn: Any, micro_batch: tuple, data: _check.Argument) -> None:
    """Raise an error if a label is not one of the network's classes."""
    if strange_label(loss_fn, trial.output, micro_batch[1:]) is None:
        return
    trial.error(micro_batch)  # all rows: the number of classes may depend on them
    strange = strange_label(loss_fn, trial.output, micro_batch[1:])
    if strange is not None:
        classes = trial.output.shape[1]
        rule = f"one that yields labels from 0 to {classes - 1}, the network's {classes} classes"
        data.refuse(ValueError, rule, strange, "Should this be the loss's 'ignore_index'?")


def _few(micro_batch: tuple) -> tuple:
    """Return the first rows of a micro-batch; all of it if its columns differ in their rows."""
    same = len({column.shape[0] for column in micro_batch}) == 1
    return part(micro_batch, None, _ROWS) if same else micro_batch


def _is_unclear(error: Exception) -> bool:
    return isinstance(error, (RuntimeError, MemoryError)) and _UNCLEAR.search(str(error)) is not None


def _is_taken(error: Exception | None) -> bool:
    return error is None or _is_unclear(error)


def _runs(forward: nn.Cell, micro_batch: tuple, trained: Collection[Any]) -> bool:
    """Return whether the forward runs in the current mode and in training mode."""
    mode = ms.get_context("mode")
    with restoring(forward, trained, training=True, mode=mode), without_logs():
        try:
            scalar("GradientAccumulation", forward(*micro_batch), False)
        except Exception:
            return False
    return True


@contextmanager
def without_logs() -> Iterator[None]:
    """Discard what MindSpore writes to the terminal and the current folder about a failed compilation."""
    name, stderr = "MS_OM_PATH", 2
    with ExitStack() as leaving:
        with suppress(OSError):  # if stderr is closed, or temporary files are impossible: then nothing is discarded
            folder = leaving.enter_context(scratch())
            log, kept = leaving.enter_context(open(folder / "log", "wb")), os.dup(stderr)
            leaving.callback(os.close, kept)
            leaving.callback(os.dup2, kept, stderr)
            os.dup2(log.fileno(), stderr)
            leaving.callback(_set_variable, name, os.environ.get(name))
            os.environ[name] = str(folder)
        yield


def _set_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    os.environ.update({} if value is None else {name: value})


def _refuse(
    error: Exception, who: str, output: Any, micro_batch: tuple, remedy: str, data: _check.Argument
) -> NoReturn:
    if not who or not isinstance(error, _ABOUT_INPUTS):
        raise error
    with_output = "" if output is None else f" with the network's output, {shown(output)},"
    rule = f"one whose columns {who} accepts{with_output}".rstrip(",")
    data.refuse(ValueError, rule, shown(micro_batch), f"{remedy} {one_line(error)}".strip())


def one_line(error: Exception) -> str:
    """Return MindSpore's message without its stack traces, with the line of the user's code that led to it."""
    text = re.split(r"- C\+\+ Call Stack|- The Traceback of", str(error))[0]
    text = " ".join(re.sub("-{4,}", " ", text).split())
    frames = traceback.extract_tb(error.__traceback__)
    inside = [str(Path(package.__file__).parent) for package in (ms, _check)]  # type: ignore[arg-type]
    lines = [frame for frame in frames if not frame.filename.startswith(tuple(inside))]
    where = f" at {Path(lines[-1].filename).name}:{lines[-1].lineno}" if lines else ""
    return f"MindSpore's error{where}: {text[:_LONGEST]}"


# What would have been accepted

_Change = Callable[[Tensor, Any], Any]
_DATA: dict[str, _Change] = {
    "": lambda data, output: data,
    "the data as Float32": lambda data, output: data.astype(ms.float32),
    "the data as Int32": lambda data, output: data.astype(ms.int32),
    "the data with the channels before height and width": lambda data, output: data.transpose(0, 3, 1, 2),
    "the data with an axis for the channel, the second": lambda data, output: data.ndim == 3 and data.expand_dims(1),
}
_LABELS: dict[str, _Change] = {
    "": lambda label, output: label,
    "the labels as Int32": lambda label, output: label.astype(ms.int32),
    "the labels as Float32": lambda label, output: label.astype(ms.float32),
    "the labels without their last axis": lambda label, output: label.squeeze(-1),
    "the labels as class numbers, not as rows of them": lambda label, output: (
        label.shape[1:] == output.shape[1:] and label.argmax(-1).astype(ms.int32)
    ),
    "the labels as one-hot rows, or make the loss with sparse=True if it has that": lambda label, output: (
        label.ndim == output.ndim - 1 and ops.one_hot(label.astype(ms.int32), output.shape[-1]).astype(ms.float32)
    ),
}


def _remedy(trial: _Trial, few: tuple) -> str:
    """Return what to change in the dataset, found by trial; an empty text if nothing helps."""
    output = trial.output
    if len(few) == 2 and _is_taken(trial.error(few[::-1])):
        return "The columns are swapped: yield the data first, also in dicts."
    changes = itertools.product(_DATA, _LABELS if len(few) > 1 else ("",))
    for said in sorted(changes, key=lambda change: sum(map(bool, change))):
        if _is_taken(trial.error(_changed(few, *said, output))):
            return f"Yield {' and '.join(filter(None, said))}."
    if output is None and trial.needs_all_columns:
        return "Without a 'loss_fn' the network gets all columns and returns the loss: give one to the driver."
    return ""


def _changed(few: tuple, data: str, labels: str, output: Any) -> tuple:
    """Return the columns with changes; no columns if a change is impossible."""
    try:
        columns = (_DATA[data](few[0], output), *(_LABELS[labels](label, output) for label in few[1:]))
    except Exception:
        return ()
    return () if any(column is False for column in columns) else columns
