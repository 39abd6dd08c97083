"""How many micro-batches does the next window have?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .. import _check

_RULE = "an int >= 1, a dict from first updates, beginning with 0, to such ints, or a function of the update"


class Sizes:
    """The sizes of windows, by the number of updates before them.

    Args:
        owner (str), name (str): the names used in error messages.
        given (Union[int, Mapping, Callable]): the argument.
    """

    def __init__(self, owner: str, name: str, given: Any):
        self._argument = _check.Argument(owner, name)
        self.function = given if callable(given) else None
        """Optional[Callable], returns the size from the number of updates."""
        self.steps: list[tuple[int, int]] = []
        """list[tuple[int, int]], the first update of each size, and the size, if there is no function."""
        if not callable(given):
            self.steps = self._checked(given if isinstance(given, Mapping) else {0: given})
        self.constant = self.steps[0][1] if len(self.steps) == 1 else None
        """Optional[int], the size if all windows have the same."""

    def _checked(self, given: Mapping) -> list[tuple[int, int]]:
        """Return the first update of each size, and the size, in order."""
        if not given or not all(type(first) is int and first >= 0 for first in given) or 0 not in given:
            self._argument.refuse(ValueError, _RULE, dict(given))
        return [(first, self._size(given[first])) for first in sorted(given)]

    def _size(self, value: Any) -> int:
        value = value.asnumpy() if hasattr(value, "asnumpy") else value
        value = value.item() if hasattr(value, "item") else value  # NumPy's
        return _check.positive_int(*self._argument, value)

    def of(self, update: Any) -> int:
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


def ramp_up(first: int, last: int, samples: int, *, micro_batch_size: int) -> dict[int, int]:
    """Return window sizes that grow linearly with the number of samples seen, from `first` to `last`.

    Args:
        first (int): the number of micro-batches in the first window.
        last (int): the number of micro-batches in a window after `samples` samples.
        samples (int): the number of samples over which the window grows.
        micro_batch_size (int): the rows of a micro-batch, on all ranks together.

    Returns:
        dict[int, int], the window sizes by their first update; pass it as `mini_steps`, `accumulate_step` or
        `gradient_accumulation_steps`.

    Raises:
        TypeError: If an argument is not an int.
        ValueError: If an argument is less than 1, or `last` less than `first`.

    Examples:
        >>> from ms_accum import ramp_up
        >>> ramp_up(1, 4, 1000, micro_batch_size=50)
        {0: 1, 7: 2, 11: 3, 13: 4}
    """
    named = {"first": first, "last": last, "samples": samples, "micro_batch_size": micro_batch_size}
    first, last, samples, rows = (_check.positive_int("ramp_up", name, value) for name, value in named.items())
    if last < first:
        _check.refuse(ValueError, "ramp_up", "last", f">= {first}, the size of the first window", last)
    sizes, size, update, seen = {0: first}, first, 0, 0
    while size < last:
        update, seen = update + 1, seen + size * rows
        now = min(last, first + int((last - first) * seen / samples))
        if now > size:
            sizes[update] = size = now
    return sizes


def sizes_of(owner: str, name: str, given: Any) -> Sizes:
    """Return the sizes for the user's argument."""
    return given if isinstance(given, Sizes) else Sizes(owner, name, given)


def windows_until(batches: int, size_of: Callable[[int], int], updates: int, held: int = 0) -> tuple[int, int]:
    """Return the number of full windows in this number of micro-batches, and the micro-batches left over.

    Args:
        batches (int): micro-batches.
        size_of (Callable): the size of the window after a number of updates.
        updates (int): updates before them.
        held (int): micro-batches that the first window already holds.
    """
    left, windows = batches + held, 0
    while left >= size_of(updates + windows):
        left -= size_of(updates + windows)
        windows += 1
    return windows, left
