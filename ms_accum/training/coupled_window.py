"""Windows with a `CoupledLoss`: three passes over their micro-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from .. import _check
from ..engine.coupled import LossOfBatch, LossOfRepresentations, Represent
from ..network.parameters import as_array
from ..ranks.group import Group, gather_rows, is_first
from .shares import Inputs, Shared


class Coupled:
    """The loss of a window with a `CoupledLoss`, and the inputs of its third pass.

    The first pass computes representations, the second the loss and their gradients; the third, which is run like other
    windows, sums products with these gradients.

    Args:
        loss_of_batch (LossOfBatch): the network and the loss.
        loss_parameters (Sequence[Parameter]): trained parameters that belong to the loss.
        group (Optional[Group]): the ranks; one loss is computed from all their representations.
        compiles (bool): whether the passes are compiled in PyNative mode.
        undo (Callable): puts back what forwards have changed: the third pass must repeat the first.
    """

    runs_again = False

    def __init__(
        self,
        loss_of_batch: LossOfBatch,
        loss_parameters: Sequence[Parameter],
        group: Group | None,
        compiles: bool,
        undo: Callable[[], Any],
    ):
        self._loss_of_batch, self._group, self._compiles, self._undo = loss_of_batch, group, compiles, undo
        self._loss_parameters = list(loss_parameters)
        self._represent = Represent(loss_of_batch, compiles)
        self._second_pass: LossOfRepresentations | None = None
        self._loss = math.nan

    def updates(self, window: Shared) -> bool:
        """Return whether the window can update."""
        return bool(window.number)

    def inputs(self, window: Shared) -> list[Inputs]:
        """Run the first two passes; return for each micro-batch the inputs of the third."""
        collected = [part.columns for part in window.parts]
        representations = [self._first_pass(micro_batch) for micro_batch in collected]
        self._undo()
        loss, gradients_by_micro_batch = self._cached(representations, collected)
        self._loss = float(loss.asnumpy())
        size = self._loss_of_batch.columns
        return [(None, (*columns[:size], *each)) for columns, each in zip(collected, gradients_by_micro_batch)]

    def sums(self, window: Shared, losses: Any) -> tuple[np.ndarray, list[int]]:
        """Return the loss, from one rank only, and the micro-batches: they are bad together."""
        del losses
        bad = [] if math.isfinite(self._loss) else [part.number for part in window.parts]
        return np.array([self._loss if is_first(self._group) else 0.0]), bad

    def loss(self, sums: np.ndarray, window: Shared) -> float:
        """Return the window's loss."""
        del window
        return float(sums[0])

    def terms(self, sums: np.ndarray, window: Shared) -> dict[str, float]:
        """Return the means of the loss's terms: it is one."""
        del sums, window
        return {}

    def _first_pass(self, micro_batch: tuple) -> list[np.ndarray]:
        """Run the first pass of a micro-batch."""
        output = self._represent(*micro_batch[: self._loss_of_batch.columns])
        arrays = [tensor.asnumpy() for tensor in (output if isinstance(output, (tuple, list)) else [output])]
        if not all(array.ndim for array in arrays):
            remedy = "Make trained numbers parameters of a Cell that is the 'loss_fn'."
            rule = "one that returns representations with one row per sample, for a CoupledLoss"
            _check.raise_invalid(ValueError, "GradientAccumulation", "network", rule, "a single number", remedy)
        return arrays

    def _cached(self, representations: list, collected: list) -> tuple[Tensor, Iterator[list[Tensor]]]:
        """Run the second pass; return the loss, and for each micro-batch the gradients for the third pass."""
        gathered = [gather_rows(np.concatenate(parts), self._group) for parts in zip(*representations)]
        label_columns = zip(*[micro_batch[self._loss_of_batch.columns :] for micro_batch in collected])
        columns = [_joined(parts, self._group) for parts in label_columns]
        if self._second_pass is None:
            number, loss_parameters = len(gathered), self._loss_parameters
            self._second_pass = LossOfRepresentations(self._loss_of_batch, number, loss_parameters, self._compiles)
        loss, *gradients = _flat(self._second_pass(*[Tensor(rows) for rows, _ in gathered], *columns))
        of_rows, of_loss = gradients[: len(gathered)], gradients[len(gathered) :]
        row_gradients = [
            _cut(gradient.asnumpy()[first:], [len(part) for part in parts])
            for gradient, (_, first), parts in zip(of_rows, gathered, zip(*representations))
        ]
        loss_gradients = [self._counted_once(gradient, len(collected)) for gradient in of_loss]
        return loss, map(list, zip(*row_gradients, *loss_gradients))

    def _counted_once(self, gradient: Tensor, count: int) -> list[Tensor]:
        """Return the gradient for the first micro-batch of rank 0, and zeros for all others: it must count once."""
        array = gradient.asnumpy().astype(np.float32)
        zeros = Tensor(np.zeros_like(array))
        return [Tensor(array) if is_first(self._group) else zeros, *[zeros] * (count - 1)]


def _joined(parts: Sequence[Tensor], group: Group | None) -> Tensor:
    """Return a column of the window, and of all ranks."""
    rows = np.concatenate([as_array(part) for part in parts])
    return Tensor(gather_rows(rows, group)[0], parts[0].dtype)


def _cut(rows: np.ndarray, counts: Sequence[int]) -> list[Tensor]:
    """Cut rows into tensors of these numbers of rows; more rows may follow."""
    ends = np.cumsum(counts).tolist()
    return [Tensor(rows[end - count : end].astype(np.float32)) for end, count in zip(ends, counts)]


def _flat(results: Any) -> list[Tensor]:
    """Return the tensors of nested tuples."""
    if isinstance(results, ms.Tensor):
        return [results]
    return [tensor for result in results for tensor in _flat(result)]
