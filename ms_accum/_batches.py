"""How do batches come out of a dataset?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any, Callable

from mindspore import Tensor

from ._random import random_state, set_random_state


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
    size: int | None = None
    """How many rows a batch has, if the dataset says so."""
    total: int | None = None
    """How many batches an epoch has, if the dataset says so."""
    ranks: int = 1
    """How many processes take a batch each."""
    random: dict[str, Any] | None = None
    """How the random number generators began the epoch."""

    def next_epoch(self) -> None:
        """Go to the beginning of the next one."""
        self.epoch, self.batches, self.rows, self.step = self.epoch + 1, 0, 0, 0

    def in_batches_of(self, dataset: Any, ranks: int = 1) -> Position:
        """Return the same place, as far as whole batches go, where batches, or ranks, are others."""
        now = start_of(dataset, ranks)
        if not (now.size and now.total and self.size and self.total):
            if now.ranks != self.ranks:
                raise ValueError(
                    "For 'train_process', 'train_dataset' must say the size of its batches by 'get_batch_size' where "
                    f"{self.ranks} processes stopped and {now.ranks} go on."
                )
            return self
        if (now.size, now.ranks) == (self.size, self.ranks):
            return self
        # The last batch may be short: the epoch is over when it is done.
        over = self.batches == self.total
        whole, done = now.size * ranks, self.rows * self.ranks
        batches = now.total if over else len(range(whole, done + 1, whole))
        return replace(self, batches=batches, rows=batches * now.size, size=now.size, total=now.total, ranks=ranks)


def start_of(dataset: Any, ranks: int = 1) -> Position:
    """Return where a run begins."""
    size = dataset.get_batch_size() if hasattr(dataset, "get_batch_size") else None
    first = getattr(getattr(dataset, "source", None), "epoch", None)
    return Position(first, size=size, total=batches_per_epoch(dataset), ranks=ranks)


def _as_tensors(batch: Any) -> tuple:
    columns = batch if isinstance(batch, (tuple, list)) else (batch,)
    return tuple(column if isinstance(column, Tensor) else Tensor(column) for column in columns)


def epochs_of(dataset: Any, epochs: int, at: Position | None = None) -> Iterator[Iterable[tuple]]:
    """Yield, for each epoch that is left, an iterable over the batches that are left, as tuples of Tensors.

    A dataset that can't be told with which epoch to begin is read up to there.
    """
    at = Position() if at is None else at
    done, skip = at.epoch - 1, at.batches
    if skip and skip == batches_per_epoch(dataset):
        yield ()
        done, skip = done + 1, 0
    if done >= epochs:
        return
    if at.first is not None:
        dataset.source.epoch = at.first + done
        epochs, done = epochs - done, 0
    passes = _passes(dataset, epochs)
    for _ in range(done):
        deque(next(passes)(), maxlen=0)
    for begin in passes:
        yield _from(begin, skip, at)
        skip = 0


def _passes(dataset: Any, epochs: int) -> Iterator[Callable[[], Iterator[tuple]]]:
    """Yield what begins each epoch.

    A MindSpore dataset gets one iterator for all: with a new one for each, its shuffle would start from the same seed
    every time and repeat one order.
    """
    if hasattr(dataset, "create_tuple_iterator"):
        iterator = dataset.create_tuple_iterator(num_epochs=epochs)
        yield from repeat(lambda: iter(iterator), epochs)
    else:
        yield from repeat(lambda: map(_as_tensors, dataset), epochs)


def _from(begin: Callable[[], Iterator[tuple]], skip: int, at: Position) -> Iterator[tuple]:
    """Begin an epoch, which may draw its order, or begin it as it was begun and go on behind `skip` batches."""
    if not skip:
        at.random = random_state()
        return begin()
    now = random_state()
    if at.random is not None:
        set_random_state(at.random)
    batches = begin()
    deque(islice(batches, skip), maxlen=0)
    set_random_state(now)
    return batches


def batches_per_epoch(dataset: Any) -> int | None:
    """Return how many batches an epoch has, or None where the dataset does not know."""
    if hasattr(dataset, "get_dataset_size"):
        return dataset.get_dataset_size()
    return len(dataset) if hasattr(dataset, "__len__") else None
