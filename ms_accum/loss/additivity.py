"""Checks whether the loss of a micro-batch is the weighted mean of the losses of its parts."""

from __future__ import annotations

from collections.abc import Collection, Hashable
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from .. import _check
from ..network.restoring import can_be_restored, restoring, synchronously

# The rounding error of a row's loss depends on the other rows of its batch.
_TOLERANCE = 1e-4
_TOLERANCE_16_BITS = 1e-2  # for float16 and bfloat16
_MAX_MASK_SIZE = 2**14


class AdditivityCheck:
    """Warns if rows are not the weight with which the losses of micro-batches add up. Nothing is changed.

    It compares a micro-batch's loss with the weighted mean of the losses of two parts of it. A micro-batch shows what
    the loss divides by only if its parts differ in it: where no label is ignored, every loss seems to divide by the
    rows. So the check continues with later micro-batches if an earlier one gave no result, or if one has a new reason
    for another divisor, such as the first -100 among labels. The intervals grow, so that at most ten of a thousand
    micro-batches are checked. Only the forward is run, in evaluation mode, in PyNative mode, or in a graph if PyNative
    mode has no kernel.

    Args:
        owner (str): the name used in warnings.
        forward (Cell): returns a micro-batch's loss from its columns.
        weigh (Callable): returns the weight of a micro-batch.
    """

    def __init__(self, owner: str, forward: nn.Cell, weigh: Callable[[tuple], float]):
        self._owner = owner
        self._forward = forward
        self._weigh = weigh
        self._row_shapes: list[tuple] | None = None
        self._shapes_differ = False
        self._micro_batches = 0
        self._next = 1
        self._had_result = False
        self._excluded: set[Hashable] = set()  # reasons that the loss is known not to have
        self.failed = False
        """bool, whether the loss is not a weighted mean; the check is then over."""

    def check(self, micro_batch: tuple, trained: Collection[Any]) -> None:
        """Check a micro-batch, if it can prove something new.

        Args:
            micro_batch (tuple): its columns.
            trained (Collection[Parameter]): Parameters that a forward does not change.
        """
        if not self._shapes_differ:
            self._check_shapes(micro_batch)
        self._micro_batches += 1
        rows = micro_batch[0].shape[0]
        if self._micro_batches < self._next or rows == 1 or any(column.shape[0] != rows for column in micro_batch):
            return
        cut, differing = self._best_cut(micro_batch)
        if (self._had_result and not differing) or not can_be_restored(self._forward, trained):
            return
        self._next = 2 * self._micro_batches
        self._compare(micro_batch, cut, differing, trained)

    def _check_shapes(self, micro_batch: tuple) -> None:
        """Warn once about labels whose rows differ in size: the number of rows may then be the wrong weight."""
        shapes = [column.shape[1:] for column in micro_batch[1:]]
        if self._row_shapes is None:
            self._row_shapes = shapes
        for first, other in zip(self._row_shapes, shapes):
            if first != other:
                self._shapes_differ = True
                _check.warn(
                    f"For '{self._owner}', labels of the shapes {('rows', *first)} and {('rows', *other)} are weighted "
                    "by their rows only. If the loss averages over more, give 'weight', the number that it divides by; "
                    "else check='off'."
                )
                return

    def _best_cut(self, micro_batch: tuple) -> tuple[int, dict[Hashable, np.ndarray]]:
        """Return where to cut, and for each new reason the weights that the two parts would have.

        Parts of different sizes also distinguish a weighting by rows from a plain mean of the parts. A part of weight 0
        has no loss.
        """
        amounts: dict[Hashable, np.ndarray] = {}
        for number, column in enumerate(micro_batch):
            amounts |= _amounts_of_rows(number, column, self._excluded)
        rows = micro_batch[0].shape[0]
        quarter = max(1, rows // 4)
        best_cut = quarter
        best: dict[Hashable, np.ndarray] = {}
        for cut in (quarter, rows // 2, rows - quarter) if amounts else ():
            differing = {}
            for reason, amount in amounts.items():
                first = amount[:cut].sum()
                second = amount[cut:].sum()
                if first and second and first * (rows - cut) != second * cut:
                    differing[reason] = np.array([first, second])
            if len(differing) > len(best):
                best_cut = cut
                best = differing
        return best_cut, best

    def _compare(self, micro_batch: tuple, cut: int, differing: dict, trained: Collection[Any]) -> None:
        """Warn, or exclude the reasons for which the loss of the micro-batch would be another one."""
        rows = micro_batch[0].shape[0]
        parts = (part(micro_batch, None, cut), part(micro_batch, cut, None))
        # The complete micro-batch twice: a loss that is random proves nothing.
        tolerance, losses = _losses(self._forward, (micro_batch, micro_batch, *parts), trained)
        weights = np.array([self._weigh(columns) for columns in parts])
        if not losses or not np.isfinite(losses).all() or losses[0] != losses[1] or not weights.sum():
            return
        loss, _, *part_losses = losses
        allowed = tolerance * max(map(abs, losses))
        expected = float(weights @ part_losses / weights.sum())
        if abs(loss - expected) > allowed:
            self.failed = True
            first_part = _check.quantity(cut, "row")
            _check.warn(
                f"For '{self._owner}', the loss of a micro-batch of {rows} rows is {loss:.6g}, but the mean of its "
                f"parts, {part_losses[0]:.6g} for {first_part} and {part_losses[1]:.6g} for {rows - cut}, weighted by "
                f"rows is {expected:.6g}: windows of uneven micro-batches are not exact. Give 'weight', what the loss "
                "divides by, a dict for several terms; or check='off'. A loss that compares the rows of a batch needs "
                "CoupledLoss.",
            )
            return
        # If both parts have the same loss, every weighting gives this loss.
        if rows == 2 or abs(float(np.mean(part_losses)) - loss) > allowed:
            self._had_result = True
        for reason, amounts in differing.items():
            if abs(amounts @ part_losses / amounts.sum() - loss) > allowed:
                self._excluded.add(reason)


def _amounts_of_rows(number: int, column: Tensor, excluded: Collection[Hashable]) -> dict[Hashable, np.ndarray]:
    """Return what the rows count for if the loss divides by something else; reasons for which they differ.

    Integers may be ignored: the lowest or the highest (-100, 0, 255, the number of classes). Floats may be a mask: 0,
    or weights. Large float columns are data.
    """
    dtype = str(column.dtype)
    is_integer = "Int" in dtype or dtype == "Bool"
    if not column.size or (not is_integer and column.size > _MAX_MASK_SIZE):
        return {}
    array = (column.astype(ms.float32) if dtype == "BFloat16" else column).asnumpy()
    rows = array.reshape(len(array), -1)
    amounts: dict[Hashable, np.ndarray] = {}
    if is_integer:
        for value in {int(rows.min()), int(rows.max())}:
            if (number, value) not in excluded:
                amounts[number, value] = np.count_nonzero(rows != value, axis=1)
    else:
        if (number, 0) not in excluded:
            amounts[number, 0] = np.count_nonzero(rows, axis=1)
        if (number, "sum") not in excluded:
            amounts[number, "sum"] = np.abs(rows).sum(1, dtype=np.float64)
    return {reason: amount for reason, amount in amounts.items() if (amount != amount[0]).any()}


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
        has_16_bits = any(loss.dtype in (ms.float16, ms.bfloat16) for loss in losses)
        return _TOLERANCE_16_BITS if has_16_bits else _TOLERANCE, numbers
    return 0.0, []


# Parts of a micro-batch


def part(micro_batch: tuple, start: int | None, stop: int | None) -> tuple:
    """Return some rows of a micro-batch. A column that numbers the rows, as contrastive losses need, numbers these."""
    return tuple(
        _numbered_again(column[start:stop]) if numbers_rows(column) else column[start:stop] for column in micro_batch
    )


def numbers_rows(column: Tensor) -> bool:
    """Return whether a column is a permutation of the row numbers."""
    return has_class_numbers(column) and bool((np.sort(column.asnumpy()) == np.arange(column.size)).all())


def has_class_numbers(column: Tensor) -> bool:
    """Return whether a column has one integer for each row."""
    return column.ndim == 1 and "Int" in str(column.dtype)


def _numbered_again(column: Tensor) -> Tensor:
    return Tensor(column.asnumpy().argsort().argsort(), column.dtype)
