"""Checks whether the loss of a micro-batch is the mean of the losses of its parts, weighted by their rows."""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn

from .. import _check
from ..network.compiled import without_report
from ..network.held import changed_by
from ..network.parameters import as_array, copied, restoring
from ..network.runtime import synchronously
from ..network.training_mode import training_mode
from .columns import has_class_numbers
from .known_losses import loss_among

# The rounding error of a row's loss depends on the other rows of its batch.
_TOLERANCE = 1e-4
_TOLERANCE_16_BITS = 1e-2  # for float16 and bfloat16
_ROWS = "rows"
_LARGEST_MASK = 2**14  # elements; larger columns of floats are data
_LARGEST_COPY = 2**26  # bytes of all Parameters that a forward may change, such as statistics, queues, frozen weights
_OF_EVERY_CELL = frozenset(vars(nn.Cell()))


class AdditivityCheck:
    """Warns if rows are not the weight with which the losses of micro-batches add up.

    It runs a micro-batch and two parts of it forward, in evaluation mode, and compares the losses. Only some
    micro-batches can tell: where no label is ignored, every loss seems to divide by the rows. So what may mark ignored
    elements (below 0, 0, 255; in floats 0, and all weights) is looked for in each column until two parts differ in it,
    and only these are run. If all rows of a micro-batch are alike, it is compared with a row of an earlier one.

    Args:
        owner (str): the name used in warnings.
        forward (Cell): returns a micro-batch's loss from its columns.
        weight_of (Callable): returns the weight of a micro-batch: its rows, or what is known of the loss.
    """

    def __init__(self, owner: str, forward: nn.Cell, weight_of: Callable[[tuple], float]):
        self._owner, self._forward, self._weight_of = owner, forward, weight_of
        self._row: tuple = ()  # of an earlier micro-batch
        self._amounts_of_row: dict[Hashable, float] = {}
        self._shapes_differ = False
        self._micro_batches = 0
        self._next: dict[Hashable, float] = {}  # when to compare again, by divisor; infinite once the loss has not this
        self.over = False
        """bool, whether the loss is not a weighted mean, or parts of a micro-batch can't be run."""

    def check(self, micro_batch: tuple, trained: Collection[Any]) -> None:
        """Check a micro-batch, if it can tell something new.

        Args:
            micro_batch (tuple): its columns.
            trained (Collection[Parameter]): Parameters that a forward does not change.
        """
        rows = micro_batch[0].shape[0]
        self._micro_batches += 1
        if not rows or any(column.shape[0] != rows for column in micro_batch):
            return
        amounts: dict[Hashable, np.ndarray] = {}
        for number, column in enumerate(micro_batch):
            amounts |= _amounts_of_rows(number, column, self._is_due)
        half, of_row = rows // 2, self._amounts_of_row
        telling = _telling({name: (each[:half].sum(), each[half:].sum()) for name, each in amounts.items()}, half, rows)
        if half and (telling or self._is_due(_ROWS)):
            halves = tuple(column[:half] for column in micro_batch), tuple(column[half:] for column in micro_batch)
            self._compare(micro_batch, halves, telling, trained)
        elif self._fits(micro_batch):
            both = {name: (of_row[name], each.sum()) for name, each in amounts.items() if name in of_row}
            telling = _telling(both, 1, rows + 1)
            if telling or self._is_due(_ROWS):
                self._compare(_joined(self._row, micro_batch), (self._row, micro_batch), telling, trained)
        if not self._fits(micro_batch):
            self._warn_if_shapes_differ(micro_batch)
            self._row = tuple(copied(column[:1]) for column in micro_batch)  # data sets use their buffers again
            self._amounts_of_row = {divisor: amount[0] for divisor, amount in amounts.items()}

    def _is_due(self, divisor: Hashable) -> bool:
        return self._micro_batches >= self._next.get(divisor, 0)

    def _fits(self, micro_batch: tuple) -> bool:
        """Return whether an earlier row can be joined with this micro-batch."""
        return [column.shape[1:] for column in self._row] == [column.shape[1:] for column in micro_batch]

    def _warn_if_shapes_differ(self, micro_batch: tuple) -> None:
        """Warn once about labels whose rows differ in size: the number of rows may then be the wrong weight."""
        for earlier, column in zip(self._row[1:], micro_batch[1:]):
            first, other = earlier.shape[1:], column.shape[1:]
            if first != other and not self._shapes_differ:
                self._shapes_differ = True
                _check.warn(
                    f"For '{self._owner}', labels of the shapes {('rows', *first)} and {('rows', *other)} are weighted "
                    "by their rows only. If the loss averages over more, give 'weight', the number that it divides by; "
                    "else check='off'."
                )

    def _compare(self, whole: tuple, parts: tuple, amounts: dict, trained: Collection[Any]) -> None:
        """Warn, or settle that the loss does not divide by these amounts."""
        if sum(parameter.nbytes for parameter in changed_by(self._forward, trained)) > _LARGEST_COPY:
            self.over = True  # what the runs change could not be restored
            return
        # The complete micro-batch twice: a loss that is random proves nothing.
        tolerance, losses = _losses(self._forward, (whole, whole, *parts), trained)
        if len(losses) < 4:
            self.over = True
            if losses and any(map(numbers_rows, whole[1:])):
                _check.warn(
                    f"For '{self._owner}', the labels number the rows of a micro-batch, and its parts can't be run. "
                    "A loss that compares the rows of a batch needs CoupledLoss; else give check='off'."
                )
            return
        amounts = {_ROWS: (1, 0), **amounts}
        self._next |= dict.fromkeys(amounts, 2 * self._micro_batches)
        loss, again, *of_parts = losses
        if not np.isfinite(loss) or loss != again:
            return
        rows, weights = [columns[0].shape[0] for columns in (whole, *parts)], [self._weight_of(part) for part in parts]
        allowed = tolerance * max(abs(each) for each in losses if np.isfinite(each))
        expected = sum(weight * each for weight, each in zip(weights, of_parts) if weight) / (sum(weights) or math.nan)
        if not (np.isfinite(expected) and abs(loss - expected) <= allowed):  # NaN: all labels of a part are ignored
            self.over = True
            if abs(loss - sum(of_parts)) <= allowed:
                _check.warn(
                    f"For '{self._owner}', the loss of a micro-batch of {rows[0]} rows, {loss:.6g}, is the sum of its "
                    f"parts, {of_parts[0]:.6g} and {of_parts[1]:.6g}, not their mean: give reduction='sum', or a loss "
                    "that is a mean; or check='off'."
                )
                return
            _check.warn(
                f"For '{self._owner}', the loss of a micro-batch of {rows[0]} rows is {loss:.6g}, but the mean of its "
                f"parts, {of_parts[0]:.6g} for {_check.quantity(rows[1], 'row')} and {of_parts[1]:.6g} for "
                f"{rows[2]}, weighted by rows is {expected:.6g}: windows of uneven micro-batches are not exact. "
                "Give 'weight', what the loss divides by, a dict for several terms; or check='off'. A loss that "
                "compares the rows of a batch needs CoupledLoss.",
            )
            return
        for divisor, amount in amounts.items():
            if abs(np.average(of_parts, weights=amount) - loss) > allowed:  # else all weights give this loss
                self._next[divisor] = math.inf


def _amounts_of_rows(number: int, column: Tensor, is_due: Callable[[Hashable], bool]) -> dict[Hashable, np.ndarray]:
    """Return what each row counts for if the loss divides by something else, by column and divisor."""
    is_integer = "Int" in str(column.dtype) or column.dtype == ms.bool_
    if is_integer:
        is_data = number == 0 and column.ndim > 2  # images; tokens may be padding
    else:
        is_data = number == 0 or column.size > _LARGEST_MASK
    if is_data or not column.size:
        return {}
    rows = as_array(column).reshape(column.shape[0], -1)
    divisors: dict[str, Callable[[], np.ndarray]] = {"other than 0": lambda: _count(rows != 0)}
    if is_integer:
        divisors["0 or more"] = lambda: _count(rows >= 0)
        divisors["other than 255"] = lambda: _count(rows != 255)
    else:
        divisors["sum"] = lambda: np.abs(rows).sum(1, dtype=np.float64)
    return {(number, name): compute() for name, compute in divisors.items() if is_due((number, name))}


def _count(elements: np.ndarray) -> np.ndarray:
    """Return how many elements of each row are true; quickly if all are."""
    return elements.sum(1) if np.count_nonzero(elements) < elements.size else np.full(len(elements), elements.shape[1])


def _telling(amounts: dict[Hashable, tuple], first: int, rows: int) -> dict[Hashable, tuple]:
    """Return the amounts of two parts of rows, of which one has the `first`, that are not those of their rows."""
    return {name: parts for name, parts in amounts.items() if parts[0] * (rows - first) != parts[1] * first}


def _losses(forward: nn.Cell, micro_batches: tuple, trained: Collection[Any]) -> tuple[float, list[float]]:
    """Return the tolerance, and the losses of the micro-batches up to the first that can't be run."""
    tolerance, losses = _TOLERANCE, []
    for mode in (ms.PYNATIVE_MODE, ms.GRAPH_MODE):  # which may have no kernel, or accept one number of rows only
        with trying(forward, trained, mode), suppress(Exception), without_report():
            for micro_batch in micro_batches:
                loss = loss_among(forward(*micro_batch))
                losses.append(float(loss.astype(ms.float32).asnumpy()))
                if loss.dtype in (ms.float16, ms.bfloat16):
                    tolerance = _TOLERANCE_16_BITS
        if losses:
            break
    return tolerance, losses


@contextmanager
def trying(network: nn.Cell, trained: Collection[Any], mode: int, *, training: bool = False) -> Iterator[None]:
    """Run forward passes inside the block, in evaluation mode; then restore what they change and count in Python.

    Args:
        network (Cell): what runs.
        trained (Collection[Parameter]): Parameters that a forward does not change.
        mode (int): MindSpore's mode.
        training (bool): whether they run in training mode instead. Default: ``False``.
    """
    mode_before, generator = ms.get_context("mode"), ms.get_rng_state()
    numbers = [(vars(cell), _numbers_in(vars(cell))) for _, cell in network.cells_and_names()]
    ms.set_context(mode=mode)
    try:
        with restoring(changed_by(network, trained)), training_mode(network, training), synchronously():
            yield
    finally:
        for attributes, values in numbers:
            attributes.update(values)
        ms.set_rng_state(generator)
        ms.set_context(mode=mode_before)


def _numbers_in(attributes: dict[str, Any]) -> dict[str, float]:
    """Return the user's numbers among the attributes of a Cell."""
    return {n: value for n, value in attributes.items() if type(value) in (int, float) and n not in _OF_EVERY_CELL}


def _joined(first: tuple, second: tuple) -> tuple:
    """Return the rows of two micro-batches as one."""
    return tuple(Tensor(np.concatenate([as_array(a), as_array(b)]), b.dtype) for a, b in zip(first, second))


def numbers_rows(column: Tensor) -> bool:
    """Return whether a column is a permutation of the row numbers."""
    return has_class_numbers(column) and bool((np.sort(column.asnumpy()) == np.arange(column.size)).all())
