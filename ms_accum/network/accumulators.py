"""Where are the gradients of a window accumulated?"""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any, Callable

import mindspore as ms
from mindspore import Parameter, Tensor, ops
from mindspore.common.initializer import initializer

from .. import _check

_made = itertools.count()
_said: dict[int, dict[str, Any]] = {}
"""The settings of Cells that share accumulators, by the id of the first accumulator while it exists."""


def unique_name(kind: str) -> str:
    """Return a name for the state of an object: unique in the process, and the same in every run."""
    return f"{kind}_{next(_made)}"


def state(name: str, value: Any, dtype: Any) -> Parameter:
    """Return a scalar Parameter that no optimizer trains."""
    return Parameter(Tensor(value, dtype), name=name, requires_grad=False)


def seen(parameter: Parameter, convert: Callable[[Any], Any]) -> Any:
    """Return the Parameter's value; while MindSpore compiles the Parameter, as a value would become a constant."""
    reader = sys._getframe(2).f_globals.get("__name__", "")  # the caller of the property
    return parameter if reader.partition(".")[0] == "mindspore" else convert(parameter.asnumpy())


def agreed(owner: str, accumulators: Any, **said: Any) -> None:
    """Raise an error unless all Cells that share these accumulators have equal settings."""
    first = accumulators[0]
    if id(first) not in _said:
        _said[id(first)] = said
        weakref.finalize(first, _said.pop, id(first))
    known = _said[id(first)]
    for name, value in said.items():
        if known[name] != value:
            rule = f"{known[name]}, as in the other Cell with this 'grad_sum'"
            _check.refuse(ValueError, owner, name, rule, value, "Otherwise use separate accumulators.")


def loss_scale(optimizer: Any) -> float:
    """Return the loss scale by which the optimizer itself divides its gradients."""
    return float(getattr(optimizer, "loss_scale", 1.0))


def new_grad_sum(name: str, parameters: Any) -> tuple:
    """Return one float32 accumulator for each parameter, whatever the parameter's type.

    They are in a plain tuple: a Cell would treat a ParameterTuple as its weights, and save it with the model.
    """
    return tuple(
        Parameter(initializer("zeros", p.shape, ms.float32), name=f"{name}.grad_sum.{p.name}", requires_grad=False)
        for p in parameters
    )


def emptied(empty: Any, grad_sum: tuple, weight_sum: tuple, skips: Any = None) -> bool:
    """Set the accumulators to zero with `empty`, a function of `tree`, and the counts of `skips`."""
    empty(grad_sum)
    if skips is not None:
        skips.clear()
    if weight_sum:
        ops.assign(weight_sum[0], Tensor(0.0, ms.float32))
    return True


def hidden(weight_sum: Parameter | None) -> tuple:
    """Wrap a Parameter in a tuple, so that a Cell does not treat it as one of its weights."""
    return () if weight_sum is None else (weight_sum,)
