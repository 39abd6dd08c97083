"""How are images moved at random, and moved alike whenever their rows are read again?

Where a row is cropped is drawn for the whole split at once, from (seed, pass), and looked up by the row's own
number. So it depends neither on the batch a row is in, nor on the shard, nor on what was read before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

PADDING = 4
# Behind seed and pass; the order of the rows is drawn from those two alone, and must stay independent.
_STREAM = 1


@dataclasses.dataclass(frozen=True)
class Moves:
    """What happens to each row in one pass.

    Attributes:
        top: Where the crop begins in the padded image, 0 to 2 * PADDING.
        left: The same from the left.
        mirrored: Whether left and right are exchanged.
    """

    top: np.ndarray
    left: np.ndarray
    mirrored: np.ndarray

    def of(self, rows: np.ndarray) -> Moves:
        """Return those of some rows."""
        return Moves(self.top[rows], self.left[rows], self.mirrored[rows])


def draw_moves(rows: int, seed: int, number: int) -> Moves:
    """Return the moves of all rows in pass `number`: a pure function of the three."""
    random = np.random.default_rng([seed, number, _STREAM])
    top, left = random.integers(0, 2 * PADDING, (2, rows), endpoint=True)
    return Moves(top, left, random.integers(0, 2, rows).astype(bool))


def move(images: np.ndarray, moves: Moves) -> np.ndarray:
    """Crop images from their copies with PADDING black pixels around, and mirror some.

    Args:
        images (numpy.ndarray): uint8 of shape (N, channels, side, side).
        moves (Moves): What to do with each of the N.

    Returns:
        numpy.ndarray of the same shape, the input is left alone.
    """
    count, channels, side, _ = images.shape
    padded = np.zeros((count, channels, side + 2 * PADDING, side + 2 * PADDING), images.dtype)
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = images
    # Every possible crop, as a view; taking one an image copies it.
    slide: Any = np.lib.stride_tricks.sliding_window_view  # its annotations know one axis only
    crops = slide(padded, (side, side), axis=(2, 3))
    moved = crops[np.arange(count), :, moves.top, moves.left]
    moved[moves.mirrored] = moved[moves.mirrored][..., ::-1]
    return moved
