"""The order of the batches.

The order is a pure function of (seed, epoch). The epoch can't be counted where batches are made: an iterator reads
ahead, by default without end, and how far depends on timing. So a batch is addressed by one running number, epoch *
batches + batch. The numbers come from a sampler, which MindSpore copies for each iterator: the copy counts the epochs
of that iterator.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from .._check import check_int
from .augment import Moves, draw_moves, move
from .images import Split

_SAMPLE = 512


@dataclasses.dataclass(frozen=True)
class Order:
    """The rows that a pass over the data visits, and their order.

    Attributes:
        rows: Number of rows of the split, over all shards.
        seed: Seed of the permutations, or None for the rows' own order.
        num_shards: Number of shards of the rows.
        shard_id: The shard to take.
    """

    rows: int
    seed: int | None
    num_shards: int = 1
    shard_id: int = 0

    def __len__(self) -> int:
        return len(range(self.shard_id, self.rows, self.num_shards))

    def of(self, number: int) -> np.ndarray:
        """Return the rows of pass `number`; all shards together contain each row exactly once."""
        rows = np.arange(self.rows)
        if self.seed is not None:
            rows = np.random.default_rng([self.seed, number]).permutation(self.rows)
        return rows[self.shard_id :: self.num_shards]


class Batches:
    """Batches by their running numbers, the source of a `GeneratorDataset`.

    Args:
        split (Split): The images and labels.
        order (Order): The order of the rows.
        batch_size (int): Rows per batch. Default: ``32``.
        repeat_size (int): Passes per epoch. Default: ``1``.
        drop_remainder (bool): Whether a last, shorter batch is left out. Default: ``False``.
        moves_seed (int): Seed of random crops and mirrorings. Default: ``None``, images as they are.
    """

    def __init__(
        self,
        split: Split,
        order: Order,
        *,
        batch_size: int = 32,
        repeat_size: int = 1,
        drop_remainder: bool = False,
        moves_seed: int | None = None,
    ) -> None:
        # The channel axis is added here: on a batch, np.newaxis leaves a stride of 0, with which MindSpore copies
        # element by element (0.27 ms per batch instead of 0.06).
        self._split, self._images, self._labels = split, split.with_channels(), split.labels
        self._normalize, self._moves_seed = split.normalizer(), moves_seed
        self._order, self._batch_size, self._repeat_size = order, batch_size, repeat_size
        self._drop_remainder, self._per_pass = drop_remainder, _batches_of(order, batch_size, drop_remainder)
        self._epoch = 0
        # A permutation of 60,000 rows takes longer than a batch: the last one is kept.
        self._pass = self._pass_of(0)

    @property
    def rows(self) -> int:
        """The number of rows of the split."""
        return self._order.rows

    @property
    def fingerprint(self) -> str:
        """A fingerprint of the data: a hash of all labels and of a sample of the images."""
        digest = hashlib.sha256(np.ascontiguousarray(self._labels).tobytes())
        digest.update(np.ascontiguousarray(self._images[:: max(1, self.rows // _SAMPLE)]).tobytes())
        return digest.hexdigest()[:16]

    @property
    def facts(self) -> dict[str, Any]:
        """The facts about the data that are recorded with a model, in types that JSON supports."""
        split, (channels, side) = self._split, self._images.shape[1:3]
        facts = {"rows": self.rows, "data": self.fingerprint, "image_size": side, "channels": channels}
        scale = {name: np.array(getattr(split, name)).tolist() for name in ("mean", "std")}
        return {**facts, **scale, "classes": split.classes}

    @property
    def next_epoch(self) -> int:
        """The epoch with which the next iterator begins."""
        return self._epoch

    def begin_with_epoch(self, number: int) -> None:
        """Make the next iterator begin with this epoch."""
        self._epoch = check_int("create_dataset", "epoch", number, low=0)

    def __len__(self) -> int:
        return self._per_pass * self._repeat_size

    def __getitem__(self, number: Any) -> tuple[np.ndarray, np.ndarray]:
        """Return the images and the labels of batch `number % len` of epoch `number // len`."""
        pass_number, batch = divmod(int(number), self._per_pass)
        current, rows, moves = self._pass
        if current != pass_number:
            # A single assignment, because threads of two iterators may be here at the same time.
            self._pass = _, rows, moves = self._pass_of(pass_number)
        rows = rows[self._begin(batch) : self._begin(batch + 1)]
        images = self._images[rows]
        if moves is not None:
            images = move(images, moves.of(rows))
        return self._normalize(images), self._labels[rows]

    def _begin(self, batch: int) -> int:
        """Return the first row of a batch in a pass."""
        begin = batch * self._batch_size
        if self._drop_remainder:
            return begin
        # Each later batch gets at least one row, and the last one the rest: another shard may have one row more.
        rest = self._per_pass - batch
        return min(begin, len(self._order) - rest) if rest else len(self._order)

    def _pass_of(self, number: int) -> tuple[int, np.ndarray, Moves | None]:
        """Return a pass's number, the order of its rows, and how each row of the split is moved in it."""
        seed = self._moves_seed
        return number, self._order.of(number), None if seed is None else draw_moves(self.rows, seed, number)


def _batches_of(order: Order, batch_size: int, drop_remainder: bool) -> int:
    """Return the number of batches in a pass; it is equal for all shards, or some would wait for others forever."""
    if drop_remainder:
        return len(range(order.num_shards - 1, order.rows, order.num_shards)) // batch_size
    largest = len(range(0, order.rows, order.num_shards))
    return min((largest + batch_size - 1) // batch_size, order.rows // order.num_shards)


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
