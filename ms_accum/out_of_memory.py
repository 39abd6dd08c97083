"""Was it memory that ran out, and what helps?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

# What MindSpore's memory pools, kernels and graph compiler say, on devices and on the host, and what C++ does.
_TEXTS = re.compile(
    r"bad_alloc|out of memory|memory (is )?not enough|not enough memory|"
    r"alloc\w*( \w+)* memory( \w+)*,? fail|fail\w* to alloc\w*( \w+)* memory|memory alloc\w*( \w+)* fail",
    re.IGNORECASE,
)


def says_out_of_memory(text: str) -> bool:
    """Return whether a message tells of memory that ran out."""
    return _TEXTS.search(text) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error tells of memory that ran out, on the host or on a device."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and says_out_of_memory(str(error)))


def memory_advice(error: BaseException, rows: int, window: int | None) -> str | None:
    """Say in a sentence which settings to use after an error that tells of memory; None after any other.

    Args:
        error (BaseException): what ended the run.
        rows (int): rows of a micro-batch.
        window (Optional[int]): micro-batches in a window. ``None``: windows are whole batches, split.
    """
    if not is_out_of_memory(error):
        return None
    failed = f"out of memory with micro-batches of {rows} rows" + (f" in windows of {window}" if window else "")
    if rows == 1:
        rest = "so take a smaller network, an optimizer with less state or more memory"
        return f"{failed}: a micro-batch can't be smaller, {rest}"
    half = rows >> 1
    if window is None:
        return f"{failed}: take 'micro_batch_size' {half}, or let 'find_micro_batch_size' find the largest that fits"
    halved = len(range(0, rows * window, half))
    return (
        f"{failed}: take micro-batches of {half} and 'mini_steps' {halved}, or let 'find_micro_batch_size' "
        f"(train.py --batch_size auto --effective_batch {rows * window}) find the largest that fits"
    )


@contextmanager
def memory_advised(rows: int, window: int | None) -> Iterator[None]:
    """Give `memory_advice` with what is raised inside the block."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        advice = memory_advice(error, rows, window)
        if advice is None:
            raise
        raise RuntimeError(advice) from error
