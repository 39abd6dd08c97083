"""Is the loss of a micro-batch the weighted mean of the losses of its parts?"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import nn

from .. import _check
from ..network.as_found import can_be_left_as_found, left_as_found
from .averages import why_not_additive

# The rounding error of a row's loss depends on the other rows of its batch.
_TOLERANCE, _TOLERANCE_NARROW = 1e-4, 1e-2


def warn_unless_additive(
    owner: str, forward: nn.Cell, micro_batch: tuple, weigh: Callable[[tuple], float], trained: Collection[Any]
) -> bool:
    """Warn if a micro-batch's loss is not the weighted mean of the losses of two parts of it. Nothing is changed.

    Runs only the forward, in evaluation mode, in PyNative mode, or in a graph if PyNative has no kernel. Returns
    whether the check had a result. It has none if neither mode runs, a loss is not finite or not reproducible, a column
    does not have one entry per row, the weights are 0, or the untrained Parameters, which must be restored, are large.

    Args:
        owner (str): the name used in the warning.
        forward (Cell): returns a micro-batch's loss from its columns.
        micro_batch (tuple): its columns, with at least two rows.
        weigh (Callable): returns the weight of a micro-batch.
        trained (Collection[Parameter]): Parameters that a forward does not change.
    """
    rows = micro_batch[0].shape[0]
    cut = max(1, rows >> 2)  # parts of different sizes, so that their plain and weighted means differ
    parts = [tuple(column[:cut] for column in micro_batch), tuple(column[cut:] for column in micro_batch)]
    if not can_be_left_as_found(forward, trained) or any(column.shape[0] != rows for column in micro_batch):
        return False
    tolerance, losses = _losses(forward, (micro_batch, micro_batch, *parts), trained)
    weights = [weigh(part) for part in parts]
    if len(losses) < 4 or not np.isfinite(losses).all() or losses[0] != losses[1] or not sum(weights):
        return False
    whole, _, *apart = losses
    expected = float(np.dot(weights, apart) / sum(weights))
    if abs(whole - expected) > tolerance * max(abs(whole), *map(abs, apart)):
        _check.warn(
            f"For '{owner}', the loss of a micro-batch of {rows} rows is {whole:.6g}, but the mean of its parts, "
            f"{apart[0]:.6g} for {cut} rows and {apart[1]:.6g} for {rows - cut}, weighted by rows is {expected:.6g}: "
            "windows of uneven micro-batches are not exact. Give 'weight', what the loss divides by, or check='off'. "
            "A loss that compares the rows of a batch needs CoupledLoss.",
        )
    return True


def warn_about_shapes(owner: str, one: tuple, other: tuple) -> None:
    """Warn about labels whose rows differ in size: the number of rows may then be the wrong weight."""
    _check.warn(
        f"For '{owner}', labels of the shapes {one} and {other} are weighted by their rows only. If the loss averages "
        "over more, give 'weight', the number that it divides by; else check='off'."
    )


def warn_about_loss(owner: str, loss_fn: Any) -> None:
    """Warn if the loss of a window is not a mean over its micro-batches."""
    why = why_not_additive(loss_fn)
    if why:
        _check.warn(
            f"For '{owner}', {type(loss_fn).__name__} is {why}: the loss of a window is not the mean over its "
            "micro-batches, so accumulation trains another loss than a large batch. Use a loss that is a mean.",
        )


def _losses(forward: nn.Cell, micro_batches: tuple, trained: Collection[Any]) -> tuple[float, list[float]]:
    """Return the tolerance and the losses of the micro-batches; no losses if they can't be computed."""
    for mode in (ms.PYNATIVE_MODE, ms.GRAPH_MODE):
        with left_as_found(forward, trained, training=False, within=mode):
            try:
                losses = [forward(*micro_batches[0])]
            except Exception:
                continue  # no kernel
            try:
                losses += [forward(*micro_batch) for micro_batch in micro_batches[1:]]
                numbers = [float(loss.astype(ms.float32).asnumpy()) for loss in losses]
            except Exception:  # a network may accept only one batch size
                break
        narrow = any(loss.dtype in (ms.float16, ms.bfloat16) for loss in losses)
        return _TOLERANCE_NARROW if narrow else _TOLERANCE, numbers
    return 0.0, []
