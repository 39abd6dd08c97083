"""Which elements of a parameter does a rank keep?"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import ops

from . import _tree


class Part:
    """Of the flat parameter, filled up with zeros, an equal piece.

    Args:
        parameter (Parameter): the whole.
        rank (int): whose part.
        ranks (int): how many there are.
    """

    def __init__(self, parameter: Any, rank: int, ranks: int):
        self.shape, self.whole, self.ranks = parameter.shape, parameter.size, ranks
        self.size = len(range(0, self.whole, ranks))
        self.first = min(self.whole, rank * self.size)
        self.behind = min(self.whole, self.first + self.size)
        self.padding = self.size - (self.behind - self.first)

    def of(self, array: np.ndarray) -> np.ndarray:
        """Cut it out of an array."""
        return np.pad(array.ravel()[self.first : self.behind], (0, self.padding))


def part_of(tensor: Any, part: Part) -> Any:
    """Do what `Part.of` does, in a graph. A tensor that is a part already stays as it is."""
    if tensor.shape == (part.size,):
        return tensor
    return _filled(_tree.stretch(ops.reshape(tensor, (-1,)), part.first, part.behind), part.padding)


def parts_of(tensor: Any, part: Part) -> Any:
    """Return the parts of all ranks, a row each, in a graph."""
    padding = part.ranks * part.size - part.whole
    return ops.reshape(_filled(ops.reshape(tensor, (-1,)), padding), (part.ranks, part.size))


def whole_of(rows: Any, part: Part) -> Any:
    """Return the whole that such rows are the parts of, in a graph."""
    return ops.reshape(_tree.stretch(ops.reshape(rows, (-1,)), 0, part.whole), part.shape)


def _filled(row: Any, padding: int) -> Any:
    return ops.cat((row, ops.zeros((padding,), row.dtype))) if padding else row
