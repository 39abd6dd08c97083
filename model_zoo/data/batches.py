"""The order of the batches.

The order is a pure function of (seed, epoch). The epoch can't be counted where batches are made: an iterator reads
ahead, by default without end, and how far depends on timing. So a batch is addressed by one running number, epoch *
batches + batch. The numbers come from a sampler, which MindSpore copies for each iterator: the copy counts the epochs
of that iterator.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import mindspore as ms
import numpy as np
from mindspore.dataset import GeneratorDataset

from .._check import check_bool, check_int


class Rows(Protocol):
    """The rows of a split."""

    def __len__(self) -> int:
        """Return the number of rows."""

    def columns(self, rows: np.ndarray, pass_number: int) -> tuple[np.ndarray, ...]:
        """Return the columns of these rows, as pass `pass_number` over the data has them."""

    @property
    def fingerprint(self) -> str:
        """str, a fingerprint of the data."""


class Batches:
    """Batches by their running numbers, the source of a `GeneratorDataset`.

    Args:
        data (Rows): The rows of a split.
        batch_size (int): Rows per batch. Default: ``32``.
        seed (int): The seed of the order. Default: ``None``, the rows' own order.
        repeat_size (int): Passes per epoch. Default: ``1``.
        num_shards (int): The number of shards. Default: ``1``.
        shard_id (int): The shard to take. Default: ``0``.
        drop_remainder (bool): Whether a last, shorter batch is left out. Default: ``False``.
    """

    def __init__(
        self,
        data: Rows,
        *,
        batch_size: int = 32,
        seed: int | None = None,
        repeat_size: int = 1,
        num_shards: int = 1,
        shard_id: int = 0,
        drop_remainder: bool = False,
    ) -> None:
        self.data = data
        """Rows, the rows of the split."""
        self.rows = len(data)
        """int, the number of rows of the split, over all shards."""
        self.next_epoch = 0
        """int, the epoch with which the next iterator begins."""
        self._batch_size, self._seed, self._repeat_size = batch_size, seed, repeat_size
        self._num_shards, self._shard_id, self._drop_remainder = num_shards, shard_id, drop_remainder
        # Equal for all shards, or some would wait for others forever.
        smallest, largest = self.rows // num_shards, -(-self.rows // num_shards)
        self._per_pass = smallest // batch_size if drop_remainder else min(-(-largest // batch_size), smallest)
        # A permutation of 60,000 rows takes longer than a batch: the last one is kept.
        self._pass = 0, self._rows_of_pass(0)

    @property
    def fingerprint(self) -> str:
        """str, a fingerprint of the data."""
        return self.data.fingerprint

    def begin_with_epoch(self, number: int) -> None:
        """Make the next iterator begin with this epoch."""
        self.next_epoch = check_int("create_dataset", "epoch", number, low=0)

    def __len__(self) -> int:
        return self._per_pass * self._repeat_size

    def __getitem__(self, number: Any) -> tuple[np.ndarray, ...]:
        """Return the columns of batch `number % len` of epoch `number // len`."""
        pass_number, batch = divmod(int(number), self._per_pass)
        current, rows = self._pass
        if current != pass_number:
            # A single assignment, because threads of two iterators may be here at the same time.
            self._pass = _, rows = pass_number, self._rows_of_pass(pass_number)
        return self.data.columns(rows[self._begin(batch, len(rows)) : self._begin(batch + 1, len(rows))], pass_number)

    def _rows_of_pass(self, number: int) -> np.ndarray:
        """Return the rows of the shard in pass `number`; all shards together have each row exactly once."""
        rows = np.arange(self.rows)
        if self._seed is not None:
            rows = np.random.default_rng([self._seed, number]).permutation(self.rows)
        return rows[self._shard_id :: self._num_shards]

    def _begin(self, batch: int, rows: int) -> int:
        """Return the first row of a batch in a pass over the rows of the shard."""
        begin = batch * self._batch_size
        if self._drop_remainder:
            return begin
        # Each later batch gets at least one row, and the last one the rest: another shard may have one row more.
        rest = self._per_pass - batch
        return min(begin, rows - rest) if rest else rows


class Epochs:
    """The numbers of each epoch's batches, the sampler of a `GeneratorDataset`.

    Args:
        source (Batches): The batches; each new iterator reads and increments its `next_epoch`.
    """

    def __init__(self, source: Batches) -> None:
        self._source = source
        self._next: int | None = None

    def __len__(self) -> int:
        return len(self._source)

    def __deepcopy__(self, memo: dict[int, Any]) -> Epochs:
        """Return the sampler of a new iterator; the source is shared."""
        return Epochs(self._source)

    def __iter__(self) -> Iterator[int]:
        """Yield one epoch's numbers."""
        # A generator, so that nothing happens when MindSpore calls `iter` only to find out whether it works.
        if self._next is None:
            self._next = self._source.next_epoch
            self._source.begin_with_epoch(self._next + 1)
        first = self._next * len(self)
        self._next += 1
        yield from range(first, first + len(self))


def batched(
    owner: str,
    data: Rows,
    columns: list[str],
    noun: str,
    *,
    is_training: bool,
    batch_size: int,
    repeat_size: int = 1,
    seed: int | None,
    num_shards: int,
    shard_id: int,
    drop_remainder: bool,
) -> GeneratorDataset:
    """Return the dataset of batches of a split.

    Args:
        owner (str): The name used in error messages.
        data (Rows): The rows of the split.
        columns (list[str]): The names of its columns.
        noun (str): What the rows are.
        is_training (bool): Whether it is the training split.
        seed (int): The seed of the order; None for that of the rows.
        batch_size, repeat_size, num_shards, shard_id, drop_remainder: As for `create_dataset`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, also for a batch that is larger than the data.
    """
    for name, number in {"batch_size": batch_size, "repeat_size": repeat_size, "num_shards": num_shards}.items():
        check_int(owner, name, number, low=1)
    check_int(owner, "shard_id", shard_id, low=0, high=num_shards - 1)
    check_bool(owner, "drop_remainder", drop_remainder)
    in_shard = len(data) // num_shards  # the smallest shard decides, so that all ranks agree
    if in_shard < 1:
        raise ValueError(
            f"For '{owner}', 'num_shards' must be <= {len(data)}, the number of {noun}, but got {num_shards}."
        )
    # A test split is only evaluated: one short batch of all its rows is fine, unless it is dropped.
    if batch_size > in_shard and (is_training or drop_remainder):
        of = " of a shard" if num_shards > 1 else ""
        raise ValueError(
            f"For '{owner}', 'batch_size' must be <= {in_shard}, the number of {noun}{of}, but got "
            f"{batch_size}: a batch larger than the dataset."
        )
    source = Batches(
        data,
        batch_size=batch_size,
        seed=seed,
        repeat_size=repeat_size,
        num_shards=num_shards,
        shard_id=shard_id,
        drop_remainder=drop_remainder,
    )
    batches = GeneratorDataset(source, columns, sampler=Epochs(source), num_parallel_workers=1)
    # For MindSpore each of our batches is one row, so get_batch_size() would return 1.
    batches.copy_batch_size(batch_size)
    return batches


def seed_of(owner: str, seed: int | None) -> int:
    """Return the seed of the order: that of MindSpore if it is None, or 0 if that is not set."""
    return check_int(owner, "seed", ms.get_seed() or 0 if seed is None else seed, low=0)
