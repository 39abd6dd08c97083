"""Is the loss of a micro-batch the weighted mean of the losses of its parts?"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from functools import partial
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import nn

from .. import _check
from ..network.restoring import can_be_restored, restoring, synchronously
from .averages import why_not_additive
from .columns import part

# The rounding error of a row's loss depends on the other rows of its batch.
_TOLERANCE, _TOLERANCE_NARROW = 1e-4, 1e-2
_LARGE = 2**14


class AdditivityCheck:
    """Warns if a micro-batch's loss is not the weighted mean of the losses of two parts of it. Nothing is changed.

    A micro-batch proves something only if its parts distinguish what the loss may divide by: where no label is ignored,
    each loss seems to divide by the rows. So the check continues with later micro-batches, when one has a new reason
    for another divisor, such as the first -100 among labels, or a check had no result. It is done at growing distances,
    at most ten times in a thousand micro-batches. Only the forward is run, in evaluation mode, in PyNative mode, or in
    a graph if PyNative has no kernel.

    Args:
        owner (str): the name used in the warning.
        forward (Cell): returns a micro-batch's loss from its columns.
        weigh (Callable): returns the weight of a micro-batch.
    """

    def __init__(self, owner: str, forward: nn.Cell, weigh: Callable[[tuple], float]):
        self._owner, self._forward, self._weigh = owner, forward, weigh
        self._micro_batches, self._next = 0, 1
        self._had_result = False
        self._excluded: set[Hashable] = set()  # reasons that the loss is known not to have
        self.failed = False
        """bool, whether the loss is not a weighted mean; the check is then over."""

    def look_at(self, micro_batch: tuple, trained: Collection[Any]) -> None:
        """Check a micro-batch with at least two rows, if it can prove something new.

        Args:
            micro_batch (tuple): its columns.
            trained (Collection[Parameter]): Parameters that a forward does not change.
        """
        self._micro_batches += 1
        rows = micro_batch[0].shape[0]
        if self.failed or self._micro_batches < self._next or any(column.shape[0] != rows for column in micro_batch):
            return
        cut, differing = self._best_cut(micro_batch)
        if (self._had_result and not differing) or not can_be_restored(self._forward, trained):
            return
        self._next = 2 * self._micro_batches
        self._compare(micro_batch, cut, differing, trained)

    def _best_cut(self, micro_batch: tuple) -> tuple[int, dict[Hashable, np.ndarray]]:
        """Return where to cut, and for each new reason the amounts that the two parts would count for.

        Parts of different sizes also distinguish rows from a plain mean of the parts. A part that counts nothing has no
        loss.
        """
        rows = micro_batch[0].shape[0]
        new = {
            reason: count()
            for number, column in enumerate(micro_batch)
            for reason, count in _divisors(number, column)
            if reason not in self._excluded
        }
        best: tuple[int, dict] = (max(1, rows >> 2), {})
        for cut in {max(1, rows >> 2), rows >> 1, rows - max(1, rows >> 2)} if new else ():
            amounts = {reason: np.array([row[:cut].sum(), row[cut:].sum()]) for reason, row in new.items()}
            unequal = {
                reason: two for reason, two in amounts.items() if two.all() and two[0] * (rows - cut) != two[1] * cut
            }
            best = max(best, (cut, unequal), key=lambda each: len(each[1]))
        return best

    def _compare(self, micro_batch: tuple, cut: int, differing: dict, trained: Collection[Any]) -> None:
        """Warn, or exclude the reasons for which the loss of the micro-batch would be another one."""
        rows = micro_batch[0].shape[0]
        parts = [part(micro_batch, None, cut), part(micro_batch, cut, None)]
        tolerance, losses = _losses(self._forward, (micro_batch, micro_batch, *parts), trained)
        weights = np.array([self._weigh(each) for each in parts])
        if len(losses) < 4 or not np.isfinite(losses).all() or losses[0] != losses[1] or not weights.sum():
            return
        whole, _, *apart = losses
        allowed = tolerance * max(abs(whole), *map(abs, apart))
        expected = float(weights @ apart / weights.sum())
        if abs(whole - expected) > allowed:
            self.failed = True
            _check.warn(
                f"For '{self._owner}', the loss of a micro-batch of {rows} rows is {whole:.6g}, but the mean of its "
                f"parts, {apart[0]:.6g} for {cut} rows and {apart[1]:.6g} for {rows - cut}, weighted by rows is "
                f"{expected:.6g}: windows of uneven micro-batches are not exact. Give 'weight', what the loss divides "
                "by, or check='off'. A loss that compares the rows of a batch needs CoupledLoss.",
            )
            return
        # If both parts have one loss, any weights give it.
        self._had_result = self._had_result or rows == 2 or abs(float(np.mean(apart)) - whole) > allowed
        self._excluded |= {
            reason for reason, two in differing.items() if abs(two @ apart / two.sum() - whole) > allowed
        }


def _divisors(number: int, column: Any) -> Iterator[tuple[Hashable, Callable[[], np.ndarray]]]:
    """Yield reasons for which a loss may divide by another number than the rows, and what counts the rows then.

    Integers may be ignored: the lowest or the highest (-100, 0, 255, the number of classes). Floats may be a mask: 0,
    or weights. Large float columns are data.
    """
    kind = str(column.dtype)
    if not column.size or (not _is_integer(kind) and column.size > _LARGE):
        return
    array = column.asnumpy() if kind != "BFloat16" else column.astype(ms.float32).asnumpy()
    rows = array.reshape(len(array), -1)
    if _is_integer(kind):
        for value in {int(rows.min()), int(rows.max())}:
            yield (number, value), partial(_count, rows, value)
    else:
        yield (number, 0), partial(_count, rows, 0)
        yield (number, "sum"), partial(_sum, rows)


def _count(rows: np.ndarray, ignored: int) -> np.ndarray:
    return np.count_nonzero(rows != ignored, axis=1)


def _sum(rows: np.ndarray) -> np.ndarray:
    return np.abs(rows).sum(1, dtype=np.float64)


def _is_integer(kind: str) -> bool:
    return "Int" in kind or kind == "Bool"


def warn_about_shapes(owner: str, one: tuple, other: tuple) -> None:
    """Warn about labels whose rows differ in size: the number of rows may then be the wrong weight."""
    _check.warn(
        f"For '{owner}', labels of the shapes {one} and {other} are weighted by their rows only. If the loss averages "
        "over more, give 'weight', the number that it divides by; else check='off'."
    )


def warn_about_numbers(owner: str) -> None:
    """Warn about a loss whose labels number the rows of a batch."""
    _check.warn(
        f"For '{owner}', the labels number the rows of a batch, so the loss compares the rows of each micro-batch "
        "only: a window is not one large batch. Use CoupledLoss, or check='off'."
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
        with restoring(forward, trained, training=False, mode=mode), synchronously():
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
