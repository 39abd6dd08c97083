"""What can be done to a tuple of gradients inside a graph?"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import ops

_map = ops.HyperMap()


def _add(total: Any, gradient: Any) -> Any:
    return ops.assign_add(total, ops.cast(gradient, total.dtype))


def _add_weighted(weight: Any, total: Any, gradient: Any) -> Any:
    return ops.assign_add(total, ops.cast(ops.cast(gradient, ms.float32) * weight, total.dtype))


def _clear(total: Any) -> Any:
    # Assigned, not multiplied by zero or subtracted from itself: NaN would survive both.
    return ops.assign(total, ops.zeros_like(total))


def _divide(divisor: Any, gradient: Any) -> Any:
    return ops.cast(gradient, ms.float32) / divisor


def _divide_in_place(divisor: Any, total: Any) -> Any:
    return total.div_(divisor)


def _cast_like(gradient: Any, parameter: Any) -> Any:
    return ops.cast(gradient, parameter.dtype)


def _squares(gradient: Any) -> Any:
    # Rows first, then the rows' sums: on CPU 8 times as fast as one sum over everything, and it keeps
    # digits that one long running sum loses (5e-5 in L2Loss, on 670,000 elements).
    gradient = ops.cast(gradient, ms.float32)
    rows = gradient.shape[0] if gradient.ndim else 1
    return ops.reduce_sum(ops.reduce_sum(ops.reshape(gradient * gradient, (rows, -1)), 1))


def add(total: Any, gradients: Any) -> Any:
    """Add `gradients` into the Parameters of `total`, in their type."""
    return _map(_add, total, gradients)


def add_weighted(total: Any, gradients: Any, weight: Any) -> Any:
    """Add `weight` times `gradients` into the Parameters of `total`, in their type."""
    return _map(ops.partial(_add_weighted, weight), total, gradients)


def clear(total: Any) -> Any:
    """Assign zero to every Parameter of `total`."""
    return _map(_clear, total)


def divide(gradients: Any, divisor: Any) -> Any:
    """Return `gradients` divided by one scalar, in float32."""
    return _map(ops.partial(_divide, divisor), gradients)


def divide_in_place(total: Any, divisor: Any) -> Any:
    """Divide the Parameters of `total` by one scalar, without a second set of gradients in memory."""
    return _map(ops.partial(_divide_in_place, divisor), total)


def cast_like(gradients: Any, parameters: Any) -> Any:
    """Return `gradients` in the types of `parameters`; nothing happens where they agree."""
    return _map(_cast_like, gradients, parameters)


def global_norm(gradients: Any) -> Any:
    """Return the 2-norm over all elements: not finite if any element is not, or above 1.8e19."""
    return ops.sqrt(ops.addn(_map(_squares, gradients)))
