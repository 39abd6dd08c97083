"""Are out-of-memory errors recognized, and which settings are advised?"""

from __future__ import annotations

import numpy as np
import pytest

from ms_accum.network.out_of_memory import is_out_of_memory, memory_advice

# As they stand in the libraries of MindSpore 2.10; the first two also as caught in a process with RLIMIT_DATA.
MEMORY = [
    RuntimeError("std::bad_alloc"),
    RuntimeError("#umsg#Memory not enough:#umsg#Device(id:0) memory isn't enough and alloc failed"),
    RuntimeError("Memory not enough: current free memory size[1024] is smaller than required size[2048]."),
    RuntimeError("Allocate device memory failed, alloc size:4"),
    RuntimeError("Out of memory, Alloc GE memory failed, size: 12"),
    RuntimeError("Failed to allocate memory for device tensor store: x"),
    RuntimeError("memory allocation failed"),
    RuntimeError("x, memory is not enough."),
    RuntimeError("first line\nallocate somas whole block memory failed, alloc size: 3"),
]
OTHERS = [
    RuntimeError("Unknown Error!"),
    RuntimeError("the memory of former days"),
    ValueError("out of memory"),
    KeyboardInterrupt(),
    RuntimeError("For 'MatMul', the shapes don't fit. Memory format: NCHW"),
]


@pytest.mark.parametrize("error", MEMORY, ids=str)
def test_out_of_memory_errors_are_recognized(error):
    assert is_out_of_memory(error)


def test_numpy_memory_error_is_recognized():
    with pytest.raises(MemoryError) as caught:
        np.ones(2**60, np.int8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_other_errors_are_not_recognized(error):
    assert not is_out_of_memory(error) and memory_advice(error, 32, 4) is None


@pytest.mark.parametrize(("rows", "window", "half", "doubled"), [(32, 4, 16, 8), (33, 1, 16, 3), (2, 5, 1, 10)])
def test_advice_keeps_effective_batch(rows, window, half, doubled):
    advice = memory_advice(MemoryError(), rows, window)
    assert f"use micro-batches of {half} in windows of {doubled}," in advice and "\n" not in advice


def test_advice_for_windows_of_changing_size_names_none():
    assert "use micro-batches of 16, or let" in memory_advice(MemoryError(), 32, 0)


def test_advice_for_micro_batch_of_one_row():
    assert "can't be smaller" in memory_advice(MemoryError(), 1, 8)
