"""By which number is a mean loss divided?"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Callable, NamedTuple

import numpy as np
from mindspore import mint, nn, ops

Count = Callable[..., float]


class Average(NamedTuple):
    """The number by which a loss divides its sum."""

    counted: Count
    """Returns this number for a micro-batch's columns."""
    known: bool
    """Whether it is certain that the loss divides by it. Otherwise it is a guess, the rows."""


def average_of(loss_fn: Any) -> Average:
    """Return what a loss function averages over."""
    kind, options = kind_and_options(loss_fn)
    if kind not in COUNTS:
        return Average(_rows, known=False)
    return Average(functools.partial(COUNTS[kind], options), known=True)


def why_not_additive(loss_fn: Any) -> str | None:
    """Return why the loss of a window is not the mean of its micro-batches' losses; None if it is, or is unknown."""
    return _NOT_ADDITIVE.get(kind_and_options(loss_fn)[0] or "")


def option_of(loss_fn: Any, name: str) -> Any:
    """Return the value of an argument of a function or of a `functools.partial` of one; None if there is none."""
    function: Any = loss_fn
    given: dict[str, Any] = {}
    while isinstance(function, functools.partial):
        function, given = function.func, {**function.keywords, **given}
    if name in given:
        return given[name]
    try:
        found = inspect.signature(function).parameters.get(name)
    except (TypeError, ValueError):
        return None
    return None if found is None or found.default is inspect.Parameter.empty else found.default


def kind_and_options(loss_fn: Any) -> tuple[str | None, Callable[[str], Any]]:
    """Return the name of MindSpore's loss, and a function that returns the value of one of its arguments."""
    if isinstance(loss_fn, functools.partial) and not loss_fn.args and not loss_fn.keywords:
        return kind_and_options(loss_fn.func)
    if isinstance(loss_fn, nn.Cell):
        # A subclass that overrides `construct` is another loss.
        own = type(loss_fn).construct
        classes = [kind for kind in type(loss_fn).__mro__ if getattr(kind, "construct", None) is own]
        name = next((_CLASSES[kind] for kind in classes if kind in _CLASSES), None)
        return name, lambda option: getattr(loss_fn, option, None)
    function: Any = loss_fn
    while isinstance(function, functools.partial):
        function = function.func
    return next((name for each, name in _FUNCTIONS if each is function), None), functools.partial(option_of, loss_fn)


def _rows(*columns: Any) -> float:
    return columns[0].shape[0]


def of_rows(options: Any, data: Any, *labels: Any) -> float:
    """Return the rows."""
    return _rows(*(labels or (data,)))  # the first axis of the data may be another one


def of_elements(options: Any, data: Any, *labels: Any) -> float:
    """Return the elements of the labels."""
    return labels[0].size if labels and options("reduction") != "batchmean" else _rows(*(labels or (data,)))


def of_labels(options: Any, data: Any, *labels: Any) -> float:
    """Return the number of labels that are not ignored, or the sum of their class weights."""
    if not labels:
        return _rows(data)
    array = labels[0].asnumpy()
    if not np.issubdtype(array.dtype, np.integer):
        if array.ndim < 2:
            what = f"integer labels, or a distribution over the classes, not {array.dtype}"
            raise ValueError(f"For 'train_process', 'loss_fn' must get {what}.")
        return array.size / array.shape[1]  # one distribution over the classes per label
    kept, of_class = kept_labels(options, array), options("weight")
    most = np.inf if of_class is None else of_class.size
    if kept.size and not 0 <= kept.min() <= kept.max() < most:
        strange = kept.max() if kept.max() >= most else kept.min()  # MindSpore treats -1 as the last class
        what = "labels >= 0" if of_class is None else f"labels >= 0 and < {most}, the number of class weights"
        what = f"{what}, but got {strange}. Should this be its 'ignore_index'?"
        raise ValueError(f"For 'train_process', 'loss_fn' must get {what}")
    if of_class is None:
        return kept.size
    return float(of_class.asnumpy()[kept].sum())


def kept_labels(options: Any, labels: np.ndarray) -> np.ndarray:
    """Return the class numbers that a loss with these options does not ignore."""
    ignored = options("ignore_index")
    return labels[labels != (-100 if ignored is None else ignored)]


_BY_COUNT: dict[Any, tuple[str, ...]] = {
    of_labels: ("CrossEntropyLoss", "NLLLoss"),
    of_elements: (
        *("BCELoss", "BCEWithLogitsLoss", "FocalLoss", "HingeEmbeddingLoss", "HuberLoss", "KLDivLoss", "L1Loss"),
        *("MAELoss", "MSELoss", "PoissonNLLLoss", "SmoothL1Loss", "SoftMarginLoss"),
    ),
    of_rows: (
        *("CosineEmbeddingLoss", "MultiLabelSoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss"),
        *("SoftmaxCrossEntropyWithLogits", "TripletMarginLoss"),
    ),
}
COUNTS = {name: count for count, names in _BY_COUNT.items() for name in names}
_QUOTIENT = "a quotient of two sums over the batch"
_NOT_ADDITIVE = {
    "RMSELoss": "the root of a mean; nn.MSELoss has the same minimum",
    "DiceLoss": _QUOTIENT,
    "MultiClassDiceLoss": _QUOTIENT,
}
# The losses as functions; they have the same names in both modules.
_NAMES = {
    "cross_entropy": "CrossEntropyLoss",
    "nll_loss": "NLLLoss",
    "binary_cross_entropy": "BCELoss",
    "binary_cross_entropy_with_logits": "BCEWithLogitsLoss",
    "kl_div": "KLDivLoss",
    "l1_loss": "L1Loss",
    "mse_loss": "MSELoss",
    "smooth_l1_loss": "SmoothL1Loss",
    "huber_loss": "HuberLoss",
    "soft_margin_loss": "SoftMarginLoss",
    "hinge_embedding_loss": "HingeEmbeddingLoss",
    "multi_margin_loss": "MultiMarginLoss",
    "multilabel_margin_loss": "MultilabelMarginLoss",
}
_CLASSES = {
    getattr(module, name): name
    for module in (nn, mint.nn)
    for name in (*COUNTS, *_NOT_ADDITIVE)
    if hasattr(module, name)
}
_FUNCTIONS = [
    (getattr(module, name), kind)
    for module in (ops, mint.nn.functional)
    for name, kind in _NAMES.items()
    if hasattr(module, name)
]
