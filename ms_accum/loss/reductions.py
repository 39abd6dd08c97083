"""Does a loss average or sum over a micro-batch?"""

from __future__ import annotations

from typing import Any

from mindspore import nn

from .. import _check
from .averages import kind_and_options, option_of

REDUCTIONS = ("mean", "sum")
_BY_NUMBER = {0: "sum", 1: "mean", 2: "none"}  # as the operators of `mint` store it


def loss_reduction(loss_fn: Any) -> str | None:
    """Return the reduction of a loss function, "mean", "sum" or "none", or None if it can't be determined.

    Many MindSpore losses have an attribute for it, or their operator has; these leave the attributes inherited from
    `LossBase` at their defaults. For all other losses the inherited attributes are right.
    """
    operators = loss_fn._primitives.values() if isinstance(loss_fn, nn.Cell) else ()
    for teller in (loss_fn, *operators):
        kind = getattr(teller, "reduction", None)
        kind = _BY_NUMBER.get(kind) if type(kind) is int else kind
        if kind in ("mean", "sum", "none"):
            return kind
    if not isinstance(loss_fn, nn.Cell):
        kind = option_of(loss_fn, "reduction")
        return kind if kind in ("mean", "sum", "none") else None
    inner = [cell for cell in loss_fn.cells() if isinstance(cell, nn.LossBase)] if kind_and_options(loss_fn)[0] else []
    if len(inner) == 1:  # `mint.nn.BCELoss` contains the loss of `nn`
        return loss_reduction(inner[0])
    if not isinstance(loss_fn, nn.LossBase):
        return None
    if not loss_fn.reduce:
        return "none"
    return "mean" if loss_fn.average else "sum"


def check_loss(owner: str, loss_fn: Any, reduction: str) -> str | None:
    """Return `loss_reduction`; raise an error if the loss does not match `reduction`."""
    kind = loss_reduction(loss_fn)
    if kind == "none":
        _check.refuse(ValueError, owner, "loss_fn", "a loss with reduction='mean' or 'sum'", "'none'")
    if kind == "sum" and reduction == "mean":
        raise ValueError(
            f"For '{owner}', 'reduction' must be 'sum' for a loss that sums, but got 'mean'. "
            "Use reduction='sum' here, or give the loss reduction='mean'."
        )
    return kind
