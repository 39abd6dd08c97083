"""How are the rows of all ranks gathered?"""

from __future__ import annotations

import numpy as np

from .parallel import Group, gather

_BYTES = 4


def gather_rows(rows: np.ndarray, group: Group | None) -> tuple[np.ndarray, int]:
    """Return the rows of all ranks, in the order of the ranks, and the number of rows before those of this rank.

    Ranks may have different numbers of rows. The bytes are sent as float32, the only type that every device gathers;
    nothing is computed with them.

    Args:
        rows (np.ndarray): the rows of this rank, of the same type and row shape on all ranks.
        group (Optional[Group]): the ranks.
    """
    if group is None:
        return rows, 0
    counts = [int(count) for count in gather(np.array([len(rows)], np.float32), group)]
    room = np.zeros((max(counts), *rows.shape[1:]), rows.dtype)
    room[: len(rows)] = rows
    sent = np.frombuffer(room.tobytes(), np.uint8)
    sent = np.pad(sent, (0, -len(sent) & _BYTES - 1)).view(np.float32)
    came = gather(sent, group).view(np.uint8).reshape(group.size, -1)[:, : room.nbytes]
    parts = [each.tobytes() for each in came]
    arrays = [np.frombuffer(part, rows.dtype).reshape(room.shape)[:count] for part, count in zip(parts, counts)]
    return np.concatenate(arrays), sum(counts[: group.rank])
