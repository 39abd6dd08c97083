"""The sizes of windows, and how many windows there will be. Nothing here imports MindSpore: flags are checked first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Callable

from .. import _check

_ALMOST = 1 - 1e-9  # the sum of ten times 0.1 is less than 1
TAILS = ("flush", "carry", "drop")
_RULE = "an int >= 1, a dict from first updates, beginning with 0, to such ints, or a function of the update"


class Sizes:
    """The sizes of windows, by the number of updates before them.

    Args:
        owner (str), name (str): the names used in error messages.
        sizes (Union[int, Mapping, Callable]): the argument.
    """

    def __init__(self, owner: str, name: str, sizes: Any):
        self._argument = _check.Argument(owner, name)
        self.function = sizes if callable(sizes) else None
        """Optional[Callable], returns the size from the number of updates."""
        self.steps: list[tuple[int, int]] = []
        """list[tuple[int, int]], the first update of each size, and the size, if there is no function."""
        if not callable(sizes):
            self.steps = self._checked(sizes if isinstance(sizes, Mapping) else {0: sizes})
        self.constant = self.steps[0][1] if len(self.steps) == 1 else None
        """Optional[int], the size if all windows have the same."""

    def _checked(self, sizes: Mapping) -> list[tuple[int, int]]:
        """Return the first update of each size, and the size, in order."""
        if not sizes or not all(type(first) is int and first >= 0 for first in sizes) or 0 not in sizes:
            self._argument.raise_invalid(ValueError, _RULE, dict(sizes))
        return [(first, self._size(sizes[first])) for first in sorted(sizes)]

    def _size(self, value: Any) -> int:
        value = value.asnumpy() if hasattr(value, "asnumpy") else value
        value = value.item() if hasattr(value, "item") else value  # NumPy's
        return _check.positive_int(*self._argument, value)

    def amount_of(self, micro_batch: tuple) -> float:
        """Return how much of a window a micro-batch fills: it is one of so many."""
        del micro_batch
        return 1

    def size_after(self, update: Any) -> int:
        """Return the size of the window after this number of updates: an int, or a Tensor in a compiled function."""
        if self.function is not None:
            return self._size(self.function(update))
        return [size for first, size in self.steps if first <= update][-1]

    @property
    def settings(self) -> Any:
        """The value that must be equal in a resumed run, in types that JSON supports."""
        if self.function is not None:
            return getattr(self.function, "__qualname__", type(self.function).__name__)
        return self.constant or {str(first): size for first, size in self.steps}


def sizes_of(owner: str, name: str, sizes: Any) -> Sizes:
    """Return the sizes for the user's argument."""
    return sizes if isinstance(sizes, Sizes) else Sizes(owner, name, sizes)


class ByWeight:
    """Windows that are full when their micro-batches count for a number together: how many there will be is unknown.

    Args:
        owner (str), name (str): the names used in error messages.
        weight (float): the number, of all ranks.
        ranks (int): the number of ranks, each of which fills its part.
        amount_of (Callable): returns what a micro-batch counts for.
    """

    constant = None

    def __init__(self, owner: str, name: str, weight: Any, ranks: int, amount_of: Callable[[tuple], float]):
        self._weight = _check.positive_number(owner, name, weight)
        self.amount_of = amount_of
        self._part = self._weight / ranks * _ALMOST

    def size_after(self, update: Any) -> float:
        """Return the weight of this rank's part of the window after this number of updates."""
        del update
        return self._part

    @property
    def settings(self) -> Any:
        """The value that must be equal in a resumed run."""
        return {"window_weight": self._weight}


def is_full(amount: Any, window: Any) -> Any:
    """Return whether a window of size `window` is full, if it has so many micro-batches, or if they count for so much.

    This is the only rule about it, used on the host with numbers and in graphs with tensors.
    """
    return amount >= window


def split_batch(batch: Any, micro_batch_size: int) -> Iterator[tuple]:
    """Split one batch into micro-batches of `micro_batch_size` rows; the last may be shorter.

    For the functional pattern: set the window size of the `Accumulator` to the number of micro-batches of a full batch,
    weight each micro-batch by its rows, and call `flush()` after each batch; after a full batch `flush()` does nothing.

    Args:
        batch (Union[Tensor, tuple, list]): one or several tensors or arrays with one row per sample.
        micro_batch_size (int): the number of rows of a micro-batch.

    Returns:
        Iterator[tuple], for each micro-batch its rows of all tensors.

    Raises:
        TypeError: If `micro_batch_size` is not an int, or `batch` does not consist of tensors or arrays.
        ValueError: If `micro_batch_size` is less than 1, or the tensors differ in their number of rows.

    Examples:
        >>> import numpy as np
        >>> from ms_accum import split_batch
        >>> images, labels = np.zeros((100, 1, 32, 32)), np.arange(100)
        >>> [len(rows) for _, rows in split_batch((images, labels), 32)]
        [32, 32, 32, 4]
    """
    size = _check.positive_int("split_batch", "micro_batch_size", micro_batch_size)
    columns = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
    argument = _check.Argument("split_batch", "batch")
    for column in columns:
        if not hasattr(column, "shape"):
            remedy = "Give its values: tuple(batch.values())." if isinstance(batch, Mapping) else ""
            argument.raise_invalid(TypeError, "tensors or arrays", type(column).__name__, remedy)
    starts = range(0, rows_of(argument, columns), size)
    return (tuple(column[start : start + size] for column in columns) for start in starts)


def rows_of(argument: _check.Argument, columns: Sequence[Any]) -> int:
    """Return the number of rows of a batch, or raise an error if its columns do not all have it."""
    if not all(column.shape for column in columns):
        argument.raise_invalid(ValueError, "tensors with one row per sample", "one that is a single number")
    rows = {column.shape[0] for column in columns}
    if len(rows) != 1:
        argument.raise_invalid(ValueError, "tensors with the same number of rows", sorted(rows) or "none")
    return rows.pop()


def updates_per_epoch(micro_batches: int, mini_steps: int, tail: str = "flush", *, epoch: int | None = None) -> int:
    """Return the number of updates in an epoch, for example to build a learning-rate schedule.

    Args:
        micro_batches (int): the number of micro-batches in an epoch.
        mini_steps (int): the number of micro-batches in a window.
        tail (str): what happens to a short last window: ``"flush"`` updates with it, ``"carry"`` continues it in the
            next epoch, ``"drop"`` discards it. Default: ``"flush"``.
        epoch (Optional[int]): the epoch, from 1; only used with ``"carry"``, where epochs may differ by one update.
            Default: ``None``, the first.

    Returns:
        int, the number of updates in that epoch.

    Raises:
        TypeError: If `micro_batches`, `mini_steps` or `epoch` is not an int.
        ValueError: If one of them is less than 1, or `tail` is not one of the three.

    Examples:
        >>> from ms_accum import updates_per_epoch
        >>> updates_per_epoch(1875, 4), updates_per_epoch(1875, 4, "drop")
        (469, 468)
        >>> [updates_per_epoch(3, 2, "carry", epoch=epoch) for epoch in (1, 2, 3)]
        [1, 2, 1]
    """
    owner = "updates_per_epoch"
    micro_batches = _check.positive_int(owner, "micro_batches", micro_batches)
    mini_steps = _check.positive_int(owner, "mini_steps", mini_steps)
    epoch = _check.positive_int(owner, "epoch", 1 if epoch is None else epoch)
    _check.one_of(owner, "tail", tail, TAILS)
    return windows_by_epoch(micro_batches, Sizes(owner, "mini_steps", mini_steps), tail, epoch)[-1]


def windows_by_epoch(
    batches: int,
    sizes: Sizes | None,
    tail: str,
    epochs: int,
    *,
    done: int = 0,
    open_micro_batches: int = 0,
    updates: int = 0,
) -> list[int]:
    """Return the number of windows in each epoch of a run, if none is skipped; None: each batch is a window.

    Args:
        batches (int): micro-batches in an epoch.
        sizes (Optional[Sizes]): the sizes of windows.
        tail (str), epochs (int): as for `GradientAccumulation`.
        done (int): the batches of the first epoch that are done already. Default: 0.
        open_micro_batches (int): micro-batches that wait for the first window when the run begins. Default: 0.
        updates (int): updates before the run. Default: 0.
    """
    if sizes is None:
        return [batches - done, *[batches] * (epochs - 1)]
    left_over = (open_micro_batches if tail == "carry" else 0) - done
    by_epoch: list[int] = []
    before = updates
    for _ in range(epochs):
        windows, left_over = 0, left_over + batches
        if sizes.constant is not None:
            windows, left_over = divmod(left_over, sizes.constant)
        else:
            while is_full(left_over, size := sizes.size_after(before + windows)):
                windows, left_over = windows + 1, left_over - size
        by_epoch.append(windows + (tail == "flush" and left_over > 0))
        before += by_epoch[-1]
        left_over = left_over if tail == "carry" else 0
    return by_epoch


def _stalls(batches: int, sizes: Sizes, epochs: int, windows: int, updates: int) -> bool:
    """Return whether windows become larger than an epoch, so that none would ever be full again."""
    if sizes.constant is not None or epochs == 1:
        return False
    return windows == sum(windows_by_epoch(batches, sizes, "drop", epochs - 1, updates=updates))


def planned(
    owner: str,
    batches: int | None,
    mini_steps: Any,
    tail: str,
    epochs: int,
    *,
    open_micro_batches: int = 0,
    updates: int = 0,
    may_have_none: bool = False,
) -> int | None:
    """Return the number of windows of a run; if `mini_steps` is None, each batch is a window.

    Args:
        owner (str): the name used in error messages.
        batches (Optional[int]): batches in an epoch; if it is None (unknown), the result is also None.
        mini_steps, tail, epochs: as for `GradientAccumulation`.
        open_micro_batches (int): micro-batches that ``tail="carry"`` left over from another run. Default: 0.
        updates (int): updates before the run. Default: 0.
        may_have_none (bool): whether no window need ever fill, as on one of several ranks. Default: ``False``.

    Raises:
        ValueError: If the dataset is empty, or no window would ever fill.
    """
    if batches is None:
        return None
    if batches < 1:
        raise ValueError(f"For '{owner}', 'train_dataset' must have batches, but got an empty one.")
    if mini_steps is None:
        return epochs * batches
    if isinstance(mini_steps, ByWeight):
        return None
    sizes = sizes_of(owner, "mini_steps", mini_steps)
    now = {"open_micro_batches": open_micro_batches, "updates": updates}
    windows = sum(windows_by_epoch(batches, sizes, tail, epochs, **now))
    if tail == "drop" and not may_have_none and (not windows or _stalls(batches, sizes, epochs, windows, updates)):
        raise ValueError(
            f"For '{owner}', 'mini_steps' must be at most {batches} with tail='drop', but got "
            f"{sizes.settings}. No window would ever fill; use a smaller one, or tail='flush'."
        )
    return windows


def warn_if_never_full(owner: str, sizes: Sizes, batches: int) -> None:
    """Warn if windows have more micro-batches than an epoch, which with ``tail="flush"`` ends each of them early."""
    if sizes.constant is not None and sizes.constant > batches:
        _check.warn(
            f"For '{owner}', 'mini_steps' is {sizes.constant}, but an epoch has {_check.quantity(batches, 'batch')}: "
            "no window gets full, and each epoch has one update. Use a smaller one, or tail='carry'."
        )
