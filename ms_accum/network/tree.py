"""Functions on a tuple of gradients that run inside graphs: they check, add, multiply and measure it."""

from __future__ import annotations

import inspect
from typing import Any, Callable

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from .. import _check
from .private import jit_context, primitives_of

_DIFFERENTIATE = "Differentiate with respect to 'optimizer.parameters'."
_map = ops.HyperMap()
no_nan = ops.MulNoNan()
"""Primitive, a product that is 0 where the second factor is 0, also for NaN and inf."""


def _of_tensors(*operands: str) -> Callable[[Callable], Any]:
    """Return a decorator for a function that is mapped over tuples of tensors, after operands of the given types.

    Plain functions also work, but crash MindSpore (SIGSEGV) if a gradient is sparse.
    """

    def decorator(function: Callable) -> Any:
        graph = ops.MultitypeFuncGraph(function.__name__)
        tensors = len(inspect.signature(function).parameters) - bool(operands)
        for kind in operands or ("",):
            graph.register(*filter(None, [kind]), *["Tensor"] * tensors)(function)
        return graph

    return decorator


# On CPU, `mul_` of MindSpore 2.7 silently leaves its operand unchanged, also in graphs. That of 2.8 prints warnings.
_WRITES = tuple(int(part) for part in ms.__version__.split(".")[:2]) >= (2, 9)
# `mul_` and `copy_` are documented for Ascend alone; on CPU they were measured. Elsewhere `assign` does the same.
_IN_PLACE_ON = ("CPU", "Ascend")


def has_in_place() -> bool:
    """Return whether graphs use in-place kernels here."""
    level = (ms.get_context("jit_config") or {}).get("jit_level")
    return _WRITES and ms.get_context("device_target") in _IN_PLACE_ON and level != "O2"


class _InPlace(ops.constexpr(has_in_place, get_instance=False)):  # type: ignore[misc]
    """Whether in-place kernels (which write into their first operand) work, decided when a graph is compiled.

    They save memory: without them the gradients are in memory twice while they are multiplied.
    """

    def __call__(self) -> bool:
        """Return False outside a graph: there MindSpore's CPU leaves the operand unchanged."""
        return False


_in_place = _InPlace()
_on_cpu = ops.constexpr(lambda: ms.get_context("device_target") == "CPU")
# The CPU kernel sums the squares of a row one after the other: for longer rows the error grows, to 1e-5 at 1,000,000.
_LONGEST_ROW = 2**16
_SPARSE = "SparseGatherV2"
_USE_EMBEDDING = "Use nn.Embedding: the gradients of nn.EmbeddingLookup are sparse."
_dense = ops.MultitypeFuncGraph("dense")


@_dense.register("Tensor", "Tensor")
def _dense_gradient(gradient: Tensor, parameter: Tensor) -> Tensor:
    return gradient


@ops.constexpr
def _reject_rows() -> bool:
    """Raise the error on the host, while the step is compiled: there a `raise` comes after other errors."""
    raise ValueError(f"For 'Accumulator', 'grads' must be dense Tensors, but got sparse ones. {_USE_EMBEDDING}")


@_dense.register("RowTensor", "Tensor")
def _rows_rejected(gradient: Tensor, parameter: Tensor) -> Tensor:
    return parameter if _reject_rows() else parameter


_zero_if = ops.MultitypeFuncGraph("zero_if")


@_zero_if.register("Bool", "Tensor")
def _zero_gradient_if(condition: bool, gradient: Tensor) -> Tensor:
    return ops.zeros_like(gradient) if condition else gradient


_descend = ops.ApplyGradientDescent()


@_of_tensors()
def _add(total: Tensor, gradient: Tensor) -> Tensor:
    return ops.assign_add(total, ops.cast(gradient, total.dtype))


@_of_tensors("Tensor")
def _add_weighted(weight: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
    if total.dtype == ms.float32:  # one pass: a product of its own takes as long again
        return _descend(total, -weight, ops.cast(gradient, ms.float32))
    return _add(total, ops.cast(gradient, ms.float32) * weight)


@_of_tensors("Tensor")
def _multiply_no_nan(factor: Tensor, gradient: Tensor) -> Tensor:
    return no_nan(ops.cast(gradient, ms.float32), factor)  # `where` takes five times as long on CPU


@_of_tensors("Tensor")
def _add_no_nan(factor: Tensor, total: Tensor, gradient: Tensor) -> Tensor:
    return _add(total, _multiply_no_nan(factor, gradient))


@_of_tensors()
def _clear(total: Tensor) -> Tensor:
    # This product is zero also for NaN. Zeros of its size would be constants of the graph, which keeps them in memory.
    zeros = ops.cast(_multiply_no_nan(Tensor(0.0, ms.float32), total), total.dtype)
    return total.copy_(zeros) if _in_place() else ops.assign(total, zeros)


@_of_tensors()
def _clear_finite(total: Tensor) -> Tensor:
    return ops.assign_sub(total, total)


@_of_tensors("Tensor", "Number")
def _multiply(factor: Tensor, gradient: Tensor) -> Tensor:
    return ops.cast(gradient, ms.float32) * factor


@_of_tensors("Tensor", "Number")
def _multiply_in_place(factor: Tensor, total: Tensor) -> Tensor:
    # Return the Parameter instead of the product: a branch copies all inputs that are not Parameters.
    return ops.depend(total, total.mul_(factor) if _in_place() else ops.assign(total, total * factor))


@_of_tensors()
def _in_float32(gradient: Tensor) -> Tensor:
    return ops.cast(gradient, ms.float32)


@_of_tensors("Tensor", "Number")
def _as_scalar(number: Tensor) -> Tensor:
    return ops.reshape(ops.cast(number, ms.float32), ())


@_of_tensors()
def _shape(gradient: Tensor) -> tuple:
    return gradient.shape


@_of_tensors()
def _cast_like(gradient: Tensor, parameter: Tensor) -> Tensor:
    return ops.cast(gradient, parameter.dtype)


@_of_tensors("Tensor")
def _update_average(decay: Tensor, average: Tensor, value: Tensor) -> Tensor:
    # In this form a factor of 0 or 1 causes no rounding error.
    return ops.assign(average, average * decay + ops.cast(value, ms.float32) * (1.0 - decay))


@_of_tensors()
def _sum(gradient: Tensor) -> Tensor:
    rows = ops.cast(gradient, ms.float32)
    if gradient.ndim > 2:
        rows = ops.reshape(rows, (gradient.shape[0], -1))
    return mint.sum(mint.sum(rows, 1)) if gradient.ndim > 1 else mint.sum(rows)


@_of_tensors()
def _squares(gradient: Tensor) -> Tensor:
    # Sum each row, then the row sums: on CPU up to 8 times as fast as one sum over all elements, and more precise
    # than one long running sum (L2Loss: error of 5e-5 on 670,000 elements).
    squares = ops.square(ops.cast(gradient, ms.float32))
    if gradient.ndim > 2:  # a matrix is not reshaped: that would copy it
        squares = ops.reshape(squares, (gradient.shape[0], -1))
    if gradient.ndim > 1:
        squares = mint.sum(squares, 1)
    return mint.sum(squares)


@_of_tensors()
def _row_norms(gradient: Tensor) -> Tensor:
    """Return the norms of the rows, as distances from zero: the CPU kernel for these stores no squares."""
    rows = ops.cast(gradient, ms.float32)
    if gradient.ndim != 2:  # a matrix is not reshaped: that would copy it
        rows = ops.reshape(rows, (gradient.shape[0] if gradient.ndim > 2 else 1, -1))
    if rows.shape[1] > _LONGEST_ROW:
        return ops.reshape(ops.sqrt(_squares(gradient)), (1,))
    return ops.reshape(ops.cdist(rows, ops.zeros((1, rows.shape[1]), ms.float32)), (-1,))


# Checks, which run on the host and while a graph is compiled, where shapes are constants


@ops.constexpr
def check_not_traced(owner: str) -> bool:
    """Reject MindSpore's tracing, which fixes each branch as first taken, and changes Parameters twice."""
    if jit_context() is not None:
        raise RuntimeError(
            f"For '{owner}', the step must be compiled by ms.jit without capture_mode='trace', which records one call "
            "and replays it: windows would not end where they should. If it is, an earlier error in a traced step has "
            "left MindSpore tracing: restart the process."
        )
    return True


def check_gradients(owner: str, grads: tuple, parameters: tuple) -> tuple:
    """Return gradients as a tuple of tensors, or raise an error if they do not match the parameters."""
    check_not_traced(owner)
    grads = tuple(grads)  # `ms.grad` returns a list if it was given one
    check_without_loss(owner, grads, parameters)
    check_number(owner, "grads", grads, parameters)
    return check_shapes(owner, "grads", _map(_dense, grads, parameters), parameters)


def check_gradients_outside(owner: str, grads: tuple, parameters: tuple) -> tuple:
    """Do what `check_gradients` does, outside of graphs, where MindSpore's maps take longer than a small graph."""
    grads = tuple(grads)
    check_without_loss(owner, grads, parameters)
    if any(isinstance(gradient, tuple) for gradient in grads):  # of a function with ms.jit: indices, values, shape
        raise ValueError(f"For '{owner}', 'grads' must be dense Tensors, but got sparse ones. {_USE_EMBEDDING}")
    if not all(isinstance(gradient, ms.Tensor) for gradient in grads):
        return check_gradients(owner, grads, parameters)
    check_not_traced(owner)
    check_number(owner, "grads", grads, parameters)
    _raise_other_shapes(owner, "grads", grads, parameters, _DIFFERENTIATE)
    return grads


def check_without_loss(owner: str, grads: tuple, parameters: tuple) -> None:
    """Raise an error for the complete result of `ms.value_and_grad`."""
    if len(grads) == 2 and isinstance(grads[1], (tuple, list)) and len(grads[1]) == len(parameters):
        raise ValueError(
            f"For '{owner}', 'grads' must be the gradients alone, but got a pair of a loss and gradients. "
            "Write loss, grads = grad_fn(...)."
        )


_is_tensor = ops.MultitypeFuncGraph("is_tensor")


@_is_tensor.register("Tensor")
@_is_tensor.register("Number")
def _one_is_tensor(value: Tensor) -> bool:
    return isinstance(value, ms.Tensor)


def are_tensors(values: tuple) -> bool:
    """Return whether these are Tensors, and no Python numbers. Asked as a whole: see `check_shapes`."""
    return False not in _map(_is_tensor, values)


def check_number(owner: str, name: str, tensors: tuple, parameters: tuple, remedy: str = _DIFFERENTIATE) -> None:
    """Raise an error unless the numbers of tensors and of the optimizer's parameters are equal."""
    if len(tensors) != len(parameters):
        raise ValueError(
            f"For '{owner}', '{name}' must have one tensor for each of the optimizer's {len(parameters)} parameters, "
            f"but got {len(tensors)}. {remedy}"
        )


def check_shapes(owner: str, name: str, tensors: tuple, parameters: tuple, remedy: str = _DIFFERENTIATE) -> tuple:
    """Return `tensors`, or raise an error if their shapes differ from those of the parameters.

    In a graph MindSpore prints a warning if the returned value is not used.
    """
    # Compared as a whole: MindSpore compiles each round of a loop inside the one before, and at most 1,000.
    if _map(_shape, tensors) != _map(_shape, parameters):
        _raise_other_shapes(owner, name, tensors, parameters, remedy)
    return tensors


def _raise_other_shapes(owner: str, name: str, tensors: tuple, parameters: tuple, remedy: str) -> None:
    for tensor, parameter in zip(tensors, parameters):
        if tensor.shape != parameter.shape:
            if remedy == _DIFFERENTIATE and len(tensor.shape) == 2 and tensor.shape[1:] == parameter.shape[1:]:
                remedy = f"{_DIFFERENTIATE} {_USE_EMBEDDING}"
            raise ValueError(
                f"For '{owner}', '{name}' must have the shapes of the optimizer's parameters, but got "
                f"{tensor.shape} for {parameter.shape}. {remedy}"
            )


def check_weight(owner: str, value: Any) -> Tensor:
    """Return the weight of a micro-batch for `add_weighted`, or raise an error if it is not one number."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.number, ms.Tensor)):
        raise TypeError(
            f"For '{owner}', 'weight' must be a number or a Tensor with one element, not a NumPy array, but got "
            f"{value}. Write float(weight)."
        )
    if not isinstance(value, ms.Tensor) and not value >= 0:
        raise ValueError(f"For '{owner}', 'weight' must be a number >= 0, but got {value}.")
    if isinstance(value, ms.Tensor) and value.size != 1:
        raise ValueError(f"For '{owner}', 'weight' must be one number, but got a Tensor of shape {value.shape}.")
    return ops.reshape(value, ()) if isinstance(value, ms.Tensor) and value.shape else value


def check_dense(owner: str, network: nn.Cell, parameters: tuple) -> None:
    """Raise an error if gradients of these parameters are sparse: those of the rows of an embedding alone."""
    trained = {id(parameter) for parameter in parameters}
    for name, cell in network.cells_and_names():
        is_lookup = any(getattr(primitive, "name", "") == _SPARSE for primitive in primitives_of(cell))
        if is_lookup and any(id(parameter) in trained for parameter in cell.get_parameters()):
            rule = "one with dense gradients"
            _check.raise_invalid(ValueError, owner, "network", rule, f"the sparse ones of '{name}'", _USE_EMBEDDING)


# Arithmetic


def zero_where(conditions: tuple[bool, ...], gradients: tuple) -> tuple:
    """Return `gradients` with zeros where a condition, which is constant in a graph, is true."""
    return _map(_zero_if, conditions, gradients)


def add(total: tuple, gradients: tuple) -> tuple:
    """Add `gradients` to the Parameters of `total`, in the Parameters' type."""
    return _map(_add, total, gradients)


def add_weighted(total: tuple, gradients: tuple, weight: Tensor) -> tuple:
    """Add `weight` times `gradients` to the Parameters of `total`, in the Parameters' type."""
    return _map(ops.partial(_add_weighted, ops.cast(weight, ms.float32)), total, gradients)


def add_no_nan(total: tuple, gradients: tuple, weight: Tensor) -> tuple:
    """Do what `add_weighted` does; a weight of 0 adds 0 also for NaN."""
    return _map(ops.partial(_add_no_nan, weight), total, gradients)


def multiply_no_nan(gradients: tuple, factor: Tensor) -> tuple:
    """Return the gradients times a factor, in float32; a factor of 0 gives 0 also for NaN."""
    return _map(ops.partial(_multiply_no_nan, factor), gradients)


def clear(total: tuple, finite: bool = False) -> tuple:
    """Assign zero to every Parameter of `total`. What is `finite` is cancelled, without zeros of the model size."""
    return _map(_clear_finite if finite else _clear, total)


def multiply(gradients: tuple, factor: Tensor) -> tuple:
    """Return `gradients` times one scalar, in float32."""
    return _map(ops.partial(_multiply, factor), gradients)


def multiply_in_place(total: tuple, factor: Tensor) -> tuple:
    """Multiply the Parameters of `total` by one scalar, without a second copy of the gradients in memory."""
    return _map(ops.partial(_multiply_in_place, factor), total)


def in_float32(gradients: tuple) -> tuple:
    """Return `gradients` in float32; nothing is done where they are."""
    return _map(_in_float32, gradients)


def stacked(numbers: tuple) -> Tensor:
    """Return numbers, each a Tensor of one element or a Python number, as one row in float32."""
    return ops.stack(_map(_as_scalar, numbers))


def cast_like(gradients: tuple, parameters: tuple) -> tuple:
    """Return `gradients` cast to the types of `parameters`; nothing is done where the types agree."""
    return _map(_cast_like, gradients, parameters)


def update_averages(averages: tuple, values: tuple, decay: Tensor) -> tuple:
    """Multiply the Parameters of `averages` by the scalar `decay`, and add 1 - `decay` times `values`."""
    return _map(ops.partial(_update_average, decay), averages, values)


def all_finite(gradients: tuple) -> Tensor:
    """Return whether all elements are finite: then their sum is."""
    return ops.isfinite(ops.addn(_map(_sum, gradients)))


def sum_of_squares(gradients: tuple) -> Tensor:
    """Return the sum of the squares of all elements."""
    if _on_cpu():
        norms = _map(_row_norms, gradients)
        return mint.sum(ops.square(ops.cat(norms) if len(norms) > 1 else norms[0]))
    return ops.addn(_map(_squares, gradients))


def global_norm(gradients: tuple, after: Any = None) -> Tensor:
    """Return the 2-norm of all elements; not finite if an element is not finite, or if the norm exceeds 1.8e19.

    `after` is what a norm over several ranks would be sent after; here nothing is sent.
    """
    return ops.sqrt(sum_of_squares(gradients))


def columns(rows: Tensor, start: int, stop: int) -> Tensor:
    """Return the elements from `start` up to but not including `stop`, of one row or of each row.

    A full range is not sliced: on MindSpore's CPU a full-range slice is 60 times slower than a partial one.
    """
    if stop - start == rows.shape[-1]:
        return rows
    return rows[start:stop] if rows.ndim == 1 else rows[:, start:stop]


def flattened(tensors: tuple) -> Tensor:
    """Return all elements as one flat float32 tensor."""
    rows = [ops.reshape(ops.cast(tensor, ms.float32), (-1,)) for tensor in tensors]
    return ops.cat(rows) if len(rows) > 1 else rows[0]


def unflattened(row: Tensor, like: tuple) -> tuple:
    """Split a flat tensor into tensors with the shapes of `like`."""
    tensors: tuple = ()
    start = 0
    for tensor in like:
        stop = start + tensor.size
        tensors = (*tensors, ops.reshape(columns(row, start, stop), tensor.shape))
        start = stop
    return tensors
