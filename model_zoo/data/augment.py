"""Random but reproducible crops and mirroring of images.

What is drawn for a pass is drawn for the complete split at once, from (seed, pass), and looked up by the number of the
row. So it does not depend on the batch of a row, on the shard, or on what was read before.
"""

from __future__ import annotations

from typing import Any

import numpy as np

PADDING = 4
# Added to seed and pass, because the order of the rows is drawn from these two, and must be independent.
_STREAM = 1


def draw_moves(rows: int, seed: int, number: int) -> np.ndarray:
    """Return what happens to each row in pass `number`: a pure function of the three.

    Returns:
        numpy.ndarray, int64 of shape (rows, 3): the first row and the first column of the crop in the padded image, 0
        to 2 * PADDING, and 1 where left and right are swapped.
    """
    random = np.random.default_rng([seed, number, _STREAM])
    crops = random.integers(0, 2 * PADDING, (2, rows), endpoint=True)
    return np.stack([*crops, random.integers(0, 2, rows)], axis=1)


def move(images: np.ndarray, moves: np.ndarray) -> np.ndarray:
    """Crop images from copies with PADDING black pixels on each side, and mirror some.

    Args:
        images (numpy.ndarray): uint8 of shape (N, channels, side, side).
        moves (numpy.ndarray): What happens to each of the N images, as `draw_moves` returns it.

    Returns:
        numpy.ndarray of the same shape; the input is not changed.
    """
    count, channels, side, _ = images.shape
    padded = np.zeros((count, channels, side + 2 * PADDING, side + 2 * PADDING), images.dtype)
    padded[:, :, PADDING:-PADDING, PADDING:-PADDING] = images
    # All possible crops, as a view; selecting one per image copies it.
    slide: Any = np.lib.stride_tricks.sliding_window_view  # its annotations allow only one axis
    top, left, mirrored = moves.T
    moved = slide(padded, (side, side), axis=(2, 3))[np.arange(count), :, top, left]
    moved[mirrored == 1] = moved[mirrored == 1][..., ::-1]
    return moved
