"""Random but reproducible crops and mirroring of images.

The crops of a pass are drawn for the complete split at once, from (seed, pass), and looked up by the number of the row.
So they do not depend on the batch of a row, on the shard, or on what was read before.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

PADDING = 4
# Added to seed and pass, because the order of the rows is drawn from these two, and must be independent.
_STREAM = 1


@dataclasses.dataclass(frozen=True)
class Moves:
    """What happens to each row in one pass.

    Attributes:
        top: The first row of the crop in the padded image, 0 to 2 * PADDING.
        left: Its first column.
        mirrored: Whether left and right are swapped.
    """

    top: np.ndarray
    left: np.ndarray
    mirrored: np.ndarray

    def select(self, rows: np.ndarray) -> Moves:
        """Return the moves of some rows."""
        return Moves(self.top[rows], self.left[rows], self.mirrored[rows])


def draw_moves(rows: int, seed: int, number: int) -> Moves:
    """Return the moves of all rows in pass `number`: a pure function of the three."""
    random = np.random.default_rng([seed, number, _STREAM])
    top, left = random.integers(0, 2 * PADDING, (2, rows), endpoint=True)
    return Moves(top, left, random.integers(0, 2, rows).astype(bool))


def move(images: np.ndarray, moves: Moves) -> np.ndarray:
    """Crop images from copies with PADDING black pixels on each side, and mirror some.

    Args:
        images (numpy.ndarray): uint8 of shape (N, channels, side, side).
        moves (Moves): The crop and the mirroring of each of the N images.

    Returns:
        numpy.ndarray of the same shape; the input is not changed.
    """
    count, channels, side, _ = images.shape
    padded = np.zeros((count, channels, side + 2 * PADDING, side + 2 * PADDING), images.dtype)
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = images
    # All possible crops, as a view; selecting one per image copies it.
    slide: Any = np.lib.stride_tricks.sliding_window_view  # its annotations allow only one axis
    crops = slide(padded, (side, side), axis=(2, 3))
    moved = crops[np.arange(count), :, moves.top, moves.left]
    moved[moves.mirrored] = moved[moves.mirrored][..., ::-1]
    return moved
