"""Which columns does a loss take?"""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from mindspore import Tensor, nn

from .. import _check
from .averages import kept_labels, kind_and_options

_MANY = 10**6
_OF_PAIRS = ("MSELoss", "L1Loss", "MAELoss", "HuberLoss", "SmoothL1Loss")
_OF_CLASSES = ("SoftmaxCrossEntropyWithLogits", "CrossEntropyLoss", "NLLLoss")  # the first ignores no label


def taken(loss_fn: Any) -> range:
    """Return the allowed numbers of columns of a dataset: one for the network, and those that the loss takes."""
    if loss_fn is None:
        return range(1, _MANY)
    try:
        parameters = inspect.signature(
            loss_fn.construct if isinstance(loss_fn, nn.Cell) else loss_fn
        ).parameters.values()
    except (TypeError, ValueError):
        return range(2, _MANY)
    if any(each.kind == each.VAR_POSITIONAL for each in parameters):
        return range(2, _MANY)
    places = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    needed = max(2, sum(each.default is each.empty for each in places))  # arguments with defaults are not columns
    return range(needed, needed + 1)


def check(data: _check.Argument, micro_batch: tuple, allowed: range) -> None:
    """Raise an error if a micro-batch has another number of columns."""
    if len(micro_batch) not in allowed:
        most = "or more" if allowed.stop == _MANY else ""
        rule = (
            f"one that yields {allowed.start} {most}".rstrip()
            + " columns: the data, and what 'loss_fn' takes in addition to the output"
        )
        data.refuse(ValueError, rule, f"{len(micro_batch)}: {shown(micro_batch)}")


def warn_unless_pairs(owner: str, loss_fn: Any, output: Any, labels: tuple) -> None:
    """Warn if a loss compares outputs and labels of different shapes, which MindSpore broadcasts."""
    kind = kind_and_options(loss_fn)[0]
    if kind not in _OF_PAIRS or not isinstance(output, Tensor) or output.shape[1:] == labels[0].shape[1:]:
        return
    shapes = [("rows", *tensor.shape[1:]) for tensor in (output, labels[0])]
    _check.warn(
        f"For '{owner}', {kind} broadcasts the network's output {shapes[0]} and the labels {shapes[1]}, so it "
        "compares outputs with the labels of other rows or columns. Give both the same shape."
    )


def part(micro_batch: tuple, start: int | None, stop: int | None) -> tuple:
    """Return some rows of a micro-batch. A column that numbers the rows, as contrastive losses need, numbers these."""
    return tuple(
        _numbered_again(column[start:stop]) if numbers_rows(column) else column[start:stop] for column in micro_batch
    )


def numbers_rows(column: Tensor) -> bool:
    """Return whether a column has the number of its own or another row for each row, each once."""
    return has_class_numbers(column) and bool((np.sort(column.asnumpy()) == np.arange(column.size)).all())


def _numbered_again(column: Tensor) -> Tensor:
    return Tensor(column.asnumpy().argsort().argsort(), column.dtype)


def has_class_numbers(column: Tensor) -> bool:
    """Return whether a column has one integer for each row."""
    return column.ndim == 1 and "Int" in str(column.dtype)


def highest(labels: tuple) -> int:
    """Return the highest class number of label columns; -1 if there is none."""
    return max(
        (int(column.asnumpy().max()) for column in labels if has_class_numbers(column) and column.size), default=-1
    )


def is_of_classes(loss_fn: Any) -> bool:
    """Return whether a loss takes one score for each class."""
    return kind_and_options(loss_fn)[0] in _OF_CLASSES


def strange_label(loss_fn: Any, output: Any, labels: tuple) -> int | None:
    """Return a label that is not one of the network's classes, for which losses on CPU return inf; else None."""
    kind, options = kind_and_options(loss_fn)
    if kind not in _OF_CLASSES or not isinstance(output, Tensor) or "Int" not in str(labels[0].dtype):
        return None
    array = labels[0].asnumpy()
    if array.ndim != output.ndim - 1:
        return None
    kept = array if kind == _OF_CLASSES[0] else kept_labels(options, array)
    strange = kept[(kept < 0) | (kept >= output.shape[1])]
    return int(strange[0]) if strange.size else None


def shown(value: Any) -> str:
    """Return the type and the shape of a Tensor, or of several, as text."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return " and ".join(map(shown, value))
    return type(value).__name__
