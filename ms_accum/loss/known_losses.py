"""Facts about MindSpore's losses: what they divide by, whether they average or sum, and how to run them correctly."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from typing import Any, Callable

import numpy as np
from mindspore import Tensor, mint, nn, ops

from .. import _check
from ..network.compiled import call, in_graphs
from ..network.private import isconstant, primitives_of

REDUCTIONS = ("mean", "sum")
Options = Callable[[str], Any]
"""Returns the value of an argument of a loss by its name."""


# What a loss divides its sum by, on the host


def as_number(value: Any) -> Any:
    """Return a Tensor or array with one element as a number, and everything else unchanged."""
    value = value.asnumpy() if isinstance(value, Tensor) else value
    return value.item() if isinstance(value, np.ndarray) and value.size == 1 else value


def row_count(data: Tensor, *labels: Tensor) -> float:
    """Return the number of rows of the first column."""
    return data.shape[0]


def _count_rows(options: Options, data: Tensor, *labels: Tensor) -> float:
    # The rows of the labels, because the first axis of the data may be the time.
    return labels[0].shape[0] if labels else row_count(data)


def _count_elements(options: Options, data: Tensor, *labels: Tensor) -> float:
    if labels and options("reduction") != "batchmean":
        return labels[0].size
    return _count_rows(options, data, *labels)


def _count_labels(options: Options, data: Tensor, *labels: Tensor) -> float:
    """Return the number of labels that are not ignored, or the sum of their class weights."""
    if not labels:
        return row_count(data)
    array = labels[0] if isinstance(labels[0], np.ndarray) else labels[0].asnumpy()
    if not np.issubdtype(array.dtype, np.integer):
        if array.ndim < 2:
            rule = f"integer labels, or a distribution over the classes, not {array.dtype}"
            raise ValueError(f"'loss_fn' must get {rule}.")
        return array.size / array.shape[1]  # one distribution over the classes per label
    counted = not_ignored(options, array)
    class_weights = options("weight")
    limit = np.inf if class_weights is None else class_weights.size
    if counted.size and not 0 <= counted.min() <= counted.max() < limit:
        label = counted.max() if counted.max() >= limit else counted.min()  # MindSpore treats -1 as the last class
        rule = "labels >= 0"
        if class_weights is not None:
            rule += f" and < {limit}, the number of class weights"
        raise ValueError(f"'loss_fn' must get {rule}, but got {label}. Should this be its 'ignore_index'?")
    return counted.size if class_weights is None else float(class_weights.asnumpy()[counted].sum())


def not_ignored(options: Options, labels: np.ndarray) -> np.ndarray:
    """Return the class numbers that a loss with these options does not ignore."""
    ignored = options("ignore_index")
    return labels[labels != (-100 if ignored is None else ignored)]


# Which losses divide by what

_NAMES_BY_COUNT: dict[Callable[..., float], tuple[str, ...]] = {
    _count_labels: ("CrossEntropyLoss", "NLLLoss"),
    _count_elements: (
        *("BCELoss", "BCEWithLogitsLoss", "FocalLoss", "HingeEmbeddingLoss", "HuberLoss", "KLDivLoss", "L1Loss"),
        *("MAELoss", "MSELoss", "PoissonNLLLoss", "SmoothL1Loss", "SoftMarginLoss"),
    ),
    _count_rows: (
        *("CosineEmbeddingLoss", "MultiLabelSoftMarginLoss", "MultiMarginLoss", "MultilabelMarginLoss"),
        *("SoftmaxCrossEntropyWithLogits", "TripletMarginLoss"),
    ),
}
_COUNTS = {name: count for count, names in _NAMES_BY_COUNT.items() for name in names}
_QUOTIENT = "a quotient of two sums over the batch"
_NOT_ADDITIVE = {
    "RMSELoss": "the root of a mean; nn.MSELoss has the same minimum",
    "DiceLoss": _QUOTIENT,
    "MultiClassDiceLoss": _QUOTIENT,
}
_CLASSES = {
    getattr(module, name): name
    for module in (nn, mint.nn)
    for name in (*_COUNTS, *_NOT_ADDITIVE)
    if hasattr(module, name)
}
# The losses as functions; they have the same names in both modules. A list, because a user's loss may have no hash.
_FUNCTIONS = [
    (getattr(module, function), name)
    for module in (ops, mint.nn.functional)
    for function, name in {
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
    }.items()
    if hasattr(module, function)
]


def name_and_options(loss_fn: Any) -> tuple[str | None, Options]:
    """Return the name of MindSpore's loss, None for others, and a function that returns one of its arguments."""
    if isinstance(loss_fn, functools.partial) and not loss_fn.args and not loss_fn.keywords:
        return name_and_options(loss_fn.func)
    if isinstance(loss_fn, nn.Cell):
        # A subclass that overrides `construct` is another loss.
        construct = type(loss_fn).construct
        classes = [cls for cls in type(loss_fn).__mro__ if getattr(cls, "construct", None) is construct]
        name = next((_CLASSES[cls] for cls in classes if cls in _CLASSES), None)
        return name, lambda option: getattr(loss_fn, option, None)
    function = loss_fn.func if isinstance(loss_fn, functools.partial) else loss_fn
    name = next((name for loss, name in _FUNCTIONS if loss is function), None)
    return name, functools.partial(option_of, loss_fn)


def option_of(loss_fn: Any, name: str) -> Any:
    """Return the value of an argument of a function or of a `functools.partial` of one; None if there is none."""
    if isinstance(loss_fn, functools.partial) and name in loss_fn.keywords:
        return loss_fn.keywords[name]
    try:
        parameter = inspect.signature(loss_fn).parameters.get(name)
    except (TypeError, ValueError):
        return None
    return None if parameter is None or parameter.default is parameter.empty else parameter.default


def divisor_of(loss_fn: Any, inputs: int = 1) -> Callable[..., float] | None:
    """Return what computes the number that a loss divides its sum by, from the columns; None if that is not known.

    Args:
        loss_fn (Any): the loss.
        inputs (int): the number of columns before the labels. Default: 1.
    """
    name, options = name_and_options(loss_fn)
    count = _COUNTS.get(name or "")
    if count is None:
        return None

    def divisor(*columns: Tensor) -> float:
        return count(options, columns[0], *columns[inputs:])

    return divisor


def why_not_additive(loss_fn: Any) -> str | None:
    """Return why the loss of a window is not the mean of its micro-batches' losses; None if it is, or is unknown."""
    return _NOT_ADDITIVE.get(name_and_options(loss_fn)[0] or "")


# Whether a loss averages or sums

_REDUCTION_BY_NUMBER = {0: "sum", 1: "mean", 2: "none"}  # as the operators of `mint` store it


def loss_reduction(loss_fn: Any) -> str | None:
    """Return the reduction of a loss function, "mean", "sum" or "none", or None if it can't be determined.

    Many MindSpore losses have an attribute for it, or their operator has; these leave the attributes inherited from
    `LossBase` at their defaults. For all other losses the inherited attributes are right.
    """
    operators = primitives_of(loss_fn) if isinstance(loss_fn, nn.Cell) else ()
    for owner in (loss_fn, *operators):
        reduction = getattr(owner, "reduction", None)
        if type(reduction) is int:
            reduction = _REDUCTION_BY_NUMBER.get(reduction)
        if reduction in ("mean", "sum", "none"):
            return reduction
    if not isinstance(loss_fn, nn.Cell):
        reduction = option_of(loss_fn, "reduction")
        return reduction if reduction in ("mean", "sum", "none") else None
    if name_and_options(loss_fn)[0] is not None:
        inner = [cell for cell in loss_fn.cells() if isinstance(cell, nn.LossBase)]
        if len(inner) == 1:  # `mint.nn.BCELoss` contains the loss of `nn`
            return loss_reduction(inner[0])
    if not isinstance(loss_fn, nn.LossBase):
        return None
    if not loss_fn.reduce:
        return "none"
    return "mean" if loss_fn.average else "sum"


def check_reduction(owner: str, loss_fn: Any, reduction: str) -> str | None:
    """Return `loss_reduction`; raise an error if the loss does not match `reduction`."""
    of_loss = loss_reduction(loss_fn)
    if of_loss == "none":
        _check.raise_invalid(ValueError, owner, "loss_fn", "a loss with reduction='mean' or 'sum'", "'none'")
    if of_loss == "sum" and reduction == "mean":
        raise ValueError(
            f"For '{owner}', 'reduction' must be 'sum' for a loss that sums, but got 'mean'. "
            "Use reduction='sum' here, or give the loss reduction='mean'."
        )
    return of_loss


# How to run a loss correctly, in graphs and in PyNative mode


def runnable(function: Any) -> Any:
    """Return a loss function in a form that MindSpore runs correctly, in graphs and in PyNative mode.

    The parameters of the returned Cell have the same names as those of the function.
    """
    if _has_stale_mean(function):
        options = name_and_options(function)[1]
        return _MeanWithLogits(options("weight"), options("pos_weight"))
    return _Partial(function) if isinstance(function, functools.partial) else function


def _has_stale_mean(function: Any) -> bool:
    """Return whether PyNative mode computes a wrong gradient of this loss.

    The backward of MindSpore's BCEWithLogitsLoss divides by the number of elements of the first shape that was
    differentiated in the process. With other reductions it is right.
    """
    return name_and_options(function)[0] == "BCEWithLogitsLoss" and loss_reduction(function) == "mean"


class _MeanWithLogits(nn.Cell):
    """The binary cross entropy of logits, averaged by another operator."""

    def __init__(self, weight: Any, pos_weight: Any):
        super().__init__(auto_prefix=False)
        self.weight = weight
        self.pos_weight = pos_weight

    def construct(self, logits: Tensor, labels: Tensor) -> Tensor:
        losses = ops.binary_cross_entropy_with_logits(logits, labels, self.weight, self.pos_weight, "none")
        return ops.mean(losses)


class _Partial(nn.Cell):
    """Calls a `functools.partial`, which a graph can't call."""

    def __init__(self, function: functools.partial):
        super().__init__(auto_prefix=False)
        self.function = function.func
        self.first = function.args
        self.keywords = dict(function.keywords)

    def construct(self, *columns: Tensor) -> Any:
        return call(self.function, (*self.first, *columns), **self.keywords)


class WithLoss(nn.Cell):
    """A network and its loss function, which may get several columns in addition to the network's output.

    Args:
        network (Cell), loss_fn (Union[Cell, Callable]): both.
        inputs (int): the columns that the network gets; the loss gets the others. Default: 1.
        accepts (Optional[Callable]): raises an error about shapes of the output and the labels, and the labels' type,
            which are constants in a graph. Default: ``None``.
    """

    def __init__(self, network: nn.Cell, loss_fn: Any, inputs: int = 1, accepts: Any = None):
        super().__init__(auto_prefix=False)
        self.network, self.loss_fn = network, runnable(loss_fn)
        self.inputs, self.accepts = inputs, accepts

    def construct(self, *columns: Tensor) -> Any:
        output, labels = call(self.network, columns[: self.inputs]), columns[self.inputs :]
        if self.accepts is not None and len(labels) > 0 and isconstant(output.shape):
            if not self.accepts(output.shape, labels[0].shape, labels[0].dtype):
                return output  # never, because it raises an error
        return call(self.loss_fn, (output, *labels))


def loss_among(outputs: Any) -> Any:
    """Return the loss of a network that returns it alone, or as the first of several outputs."""
    return outputs[0] if isinstance(outputs, (tuple, list)) else outputs


def scalar(owner: str, loss: Any, of_loss_fn: bool) -> Any:
    """Return a loss, or raise an error if it is not a scalar. Runs on the host and while a graph is compiled.

    Args:
        owner (str): the name used in error messages.
        loss (Tensor): the loss.
        of_loss_fn (bool): whether a `loss_fn` has returned it, and not a network.
    """
    loss = loss if of_loss_fn else loss_among(loss)
    if loss is None:
        raise TypeError(f"For '{owner}', the loss must be a scalar, but got None. Does the function return it?")
    if isinstance(loss, (tuple, list, dict)):
        rule = "the network must return the loss, or (loss, output, ...)"
        remedy = "Give the driver a 'loss_fn', or wrap the network in a Cell that returns the loss."
        if of_loss_fn:
            rule = "'loss_fn' must return only the loss"
            remedy = (
                "Leave the others out; if they are terms of the loss, give GradientAccumulation a dict as 'weight'."
            )
        raise TypeError(f"For '{owner}', {rule}, but got several values. {remedy}")
    if loss.ndim != 0:
        remedy = "" if of_loss_fn else ", and the driver a 'loss_fn'"
        raise ValueError(
            f"For '{owner}', the loss must be a scalar, but got shape {loss.shape}. "
            f"Give the loss function reduction='mean' or 'sum'{remedy}."
        )
    return loss


def check_gradient(owner: str, network: nn.Cell, compiles: bool, name: str = "network") -> None:
    """Raise an error if PyNative mode computes a wrong gradient of this network, because of a loss in it."""
    if not in_graphs(compiles) and any(map(_has_stale_mean, _outside_graphs(network))):
        rule = "one without the mean of nn.BCEWithLogitsLoss in PyNative mode, whose gradient MindSpore divides wrongly"
        remedy = "Use compile=True, or reduction='none' and ops.mean."
        _check.raise_invalid(ValueError, owner, name, rule, "one with it", remedy)


def _outside_graphs(cell: Any) -> Iterator[nn.Cell]:
    """Yield a Cell and the Cells in it, except those inside a `construct` that ms.jit compiles."""
    yield cell
    if not hasattr(cell.construct, "__wrapped__"):
        for child in cell.cells():
            yield from _outside_graphs(child)
