"""Rejects columns that the network or its loss does not accept, and words MindSpore's errors about them."""

from __future__ import annotations

import inspect
import math
from typing import Any, Callable

import numpy as np
from mindspore import Tensor, nn, ops

from .. import _check
from ..network.compiled import cause_of, debugs, place_of, words_of
from .known_losses import as_number, name_and_options, not_ignored

_CLASS_LOSSES = ("SoftmaxCrossEntropyWithLogits", "CrossEntropyLoss", "NLLLoss")  # the first ignores no label
_ELEMENTWISE_LOSSES = ("MSELoss", "L1Loss", "MAELoss", "HuberLoss", "SmoothL1Loss")
# What MindSpore raises about inputs. Other errors are mistakes in the network or the loss, and are raised unchanged.
_INPUT_ERRORS = (TypeError, ValueError, RuntimeError, IndexError)
_OF_MINDSPORE = "(For framework developers)"


class ColumnsCheck:
    """Rejects columns, on the host, without running the network.

    Their number is compared with the arguments of the loss or the network. Labels of MindSpore's losses are compared
    with the shape of the network's output, which is known while a graph is compiled, before it runs.

    Args:
        network (Cell): gets the first columns, or all columns if there is no loss function.
        loss_fn (Union[Cell, Callable, None]): gets the network's output and the other columns.
        inputs (int): the number of the first columns.
        way_out (str): how to give a loss function.
    """

    def __init__(self, network: nn.Cell, loss_fn: Any, inputs: int, way_out: str):
        self._inputs = inputs
        self._takes, self._has_loss_fn = network if loss_fn is None else loss_fn, loss_fn is not None
        self._way_out = way_out
        self._name, self._options = name_and_options(loss_fn)
        self._data = _check.TRAIN
        self._columns: tuple = ()  # that have not been run yet
        self._classes = np.empty(0, np.int32)  # the labels that count, of the last columns that were checked
        self._has_warned = False

    def check(self, data: _check.Argument, columns: tuple) -> None:
        """Raise an error if there are too few or too many columns, or if labels are below 0.

        Args:
            data (Argument): the name of the data set in messages.
            columns (tuple): the columns of a micro-batch.
        """
        self._data, self._columns = data, columns
        self._check_number()
        self._classes = np.empty(0, np.int32)
        labels = columns[self._inputs :]
        if self._name in _CLASS_LOSSES and labels and _is_integer(labels[0].dtype):
            classes = labels[0].asnumpy()
            self._classes = classes if self._name == _CLASS_LOSSES[0] else not_ignored(self._options, classes)
            if self._classes.size and self._classes.min() < 0:  # MindSpore treats -1 as the last class
                self._reject_class("labels >= 0", self._classes.min())

    def are_unusual(self, network: nn.Cell) -> bool:
        """Return whether labels may be none of the loss: usually the last Parameter has a row for each class.

        Then it is worth a forward to find out before a graph is compiled.
        """
        *_, last = (), *(each.shape for each in network.get_parameters())
        if self._name not in _CLASS_LOSSES or not self._columns[self._inputs :] or not last:
            return False
        labels = self._columns[self._inputs]
        is_sparse = self._options("sparse") if self._name == _CLASS_LOSSES[0] else _is_integer(labels.dtype)
        if not is_sparse:
            return labels.shape[1:] != last[:1]
        return not _is_integer(labels.dtype) or labels.ndim == 2 or self._classes.max(initial=0) >= last[0]

    def ran(self) -> None:
        """Note that the columns have been run, so that later errors have other causes."""
        self._columns = ()

    def _check_number(self) -> None:
        needed, most = arguments_of(self._takes)
        if self._has_loss_fn:
            most = min(most, max(needed, 2)) if most != math.inf else most  # others with defaults are options
            needed, most = needed + self._inputs - 1, most + self._inputs - 1  # the output is one argument
        number = len(self._columns)
        if needed <= number <= most:
            return
        wanted = needed if number < needed else most
        if self._has_loss_fn:
            one = "the data" if self._inputs == 1 else f"{self._inputs} for the network"
            what, way_out = f": {one}, and what 'loss_fn' takes in addition to the output", ""
            if number > most:
                way_out = f"If the network gets {int(number - most + self._inputs)} of them, give 'inputs'."
        else:
            what, way_out = ", which the network takes", self._way_out if number > most else ""
        rule = f"one that yields {_check.quantity(int(wanted), 'column')}{what}"
        self._data.raise_invalid(ValueError, rule, f"{number}: {_shown(self._columns)}", way_out)

    def _reject_class(self, rule: str, label: Any, remedy: str = "Should this be the loss's 'ignore_index'?") -> None:
        self._data.raise_invalid(ValueError, f"one that yields {rule}", label, remedy)

    def of_output(self) -> Any:
        """Return an operator that checks labels; None if nothing is known of the loss. In a graph it is a constant.

        A graph keeps its operators, but not the Cells around it.
        """
        if self._name not in (*_CLASS_LOSSES, *_ELEMENTWISE_LOSSES):
            return None

        def accepts(output: tuple, labels: tuple, dtype: Any) -> bool:
            if self._name in _ELEMENTWISE_LOSSES:
                self._warn_if_broadcast(output, labels)
            else:
                self._check_classes(output, labels, dtype)
            return True

        return ops.constexpr(accepts, reuse_result=False)

    def _check_classes(self, output: tuple, labels: tuple, dtype: Any) -> None:
        """Raise an error if labels do not have the shape that the loss needs, or are not classes of the network."""
        axis = 1 if len(output) > 1 else 0  # the classes; their scores may also be those of a single row
        wants_classes = self._options("sparse") if self._name == _CLASS_LOSSES[0] else _is_integer(dtype)
        expected = (*output[:axis], *output[axis + 1 :]) if wants_classes else output
        if labels != expected or (wants_classes and not _is_integer(dtype)):
            kind = "class numbers" if wants_classes else "a score for each class"
            rule = f"one that yields labels of the shape {expected}, {kind}, for the network's output {output}"
            remedy = ""
            if self._name == _CLASS_LOSSES[0]:
                remedy = f"Labels of the other kind need sparse={not wants_classes}."
            if labels == (*expected, 1):
                remedy = "Remove the last axis of the labels."
            self._data.raise_invalid(ValueError, rule, f"{dtype} {labels}", remedy)
        classes = output[axis]
        if wants_classes and self._classes.size and self._classes.max() >= classes:
            rule = f"labels from 0 to {classes - 1}, the network's {classes} classes"
            if output == (classes, classes):
                self._reject_class(
                    rule, self._classes.max(), "A loss that compares the rows of a batch needs CoupledLoss."
                )
            self._reject_class(rule, self._classes.max())

    def _warn_if_broadcast(self, output: tuple, labels: tuple) -> None:
        """Warn if a loss compares outputs and labels of different shapes, which MindSpore broadcasts."""
        if output[1:] == labels[1:] or self._has_warned:
            return
        self._has_warned = True
        _check.warn(
            f"For '{self._data.owner}', {self._name} broadcasts the network's output {('rows', *output[1:])} and the "
            f"labels {('rows', *labels[1:])}, so it compares outputs with the labels of other rows or columns. "
            "Give both the same shape."
        )

    def raise_in_one_line(self, error: BaseException) -> None:
        """Raise MindSpore's error about the last new columns in one line, with a hint; nothing if it has another cause.

        Args:
            error (BaseException): what running them has raised.
        """
        if not self._columns or not isinstance(error, _INPUT_ERRORS):
            return
        before = error.__context__ if error.__suppress_context__ else None  # if it is in one line already
        cause = before if isinstance(before, _INPUT_ERRORS) else error
        hint, text = self._hint(), str(cause)
        if text.startswith(f"For '{self._data.owner}', '{self._data.name}'"):
            raise cause if debugs() else cause.with_traceback(None)
        if error is cause and text.startswith("'") and _OF_MINDSPORE in text:  # raised in a graph
            raise type(cause)(words_of(cause)) from cause_of(cause)
        if hint or (error is cause and _OF_MINDSPORE in text):
            what = f"MindSpore rejects {_shown(self._columns)} of '{self._data.name}'{place_of(cause)}"
            words = words_of(cause).rstrip(".")
            reason = cause_of(cause) if _OF_MINDSPORE in text else cause  # the user's own, with its traceback
            raise ValueError(f"For '{self._data.owner}', {what}: {words}. {hint}".rstrip()) from reason

    def _hint(self) -> str:
        """Return what may be wrong with the columns, as far as they show it."""
        data, labels = self._columns[0], self._columns[self._inputs :]
        if len(labels) == 1 and has_class_numbers(data) and labels[0].ndim > 1:
            return "The columns are swapped: yield the data first."
        if str(data.dtype) in ("Float64", "UInt8"):
            return "Yield the data as Float32."
        if self._name in _CLASS_LOSSES and labels and str(labels[0].dtype) in ("Int64", "UInt8"):
            return "Yield the labels as Int32."
        rows = [column.shape[0] for column in self._columns if column.ndim]
        if len(set(rows)) > 1:
            return f"The columns have {' and '.join(map(str, rows))} rows."
        return ""


def arguments_of(function: Any) -> tuple[int, float]:
    """Return the number of arguments that a function or a Cell needs, and the number that it takes at most."""
    try:
        signature = inspect.signature(function.construct if isinstance(function, nn.Cell) else function)
    except (TypeError, ValueError):  # of an operator in C++
        return 0, math.inf
    parameters = signature.parameters.values()
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    takes_more = any(p.kind == p.VAR_POSITIONAL for p in parameters)
    return sum(p.default is p.empty for p in positional), math.inf if takes_more else len(positional)


def amount_of(owner: str, function: Callable, columns: tuple, term: str = "") -> float:
    """Return what a micro-batch counts for by a function of its columns; raise an error unless it is a number >= 0.

    Args:
        owner (str): the name used in error messages.
        function (Callable): the user's `weight`, or the divisor of a loss.
        columns (tuple): the columns.
        term (str): if the function is for a term of the loss, its name. Default: ``""``.
    """
    of_term = f" for {term!r}" if term else ""
    try:
        amount = as_number(function(*columns))
    except TypeError:
        needed, most = arguments_of(function)
        if needed <= len(columns) <= most:
            raise
        rule = f"a function of the {_check.quantity(len(columns), 'column')} of a micro-batch"
        wanted = needed if len(columns) < needed else int(most)
        _check.raise_invalid(TypeError, owner, "weight", rule, f"one of {_check.quantity(wanted, 'argument')}{of_term}")
    if not (isinstance(amount, (int, float, np.number)) and math.isfinite(amount) and amount >= 0):
        _check.raise_invalid(
            ValueError, owner, "weight", "a function that returns a finite number >= 0", f"{amount}{of_term}"
        )
    return float(amount)


def has_class_numbers(column: Tensor) -> bool:
    """Return whether a column has one integer for each row."""
    return column.ndim == 1 and _is_integer(column.dtype)


def _is_integer(dtype: Any) -> bool:
    return "Int" in str(dtype)


def _shown(columns: tuple) -> str:
    """Return the types and the shapes of columns as text."""
    return " and ".join(f"{column.dtype} {list(column.shape)}" for column in columns)
