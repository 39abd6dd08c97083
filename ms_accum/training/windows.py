"""The driver's windows, read from the data: the only place where one of them ends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Callable

from ..network.parameters import copied
from .data import Position
from .sizes import ByWeight, Sizes, is_full, split_batch


class Windows:
    """Reads micro-batches, and yields them window by window. Nothing is read beyond the windows that are run.

    Args:
        sizes (Union[Sizes, ByWeight, None]): the sizes of windows. None: each batch is a window, and is split.
        micro_batch_size (Optional[int]): the rows of a micro-batch of a batch that is split.
        tail (str): ``"flush"``, ``"carry"`` or ``"drop"``.
        updates (Callable): returns the number of updates so far, on which sizes may depend.
        waiting (list): micro-batches of a window that is not complete; a tail that is carried stays there.
        stops (Callable): asked after each micro-batch whether to stop reading.
        copies (bool): whether micro-batches that wait are copied, because the data may reuse their memory.
            Default: ``True``.
    """

    def __init__(
        self,
        sizes: Sizes | ByWeight | None,
        micro_batch_size: int | None,
        tail: str,
        updates: Callable[[], int],
        waiting: list[tuple],
        stops: Callable[[], bool],
        copies: bool = True,
    ):
        self._copies = copies or tail == "carry"  # between two epochs the user's code runs
        self._sizes, self._micro_batch_size, self._tail = sizes, micro_batch_size, tail
        self._updates, self._waiting, self._stops = updates, waiting, stops

    def of_epoch(self, batches: Iterable[tuple], at: Position) -> Iterator[list[tuple]]:
        """Yield the windows of an epoch, and move the position to what has been read."""
        size, amount = None, sum(map(self._amount_of, self._waiting))
        for batch in batches:
            pieces = [batch] if self._micro_batch_size is None else list(split_batch(batch, self._micro_batch_size))
            at.batches += 1
            at.rows += batch[0].shape[0]
            for micro_batch in pieces:
                if size is None:  # asked when a window begins, as it may depend on the updates that were made
                    size = len(pieces) if self._sizes is None else self._sizes.size_after(self._updates())
                amount += self._amount_of(micro_batch)
                full = is_full(amount, size)
                waits = self._copies and not full
                self._waiting.append(tuple(map(copied, micro_batch)) if waits else micro_batch)
                if self._stops():
                    return
                if full:
                    yield self._taken()
                    size, amount = None, 0
        if self._waiting and self._tail == "flush":
            yield self._taken()
        elif self._tail == "drop":
            self._waiting.clear()

    def _amount_of(self, micro_batch: tuple) -> float:
        return 1 if self._sizes is None else self._sizes.amount_of(micro_batch)

    def _taken(self) -> list[tuple]:
        taken = list(self._waiting)
        self._waiting.clear()
        return taken
