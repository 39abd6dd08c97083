"""Which columns does a loss take?"""

from __future__ import annotations

import inspect
from typing import Any

from mindspore import Tensor, nn

from .. import _check
from .averages import kept_labels, kind_and_options

_MANY = 10**6
_OF_PAIRS = ("MSELoss", "L1Loss", "MAELoss", "HuberLoss", "SmoothL1Loss")
_OF_CLASSES = ("SoftmaxCrossEntropyWithLogits", "CrossEntropyLoss", "NLLLoss")  # the first ignores no label


def taken(loss_fn: Any) -> range:
    """Return the allowed numbers of a dataset's columns: one for the network, and those that the loss takes."""
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


def check(owner: str, micro_batch: tuple, allowed: range) -> None:
    """Raise an error if a micro-batch has another number of columns."""
    if len(micro_batch) not in allowed:
        most = "or more" if allowed.stop == _MANY else ""
        rule = (
            f"one that yields {allowed.start} {most}".rstrip()
            + " columns, data and what 'loss_fn' takes beside the output"
        )
        _check.refuse(ValueError, owner, "train_dataset", rule, f"{len(micro_batch)}: {shown(micro_batch)}")


def check_labels(owner: str, loss_fn: Any, output: Any, labels: tuple) -> None:
    """Raise an error if labels are none of the network's classes; warn if outputs and labels are not pairs.

    Of both MindSpore's losses return a number, which may be inf.
    """
    kind, options = kind_and_options(loss_fn)
    if not (labels and isinstance(output, Tensor)):
        return
    if kind in _OF_PAIRS and output.shape[1:] != labels[0].shape[1:]:
        shapes = [("rows", *tensor.shape[1:]) for tensor in (output, labels[0])]
        _check.warn(
            f"For '{owner}', {kind} broadcasts the network's output {shapes[0]} and the labels {shapes[1]}, so it "
            "compares outputs with the labels of other rows or columns. Give both one shape."
        )
    if kind in _OF_CLASSES and output.ndim > 1:
        _check_classes(owner, kind, options, output, labels[0])


def _check_classes(owner: str, kind: str, options: Any, output: Tensor, label: Tensor) -> None:
    if "Int" not in str(label.dtype) or label.ndim != output.ndim - 1:
        return  # distributions over the classes
    array, classes = label.asnumpy(), output.shape[1]
    kept = array if kind == _OF_CLASSES[0] else kept_labels(options, array)
    if kept.size and not 0 <= kept.min() <= kept.max() < classes:
        strange = kept.max() if kept.max() >= classes else kept.min()
        rule = f"one that yields labels from 0 to {classes - 1}, the network's {classes} classes"
        remedy = "" if kind == _OF_CLASSES[0] else "Should it be the loss's 'ignore_index'?"
        _check.refuse(ValueError, owner, "train_dataset", rule, strange, remedy)


def shown(value: Any) -> str:
    """Return the type and the shape of a Tensor, or of each of several."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return " and ".join(map(shown, value))
    return type(value).__name__
