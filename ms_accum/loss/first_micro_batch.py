"""Rejects micro-batches that the network or the loss does not accept, with an error of one line.

Without this check MindSpore raises an error while it compiles, with more than a hundred lines about the graph. A trial
with two rows outside graphs takes milliseconds, and is run before anything is compiled.
"""

from __future__ import annotations

import ast
import functools
import inspect
import os
import re
import tempfile
import textwrap
import traceback
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Callable, NoReturn

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from .. import _check
from ..network.compiled import in_graphs
from ..network.restoring import can_be_restored, restoring, synchronously
from .additivity import has_class_numbers, part
from .known_losses import name_and_options, not_ignored, scalar

_MAX_COLUMNS = 10**6  # no limit
_TRIAL_ROWS = 2
_MAX_LENGTH = 300  # of a message
_ELEMENTWISE_LOSSES = ("MSELoss", "L1Loss", "MAELoss", "HuberLoss", "SmoothL1Loss")
_CLASS_LOSSES = ("SoftmaxCrossEntropyWithLogits", "CrossEntropyLoss", "NLLLoss")  # the first ignores no label
# What MindSpore raises about inputs. Other errors are mistakes in the network or the loss, and are raised unchanged.
_INPUT_ERRORS = (TypeError, ValueError, RuntimeError, IndexError)
# Errors that allow no conclusion about graph mode: about memory, or a kernel that exists in graphs only.
_INCONCLUSIVE = re.compile(r"unregistered|kernelmod|memory|alloc", re.IGNORECASE)


class ColumnsCheck:
    """Rejects micro-batches whose columns the network or the loss does not accept. Nothing is changed.

    Two rows are run outside graphs and in evaluation mode. If that fails, all rows are run; if that fails too, the
    forward is run as in training, so that a network which needs graphs or the training mode is not rejected.

    Args:
        network (Cell): gets the first column, or all columns if there is no loss function.
        loss_fn (Union[Cell, Callable, None]): gets the network's output and the other columns.
        forward (Cell): both together.
        tries (bool): whether to run the forward. Otherwise only the number of columns is checked.
        compiles (bool): whether training compiles the forward in PyNative mode.
        returned (Callable): raises an error unless the loss is what it must be. Default: a scalar.
    """

    def __init__(
        self, network: nn.Cell, loss_fn: Any, forward: nn.Cell, tries: bool, compiles: bool, returned: Callable = scalar
    ):
        self._network = network
        self._loss_fn = loss_fn
        self._forward = forward
        self._tries = tries
        self._compiles = compiles
        self._returned = returned
        self._allowed = _allowed_columns(loss_fn)

    def check(
        self, data: _check.Argument, micro_batch: tuple, trained: Collection[Any], of_window: bool = False
    ) -> bool:
        """Raise an error if the columns are not accepted.

        Args:
            data (Argument): the name of the data set in messages.
            micro_batch (tuple): the columns.
            trained (Collection[Parameter]): Parameters that a forward does not change.
            of_window (bool): whether labels may be numbers of rows of a larger window. Default: ``False``.

        Returns:
            bool, whether the loss takes labels for numbers of rows, so that it compares the rows of a batch.
        """
        self._check_number(data, micro_batch)
        if not self._tries or not all(column.size for column in micro_batch):
            return False
        if in_graphs(self._compiles):
            check_compiles(self._loss_fn, owner=data.owner)
        rows = micro_batch[0].shape[0]
        if of_window and _highest_class(micro_batch[1:]) >= rows:
            # The loss gets all rows of the window later, but only these in the trial.
            row_numbers = np.arange(rows)
            micro_batch = tuple(
                Tensor(row_numbers, column.dtype) if has_class_numbers(column) else column for column in micro_batch
            )
        if not can_be_restored(self._forward, trained):
            return False
        same_rows = all(column.shape[0] == rows for column in micro_batch)
        few = part(micro_batch, None, _TRIAL_ROWS) if same_rows else micro_batch
        trial = _Trial(self._network, self._loss_fn, self._returned)
        with restoring(self._forward, trained, training=False), synchronously():
            trial.run(few)
            square = same_rows and self._has_as_many_classes_as_rows(trial, few)
            if trial.error or square or self._wrong_label(trial.output, micro_batch) is not None:
                trial.run(micro_batch)  # the number of classes may depend on the rows
            if square and rows > _TRIAL_ROWS and self._has_as_many_classes_as_rows(trial, micro_batch):
                check_row_numbers(data, micro_batch)
                return True
            self._check_labels(data, trial.output, micro_batch)
            error, origin, output = trial.error, trial.origin, trial.output  # before the trials for a remedy
            remedy = "" if _is_accepted(error) else _remedy(trial, few)
        if error is None:
            self._warn_if_broadcast(data.owner, output, micro_batch[1:])
        elif not (_is_accepted(error) or self._runs_in_training(micro_batch, trained)):
            _raise(error, origin, output, data, micro_batch, remedy)
        return False

    def _check_number(self, data: _check.Argument, micro_batch: tuple) -> None:
        if len(micro_batch) not in self._allowed:
            number = f"{self._allowed.start} or more" if self._allowed.stop == _MAX_COLUMNS else self._allowed.start
            columns = "column" if number == 1 else "columns"
            rule = f"one that yields {number} {columns}: the data, and what 'loss_fn' takes in addition to the output"
            data.raise_invalid(ValueError, rule, f"{len(micro_batch)}: {_shown(micro_batch)}")

    def _has_as_many_classes_as_rows(self, trial: _Trial, columns: tuple) -> bool:
        """Return whether the network has the same number of classes and rows, for a loss that takes class numbers."""
        rows = columns[0].shape[0]
        return (
            name_and_options(self._loss_fn)[0] in _CLASS_LOSSES
            and isinstance(trial.output, Tensor)
            and trial.output.shape == (rows, rows)
            and _highest_class(columns[1:]) >= 0
        )

    def _check_labels(self, data: _check.Argument, output: Any, micro_batch: tuple) -> None:
        """Raise an error if a label is not one of the network's classes."""
        label = self._wrong_label(output, micro_batch)
        if label is not None:
            classes = output.shape[1]
            rule = f"one that yields labels from 0 to {classes - 1}, the network's {classes} classes"
            data.raise_invalid(ValueError, rule, label, "Should this be the loss's 'ignore_index'?")

    def _wrong_label(self, output: Any, micro_batch: tuple) -> int | None:
        """Return a label that is not one of the network's classes, for which losses on CPU return inf; else None."""
        name, options = name_and_options(self._loss_fn)
        if name not in _CLASS_LOSSES or not isinstance(output, Tensor):
            return None
        labels = micro_batch[1]
        if "Int" not in str(labels.dtype) or labels.ndim != output.ndim - 1:
            return None
        array = labels.asnumpy()
        counted = array if name == _CLASS_LOSSES[0] else not_ignored(options, array)
        wrong = counted[(counted < 0) | (counted >= output.shape[1])]
        return int(wrong[0]) if wrong.size else None

    def _warn_if_broadcast(self, owner: str, output: Any, labels: tuple) -> None:
        """Warn if a loss compares outputs and labels of different shapes, which MindSpore broadcasts."""
        name = name_and_options(self._loss_fn)[0]
        if name in _ELEMENTWISE_LOSSES and isinstance(output, Tensor) and output.shape[1:] != labels[0].shape[1:]:
            _check.warn(
                f"For '{owner}', {name} broadcasts the network's output {('rows', *output.shape[1:])} and the labels "
                f"{('rows', *labels[0].shape[1:])}, so it compares outputs with the labels of other rows or columns. "
                "Give both the same shape."
            )

    def _runs_in_training(self, micro_batch: tuple, trained: Collection[Any]) -> bool:
        """Return whether the forward runs as it will in training."""
        mode = ms.GRAPH_MODE if in_graphs(self._compiles) else ms.PYNATIVE_MODE
        with restoring(self._forward, trained, training=True, mode=mode), without_logs():
            try:
                self._returned("GradientAccumulation", self._forward(*micro_batch), False)
            except Exception:
                return False
        return True


def _allowed_columns(loss_fn: Any) -> range:
    """Return the allowed numbers of columns of a dataset: one for the network, and those that the loss takes."""
    if loss_fn is None:
        return range(1, _MAX_COLUMNS)
    try:
        signature = inspect.signature(loss_fn.construct if isinstance(loss_fn, nn.Cell) else loss_fn)
    except (TypeError, ValueError):
        return range(2, _MAX_COLUMNS)
    parameters = signature.parameters.values()
    if any(parameter.kind == parameter.VAR_POSITIONAL for parameter in parameters):
        return range(2, _MAX_COLUMNS)
    needed = sum(  # arguments with defaults are not columns
        parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
        and parameter.default is parameter.empty
        for parameter in parameters
    )
    return range(max(2, needed), max(2, needed) + 1)


class _Trial:
    """Forward passes outside graphs.

    Args:
        network (Cell), loss_fn, returned: as for `ColumnsCheck`.
    """

    def __init__(self, network: nn.Cell, loss_fn: Any, returned: Callable):
        self._returned = returned
        self._network = network
        self._loss_fn = loss_fn
        self.error: Exception | None = None
        """Optional[Exception], the error that the last columns raised; None if they were accepted."""
        self.origin = ""
        """str, what raised it; empty if both ran, but did not return a loss."""
        self.output: Any = None
        """Any, the last output of the network, for the loss."""

    @property
    def has_loss_fn(self) -> bool:
        """bool, whether there is a loss function; otherwise the network gets all columns."""
        return self._loss_fn is not None

    def run(self, columns: tuple) -> None:
        """Run the network and the loss."""
        self.error = None
        self.output = None
        try:
            self.origin = "the network"
            if self._loss_fn is None:
                loss = self._network(*columns)
            else:
                self.output = self._network(columns[0])
                self.origin = "'loss_fn'"
                loss = self._loss_fn(self.output, *columns[1:])
            if isinstance(loss, Tensor):  # waits for the kernels, which may raise errors about values
                loss.astype(ms.float32).asnumpy()
            self.origin = ""
            self._returned("GradientAccumulation", loss, self.has_loss_fn)
        except Exception as error:
            self.error = error


def _is_accepted(error: Exception | None) -> bool:
    """Return whether there was no error, or one from which nothing follows for graphs."""
    inconclusive = isinstance(error, (RuntimeError, MemoryError)) and _INCONCLUSIVE.search(str(error)) is not None
    return error is None or inconclusive


def _remedy(trial: _Trial, columns: tuple) -> str:
    """Return what to change in the dataset, found by trial; an empty text if nothing helps."""
    origin = trial.origin
    if len(columns) == 2:
        trial.run(columns[::-1])
        if _is_accepted(trial.error):
            return "The columns are swapped: yield the data first, also in dicts."
    data, *labels = columns
    changes = {
        "the data as Float32": (data.astype(ms.float32), *labels),
        "the labels as Int32": (data, *(label.astype(ms.int32) for label in labels)),
        "the labels as Float32": (data, *(label.astype(ms.float32) for label in labels)),
    }
    for change, changed_columns in changes.items():
        trial.run(changed_columns)
        if _is_accepted(trial.error) or (origin == "the network" and trial.origin == "'loss_fn'"):
            return f"Yield {change}."
    if origin == "the network" and not trial.has_loss_fn:
        return "Without a 'loss_fn' the network gets all columns and returns the loss: give one to the driver."
    return ""


def _raise(
    error: Exception, origin: str, output: Any, data: _check.Argument, micro_batch: tuple, remedy: str
) -> NoReturn:
    if not origin or not isinstance(error, _INPUT_ERRORS):
        raise error
    rule = f"one whose columns {origin} accepts"
    if output is not None:
        rule += f" with the network's output, {_shown(output)}"
    data.raise_invalid(ValueError, rule, _shown(micro_batch), f"{remedy} {one_line(error)}".strip())


def _shown(value: Any) -> str:
    """Return the type and the shape of a Tensor, or of several, as text."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return " and ".join(map(_shown, value))
    return type(value).__name__


# Labels that are numbers of rows


def check_row_numbers(data: _check.Argument, micro_batch: tuple) -> None:
    """Raise an error if labels, which number the rows of a batch, are those of a larger one."""
    rows = micro_batch[0].shape[0]
    highest = _highest_class(micro_batch[1:])
    if highest >= rows:
        rule = f"one whose labels are numbers of rows of the micro-batch, from 0 to {rows - 1}"
        data.raise_invalid(ValueError, rule, highest, "The loss compares the rows of a batch: use CoupledLoss.")


def _highest_class(labels: tuple) -> int:
    """Return the highest class number of label columns; -1 if there is none."""
    return max(
        (int(column.asnumpy().max()) for column in labels if has_class_numbers(column) and column.size), default=-1
    )


# What other modules check or show in the same way


def check_compiles(loss_fn: Any, name: str = "loss_fn", owner: str = "train_process") -> None:
    """Raise an error for a lambda that MindSpore can't compile: it parses the line, which must contain nothing else."""
    if isinstance(loss_fn, functools.partial):
        loss_fn = loss_fn.func
    if getattr(loss_fn, "__name__", None) != "<lambda>":
        return
    try:
        statement = ast.parse(textwrap.dedent(inspect.getsource(loss_fn))).body[0]
    except (OSError, SyntaxError, IndexError):
        statement = ast.Pass()
    if not isinstance(getattr(statement, "value", None), ast.Lambda):
        _check.raise_invalid(
            ValueError,
            owner,
            name,
            "a function that MindSpore can compile",
            "a lambda inside a larger statement",
            "Define it with 'def' in a file, or assign it to a name on a line of its own.",
        )


@contextmanager
def without_logs() -> Iterator[None]:
    """Discard what MindSpore writes to the terminal and the current folder about a failed compilation."""
    name, stderr = "MS_OM_PATH", 2
    with ExitStack() as stack:
        with suppress(OSError):  # if stderr is closed, or temporary files are impossible: then nothing is discarded
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            log, duplicate = stack.enter_context(open(os.path.join(folder, "log"), "wb")), os.dup(stderr)
            stack.callback(os.close, duplicate)
            stack.callback(os.dup2, duplicate, stderr)
            os.dup2(log.fileno(), stderr)
            stack.callback(_set_variable, name, os.environ.get(name))
            os.environ[name] = folder
        yield


def _set_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    os.environ.update({} if value is None else {name: value})


def one_line(error: Exception) -> str:
    """Return MindSpore's message without its stack traces, with the line of the user's code that led to it."""
    text = re.split(r"- C\+\+ Call Stack|- The Traceback of", str(error))[0]
    text = " ".join(re.sub("-{4,}", " ", text).split())
    frames = traceback.extract_tb(error.__traceback__)
    libraries = [str(Path(module.__file__).parent) for module in (ms, _check)]  # type: ignore[arg-type]
    user_frames = [frame for frame in frames if not frame.filename.startswith(tuple(libraries))]
    where = f" at {Path(user_frames[-1].filename).name}:{user_frames[-1].lineno}" if user_frames else ""
    return f"MindSpore's error{where}: {text[:_MAX_LENGTH]}"
