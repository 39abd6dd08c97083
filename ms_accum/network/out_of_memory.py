"""Recognizes out-of-memory errors, and adds the settings that help to their messages."""

from __future__ import annotations

import math
import re

from .._check import quantity

# Messages of C++, and of MindSpore's memory pools, kernels and graph compiler, on devices and on the host.
_TEXTS = re.compile(
    r"bad_alloc|out of memory|memory (is )?not enough|not enough memory|"
    r"alloc\w*( \w+)* memory( \w+)*,? fail|fail\w* to alloc\w*( \w+)* memory|memory alloc\w*( \w+)* fail",
    re.IGNORECASE,
)


def says_out_of_memory(text: str) -> bool:
    """Return whether a message is an out-of-memory message."""
    return _TEXTS.search(text) is not None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is an out-of-memory error, on the host or on a device."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and says_out_of_memory(str(error)))


def memory_advice(error: BaseException, rows: int, window: int | None) -> str | None:
    """Return one sentence with settings to use after an out-of-memory error; None after any other error.

    Args:
        error (BaseException): the error that ended the run.
        rows (int): rows of a micro-batch.
        window (Optional[int]): micro-batches in a window, 0 if it changes. ``None``: each batch is a window and is
            split.
    """
    if not is_out_of_memory(error):
        return None
    cause = f"out of memory with micro-batches of {quantity(rows, 'row')}"
    if window:
        cause += f" in windows of {window}"
    if rows == 1:
        remedy = "so use a smaller network, an optimizer with less state or more memory"
        return f"{cause}: a micro-batch can't be smaller, {remedy}"
    half = rows // 2
    if window is None:
        return f"{cause}: use 'micro_batch_size' {half}, or let 'find_micro_batch_size' find one that fits"
    halved = f" in windows of {math.ceil(rows * window / half)}" if window else ""
    return f"{cause}: use micro-batches of {half}{halved}, or let 'find_micro_batch_size' find one that fits"
