"""How do batches come out of a dataset?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from mindspore import Tensor


@dataclass
class Position:
    """Where a run is in its data."""

    first: int | None = None
    """What the dataset calls the run's first epoch, if it numbers them."""
    epoch: int = 1
    """The epoch, from 1."""
    batches: int = 0
    """How many of its batches are done."""
    rows: int = 0
    """How many rows of it are."""
    step: int = 0
    """How many of its windows have ended."""
    windows: int = 0
    """How many of the run's windows have ended."""

    def next_epoch(self) -> None:
        """Go to the beginning of the next one."""
        self.epoch, self.batches, self.rows, self.step = self.epoch + 1, 0, 0, 0

    def in_batches_of(self, dataset: Any) -> Position:
        """Return the same place, as far as whole batches go, for batches of another size."""
        size = dataset.get_batch_size() if hasattr(dataset, "get_batch_size") else None
        return replace(self, batches=len(range(size, self.rows + 1, size))) if size else self


def start_of(dataset: Any) -> Position:
    """Return where a run begins."""
    return Position(getattr(getattr(dataset, "source", None), "epoch", None))


def _as_tensors(batch: Any) -> tuple:
    columns = batch if isinstance(batch, (tuple, list)) else (batch,)
    return tuple(column if isinstance(column, Tensor) else Tensor(column) for column in columns)


def epochs_of(dataset: Any, epochs: int, at: Position | None = None) -> Iterator[Iterable[tuple]]:
    """Yield, for each epoch that is left, an iterable over the batches that are left, as tuples of Tensors.

    A MindSpore dataset gets one iterator for all epochs: with a new one for each, its shuffle would start from the same
    seed every time and repeat one order. One that can't be told with which epoch to begin is read up to there.
    """
    at = Position() if at is None else at
    done, skip = at.epoch - 1, at.batches
    if skip and skip == batches_per_epoch(dataset):
        yield ()
        done, skip = done + 1, 0
    if at.first is not None:
        dataset.source.epoch = at.first + done
        epochs, done = epochs - done, 0
    if not hasattr(dataset, "create_tuple_iterator"):
        for _ in range(done, epochs):
            yield islice(map(_as_tensors, dataset), skip, None)
            skip = 0
        return
    iterator = dataset.create_tuple_iterator(num_epochs=epochs)
    for _ in range(done):
        deque(iterator, maxlen=0)
    for _ in range(done, epochs):
        yield islice(iterator, skip, None)
        skip = 0


def batches_per_epoch(dataset: Any) -> int | None:
    """Return how many batches an epoch has, or None where the dataset does not know."""
    if hasattr(dataset, "get_dataset_size"):
        return dataset.get_dataset_size()
    return len(dataset) if hasattr(dataset, "__len__") else None
