"""Read, compare and list Parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops


def as_array(parameter: Tensor) -> np.ndarray:
    """Return the Parameter's values as an array; bfloat16, which NumPy lacks, is converted to float32, exactly."""
    value = parameter.astype(ms.float32) if parameter.dtype == ms.bfloat16 else parameter
    return value.asnumpy()


def copied(column: Tensor) -> Tensor:
    """Return a copy, in a quarter of the time of `Tensor(array.copy())`."""
    if column.dtype == ms.bfloat16:
        return Tensor(as_array(column), column.dtype)
    return Tensor.from_numpy(column.asnumpy().copy())


def digest_of(arrays: Iterable[np.ndarray]) -> str:
    """Return the SHA-256 of the bytes of arrays, in their order."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(np.ascontiguousarray(array).data.cast("B") if array.size else b"")
    return digest.hexdigest()


def excluding(parameters: Iterable[Parameter], others: Iterable[Parameter]) -> list[Parameter]:
    """Return the parameters that are not in `others`, compared by identity, because names need not be unique."""
    excluded = {id(parameter) for parameter in others}
    return [parameter for parameter in parameters if id(parameter) not in excluded]


def copies_of(parameters: Iterable[Parameter]) -> list[tuple[Parameter, np.ndarray]]:
    """Return the parameters, each with a copy of its values."""
    return [(parameter, as_array(parameter).copy()) for parameter in parameters]


def is_equal(parameter: Parameter, copy: np.ndarray) -> bool:
    """Return whether a parameter has these values; NaN is equal to NaN."""
    return np.array_equal(as_array(parameter), copy, equal_nan=True)


def has_half(network: nn.Cell) -> bool:
    """Return whether MindSpore marks a part of the network as float16; casts in `construct` are not found."""
    cells = [cell for _, cell in network.cells_and_names()]
    if any(cell.get_flags().get("fp16") for cell in cells):
        return True
    # Cells that `amp.auto_mixed_precision` has rewritten ("O1") or decorated ("auto") have no flags.
    if any(getattr(cell, "_amp_level", None) in ("O1", "O2", "O3", "auto") for cell in cells):
        return True
    return any(parameter.dtype == ms.float16 for parameter in network.get_parameters())


@contextmanager
def restoring(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Set Parameters after the block to what they were before it."""
    copies = copies_of(parameters)
    try:
        yield
    finally:
        restore(copies)


def restore(copies: Iterable[tuple[Parameter, np.ndarray]]) -> None:
    """Set Parameters to these copies."""
    for parameter, copy in copies:
        if not is_equal(parameter, copy):
            ops.assign(parameter, Tensor(copy).astype(parameter.dtype))
