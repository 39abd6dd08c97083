"""Parameters: read, compare, copy and restore them; those that hold the state of this package's objects."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Callable, TypeVar

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.common.initializer import initializer

from . import private


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
    if any(private.amp_level(cell) in ("O1", "O2", "O3", "auto") for cell in cells):
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


_numbers = itertools.count()
_T = TypeVar("_T")


def unique_name(kind: str) -> str:
    """Return a name for the state of an object: unique in the process, and the same in every run."""
    return f"{kind}_{next(_numbers)}"


def untrained(name: str, value: Any, dtype: Any) -> Parameter:
    """Return a Parameter that no optimizer trains."""
    return Parameter(Tensor(value, dtype), name=name, requires_grad=False)


def zeros_like(prefix: str, parameters: Any) -> tuple[Parameter, ...]:
    """Return a float32 Parameter of zeros for each parameter, whatever the parameter's type.

    They are in a plain tuple: a Cell would treat a ParameterTuple as its weights, and save it with the model.
    """
    zeros = tuple(
        Parameter(
            initializer("zeros", parameter.shape, ms.float32), name=f"{prefix}.{parameter.name}", requires_grad=False
        )
        for parameter in parameters
    )
    set_initial_values(zeros)
    return zeros


def set_initial_values(parameters: Iterable[Any]) -> None:
    """Give Parameters that `no_init_parameters` left without values, and copies of such, their initial values.

    Before a Cell's first graph MindSpore does this for the Parameters that the Cell contains: not for those in tuples,
    lists and `jit_class` objects, and not for what a function with `ms.jit` uses.
    """
    for parameter in parameters:
        initial = private.initial_values(parameter)
        if initial is None:
            continue
        if initial.init is None:  # a clone of the Parameter took its initial values; MindSpore raises an error for it
            parameter.set_data(initial.copy())
        else:
            parameter.init_data()


def untracked(parameter: Parameter | None) -> tuple[Parameter, ...]:
    """Wrap a Parameter in a tuple, so that a Cell does not treat it as one of its weights."""
    return () if parameter is None else (parameter,)


def attached(owner: Any, name: str, make: Callable[[], _T]) -> _T:
    """Return what is attached to an object of the user's under this name, created by the first call.

    For state that several Cells share because they got the same object. It lives as long as that object; a copy of the
    object gets state of its own.
    """
    attributes = vars(owner)
    if name not in attributes or attributes[name][0] is not owner:
        attributes[name] = (owner, make())
    return attributes[name][1]
