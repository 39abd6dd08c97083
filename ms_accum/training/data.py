"""How are batches read from a dataset?"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice, repeat
from typing import Any, Callable, NoReturn

import mindspore as ms
import numpy as np
from mindspore import Tensor

from .. import _check
from ..network.generators import random_state, set_random_state
from ..ranks.group import Group, broadcast_number
from ..saving.training_state import Position as Position

ONCE_ONLY = "A generator can be read once only: give a list, or an object whose '__iter__' starts anew."


def check_had_batches(at: Position, over: bool) -> None:
    """Raise a ValueError if the epoch of a position is over and had no batches."""
    if over and not at.batches:
        _raise_not_yielding(_check.TRAIN, "batches in every epoch", f"none in epoch {at.epoch}", ONCE_ONLY)


class Data:
    """The dataset of a run.

    Args:
        dataset (Union[Dataset, Iterable]): yields batches.
        ranks (int): the number of processes that read one batch each. Default: 1.
        argument (Argument): the name of the dataset in messages. Default: the `train_dataset` of `train_process`.
    """

    def __init__(self, dataset: Any, ranks: int = 1, argument: _check.Argument = _check.TRAIN):
        if not any(hasattr(dataset, name) for name in ("create_tuple_iterator", "__iter__", "__getitem__")):
            rule = "a dataset, or an iterable of batches"
            argument.raise_invalid(TypeError, rule, type(dataset).__name__)
        self.dataset, self._ranks, self._argument = dataset, ranks, argument
        """Union[Dataset, Iterable], what was given."""

    @property
    def batches(self) -> int | None:
        """Optional[int], the number of batches in an epoch; None if it is unknown."""
        if hasattr(self.dataset, "get_dataset_size"):
            return None if _has_to_be_read(self.dataset) else self.dataset.get_dataset_size()
        return len(self.dataset) if hasattr(self.dataset, "__len__") else None

    @property
    def may_reuse_memory(self) -> bool:
        """bool, whether what it yields may change when it yields the next, as with loaders of the user's."""
        return not (isinstance(self.dataset, (list, tuple)) or hasattr(self.dataset, "create_tuple_iterator"))

    def start(self) -> Position:
        """Return the position at the start of a run."""
        size = self.dataset.get_batch_size() if hasattr(self.dataset, "get_batch_size") else None
        source: Any = getattr(self.dataset, "source", None)
        first = source.next_epoch if hasattr(source, "begin_with_epoch") else None
        return Position(first, size=size, total=self.batches, ranks=self._ranks)

    def differences(self, at: Position, group: Group | None) -> dict[str, str]:
        """Return how the batches differ from those of a run that was at this position, as far as both are known.

        As `saving.checkpointer.changes`: a text by name.
        """
        now = self.start()
        numbers = {"batch_size": (at.size, now.size), "batches": (at.total, now.total)}
        texts: dict[str, str] = {}
        for name, (before, number) in numbers.items():
            number = broadcast_number(-1 if number is None else number, group)  # the state is that of rank 0
            if before is not None and number not in (-1, before):
                texts[name] = f"{name} was {before} and is {number}"
        return texts

    def convert(self, at: Position) -> Position:
        """Convert a position to this batch size and number of ranks, rounded down to complete batches."""
        now = self.start()
        if not (now.size and now.total and at.size and at.total):
            if now.ranks != at.ranks:
                raise ValueError(
                    "For 'train_process', 'train_dataset' must provide the size of its batches with 'get_batch_size', "
                    f"because {_check.quantity(at.ranks, 'process')} stopped and {now.ranks} resume."
                )
            return at
        if (now.size, now.ranks) != (at.size, at.ranks):
            # The last batch, which ends the epoch, may be short.
            epoch_is_over = at.batches == at.total
            step_rows, rows_done = now.size * now.ranks, at.rows * at.ranks
            batches = now.total if epoch_is_over else len(range(step_rows, rows_done + 1, step_rows))
            sizes: Any = {"size": now.size, "total": now.total, "ranks": now.ranks}
            at = replace(at, batches=batches, rows=batches * now.size, **sizes)
        if at.batches > now.total:
            got = f"{now.total}, of which the run that is resumed has finished {at.batches}"
            raise ValueError(f"For 'train_process', 'train_dataset' must have more batches, but got {got}.")
        return at

    def epochs(self, epochs: int, at: Position | None = None) -> Iterator[Iterable[tuple]]:
        """Yield, for each remaining epoch, an iterable over its remaining batches, as tuples of Tensors.

        If the dataset can't start at a given epoch, the epochs before it are read and discarded.
        """
        at = Position() if at is None else at
        done, skip = at.epoch - 1, at.batches
        if skip and skip == self.batches:
            yield ()
            done, skip = done + 1, 0
        if done >= epochs:
            return
        source: Any = getattr(self.dataset, "source", None)
        first = at.first if hasattr(source, "begin_with_epoch") else None
        if first is not None:
            source.begin_with_epoch(first + done)
            epochs, done, first = epochs - done, 0, first + done
        passes = _passes(self.dataset, epochs, _Columns(self._argument))
        for _ in range(done):
            with restoring_generators():
                deque(next(passes)(), maxlen=0)
        for number, begin in enumerate(passes):
            if first is not None and self.dataset is source:  # an evaluation may have read it in between
                source.begin_with_epoch(first + number)
            yield self._within_length(self._start_epoch(begin, skip, at), skip)
            skip = 0

    def _within_length(self, batches: Iterator[tuple], read: int) -> Iterator[tuple]:
        """Yield the batches; raise an error if there are more than the length: a resumed run would not read them."""
        most = self.batches
        for number, batch in enumerate(batches, read + 1):
            if most is not None and number > most:
                remedy = "Return the right '__len__', or have none."
                _raise_not_yielding(self._argument, f"{most} batches, its length", "one that yields more", remedy)
            yield batch

    def _start_epoch(self, begin: Callable[[], Iterator[tuple]], skip: int, at: Position) -> Iterator[tuple]:
        """Start an epoch, which may draw a random order; if batches are skipped, start it in the saved order."""
        if not skip:
            at.random = random_state()
            return begin()
        state = random_state()
        if at.random is not None:
            set_random_state(at.random)
        batches = begin()
        rows = sum(batch[0].shape[0] for batch in islice(batches, skip))
        set_random_state(state)
        if self._ranks == 1 and rows != at.rows:  # the rows of others are not known
            had = f"{_check.quantity(skip, 'batch')} of {_check.quantity(at.rows, 'row')}"
            rule = f"the one of the run that is resumed, which had finished {had}"
            self._argument.raise_invalid(ValueError, rule, f"another: these have {_check.quantity(rows, 'row')}")
        return batches


class _Columns:
    """Converts each batch to a tuple of Tensors; dicts in the key order of the first batch."""

    def __init__(self, argument: _check.Argument) -> None:
        self._argument = argument
        self._names: tuple | None = None

    def __call__(self, batch: Any) -> tuple:
        if isinstance(batch, Mapping):
            self._names = self._names or tuple(batch)
            if set(batch) != set(self._names):
                keys = ", ".join(map(repr, self._names))
                _raise_not_yielding(self._argument, f"dicts with the keys {keys}", f"one with {sorted(batch)}")
            batch = tuple(batch[name] for name in self._names)
        columns = batch if isinstance(batch, (tuple, list)) else (batch,)
        return tuple(_as_tensor(column, self._argument) for column in columns)


def _as_tensor(column: Any, argument: _check.Argument) -> Tensor:
    if not isinstance(column, Tensor):
        array = _as_array(column)
        if array is None:
            _raise_not_yielding(argument, "batches of numbers", "a column of rows that differ in size")
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            _raise_not_yielding(argument, "batches of numbers", f"a column of {type(column).__name__}, {array.dtype}")
        column = Tensor(column if array.dtype.isnative else array.astype(array.dtype.newbyteorder("=")))
    if column.dtype == ms.string:
        _raise_not_yielding(argument, "batches of numbers", "a column of strings")
    if not column.ndim:
        _raise_not_yielding(
            argument, "columns with one row per sample", "a column that is one number", "Batch the dataset."
        )
    return column


def _as_array(column: Any) -> np.ndarray | None:
    """Return a column as an array; None if its rows differ in size."""
    try:
        return np.asarray(column)
    except ValueError:
        return None


def _raise_not_yielding(argument: _check.Argument, rule: str, value: str, remedy: str = "") -> NoReturn:
    argument.raise_invalid(ValueError, f"one that yields {rule}", value, remedy)


def _passes(dataset: Any, epochs: int, columns: _Columns) -> Iterator[Callable[[], Iterator[tuple]]]:
    """Yield for each epoch a function that starts it.

    A MindSpore dataset gets one iterator for all epochs: a new iterator would shuffle from the same seed, and so repeat
    the same order in every epoch.
    """
    if hasattr(dataset, "create_tuple_iterator"):
        iterator = dataset.create_tuple_iterator(num_epochs=epochs)
        yield from repeat(lambda: map(columns, iterator), epochs)
    else:
        yield from repeat(lambda: map(columns, _in_one_pass(dataset)), epochs)


def _in_one_pass(dataset: Any) -> Iterator[Any]:
    """Return an iterator over the batches of an iterable; without `__iter__`, up to its length.

    Python would index such an object until it raises an IndexError, which one that repeats its batches never does.
    """
    if hasattr(dataset, "__iter__") or not hasattr(dataset, "__len__"):
        return iter(dataset)
    return islice(dataset, len(dataset))


@contextmanager
def restoring_generators() -> Iterator[None]:
    """Restore the random number generators after the block, in which discarded batches may draw a random order."""
    state = random_state()
    yield
    set_random_state(state)


def _has_to_be_read(dataset: Any) -> bool:
    """Return whether MindSpore would have to read the data to count it: a generator may work only once."""
    return getattr(dataset, "source_len", 0) == -1 or any(map(_has_to_be_read, getattr(dataset, "children", ())))
