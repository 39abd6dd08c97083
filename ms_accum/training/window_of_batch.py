"""Runs windows with a `CoupledLoss`, in three passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor

from .. import _check
from ..engine.coupled import LossOfBatch, LossOfRepresentations, Represent
from ..network.parameters import as_array, copied, copies_of, restore
from ..ranks.group import Group, gather_rows, is_first


class _LossOfWindow:
    """The loss of a window that has not been run yet; every micro-batch has this one."""

    value: Tensor | None = None

    def asnumpy(self) -> np.ndarray:
        """Return its value, after the window has ended."""
        if self.value is None:
            raise RuntimeError("For 'CoupledLoss', the window has not been run yet.")
        return self.value.asnumpy()


class Coupled:
    """Runs windows with a `CoupledLoss`: collects a window, and runs it at its end in three passes.

    The third pass is run by what runs other windows, which sums gradients without weights.

    Args:
        loss_of_batch (LossOfBatch): the network and the loss.
        runner (Runner): gets the micro-batches of the third pass, for `SumOfProducts`.
        trained (Sequence[Parameter]): the parameters of the optimizer.
        loss_parameters (Sequence[Parameter]): those of them that belong to the loss.
        group (Optional[Group]): the ranks; one loss is computed from all their representations.
        compiles (bool): whether the passes are compiled in PyNative mode.
    """

    def __init__(
        self,
        loss_of_batch: LossOfBatch,
        runner: Any,
        trained: Sequence[Parameter],
        loss_parameters: Sequence[Parameter],
        group: Group | None,
        compiles: bool,
    ):
        self._loss_of_batch, self._runner, self._trained, self._group = loss_of_batch, runner, trained, group
        self._loss_parameters = list(loss_parameters)
        self._compiles = compiles
        self._represent = Represent(loss_of_batch, compiles)
        self._second_pass: LossOfRepresentations | None = None
        self._collected: list[tuple] = []
        self._loss = _LossOfWindow()

    def add(self, micro_batch: tuple, weight: Tensor | None, last: bool) -> _LossOfWindow:
        """Collect a copy of a micro-batch, and return the window's loss, to be read after the window has ended."""
        del weight, last
        self._collected.append(tuple(copied(column) for column in micro_batch))
        return self._loss

    def pass_over(self) -> None:
        """Skip a micro-batch of weight 0, which does not occur here."""

    @property
    def accumulators(self) -> dict[str, Parameter]:
        """The accumulators, which do not contain the open window."""
        return self._runner.accumulators

    def clear(self) -> None:
        """Discard the window."""
        self._collected = []
        self._loss = _LossOfWindow()
        self._runner.clear()

    def end(self, scalars: Callable[[], Tensor] | None) -> tuple:
        """Run the window, and do what the end of a window without weights does."""
        self._run()
        return self._runner.end(scalars)

    def _run(self) -> None:
        """Run the window's three passes."""
        collected, self._collected = self._collected, []
        loss, self._loss = self._loss, _LossOfWindow()
        # Counters of random layers, and BatchNorm's statistics: the third pass must repeat the first, and keep them.
        copies = copies_of(self._loss_of_batch.network.get_parameters(), self._trained)
        representations = [self._first_pass(micro_batch) for micro_batch in collected]
        restore(copies)
        loss.value, gradients_by_micro_batch = self._cached(representations, collected)
        for micro_batch, gradients in zip(collected, gradients_by_micro_batch):
            self._runner.add((*micro_batch[: self._loss_of_batch.columns], *gradients), None)

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
