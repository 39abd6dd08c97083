"""Which elements of a parameter does a rank store?"""

from __future__ import annotations

from typing import Any

import numpy as np
from mindspore import ops

from ..network import tree


class Part:
    """A rank's slice of the flattened parameter, padded with zeros so that all slices have the same size.

    Args:
        parameter (Parameter): the full parameter.
        rank (int): the rank that stores this slice.
        ranks (int): the number of ranks.
    """

    def __init__(self, parameter: Any, rank: int, ranks: int):
        self.shape, self.whole, self.ranks = parameter.shape, parameter.size, ranks
        self.size = len(range(0, self.whole, ranks))
        self.first = min(self.whole, rank * self.size)
        self.behind = min(self.whole, self.first + self.size)
        self.padding = self.size - (self.behind - self.first)

    def of(self, array: np.ndarray) -> np.ndarray:
        """Return this part of an array."""
        return np.pad(array.ravel()[self.first : self.behind], (0, self.padding))


def part_of(tensor: Any, part: Part) -> Any:
    """Return this part of a tensor, in a graph. A tensor that is already a part is returned unchanged."""
    if tensor.shape == (part.size,):
        return tensor
    return _filled(tree.stretch(ops.reshape(tensor, (-1,)), part.first, part.behind), part.padding)


def parts_of(tensor: Any, part: Part) -> Any:
    """Return the parts of all ranks, one per row, in a graph."""
    padding = part.ranks * part.size - part.whole
    return ops.reshape(_filled(ops.reshape(tensor, (-1,)), padding), (part.ranks, part.size))


def whole_of(rows: Any, part: Part) -> Any:
    """Return the full tensor that consists of these parts, in a graph."""
    return ops.reshape(tree.stretch(ops.reshape(rows, (-1,)), 0, part.whole), part.shape)


def _filled(row: Any, padding: int) -> Any:
    return ops.cat((row, ops.zeros((padding,), row.dtype))) if padding else row
