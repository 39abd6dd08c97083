"""How do batches come out of a dataset?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice, repeat
from typing import Any, Callable, NoReturn

import mindspore as ms
import numpy as np
from mindspore import Tensor

from . import _check
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
    held: int = 0
    """How many micro-batches of a window the run began with."""
    random: dict[str, Any] | None = None
    """How the random number generators began the epoch."""

    @property
    def begun(self) -> int:
        """int, how many epochs have begun."""
        return self.epoch if self.batches else self.epoch - 1

    def next_epoch(self) -> None:
        """Go to the beginning of the next one.

        Raises:
            ValueError: If this one had no batches.
        """
        if not self.batches:
            _refuse("batches in every epoch", f"none in epoch {self.epoch}")
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
    source: Any = getattr(dataset, "source", None)
    first = source.next_epoch if hasattr(source, "begin_with_epoch") else None
    return Position(first, size=size, total=batches_per_epoch(dataset), ranks=ranks)


class _Columns:
    """Makes each batch a tuple of Tensors; those of dicts are in the order in which the first has them."""

    def __init__(self) -> None:
        self._names: tuple | None = None

    def __call__(self, batch: Any) -> tuple:
        if isinstance(batch, Mapping):
            self._names = self._names or tuple(batch)
            if set(batch) != set(self._names):
                _refuse(f"dicts with the keys {', '.join(map(repr, self._names))}", f"one with {sorted(batch)}")
            batch = tuple(batch[name] for name in self._names)
        columns = batch if isinstance(batch, (tuple, list)) else (batch,)
        return tuple(map(_as_tensor, columns))


def _as_tensor(column: Any) -> Tensor:
    if not isinstance(column, Tensor):
        array = np.asarray(column)
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            _refuse("batches of numbers", f"a column of {type(column).__name__}, {array.dtype}")
        column = Tensor(column)
    if column.dtype == ms.string:
        _refuse("batches of numbers", "a column of strings")
    if not column.ndim:
        _refuse("columns with a row a sample", "a column that is one number")
    return column


def _refuse(rule: str, value: str) -> NoReturn:
    _check.refuse(ValueError, "train_process", "train_dataset", f"one that yields {rule}", value)


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
        dataset.source.begin_with_epoch(at.first + done)
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
    columns = _Columns()
    if hasattr(dataset, "create_tuple_iterator"):
        iterator = dataset.create_tuple_iterator(num_epochs=epochs)
        yield from repeat(lambda: map(columns, iterator), epochs)
    else:
        yield from repeat(lambda: map(columns, dataset), epochs)


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
        return None if _has_to_be_read(dataset) else dataset.get_dataset_size()
    return len(dataset) if hasattr(dataset, "__len__") else None


def _has_to_be_read(dataset: Any) -> bool:
    """Return whether MindSpore would count by reading: a generator, which may be there once."""
    return getattr(dataset, "source_len", 0) == -1 or any(map(_has_to_be_read, getattr(dataset, "children", ())))
