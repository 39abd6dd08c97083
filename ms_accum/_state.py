"""What holds what a window accumulates?"""

from __future__ import annotations

import itertools
import sys
import weakref
from typing import Any, Callable

import mindspore as ms
from mindspore import Parameter, Tensor
from mindspore.common.initializer import initializer

from . import _check

_made = itertools.count()
_said: dict[int, dict[str, Any]] = {}
"""What the Cells with some accumulators were given, by the identity of the first of these while it lives."""


def unique_name(kind: str) -> str:
    """Return a name for one owner's state: unique in the process, stable from run to run."""
    return f"{kind}_{next(_made)}"


def state(name: str, value: Any, dtype: Any) -> Parameter:
    """Return a scalar Parameter that no optimizer trains."""
    return Parameter(Tensor(value, dtype), name=name, requires_grad=False)


def seen(parameter: Parameter, convert: Callable[[Any], Any]) -> Any:
    """Return its value; where MindSpore compiles, the Parameter: a value would be a constant of the compilation."""
    reader = sys._getframe(2).f_globals.get("__name__", "")  # of the property that asks
    return parameter if reader.partition(".")[0] == "mindspore" else convert(parameter.asnumpy())


def agreed(owner: str, accumulators: Any, **said: Any) -> None:
    """Raise unless the Cells that share accumulators were all given the same."""
    first = accumulators[0]
    if id(first) not in _said:
        _said[id(first)] = said
        weakref.finalize(first, _said.pop, id(first))
    known = _said[id(first)]
    for name, value in said.items():
        if known[name] != value:
            rule = f"{known[name]}, as in the other Cell that has this 'grad_sum'"
            _check.refuse(ValueError, owner, name, rule, value, "Else make other accumulators.")


def loss_scale(optimizer: Any) -> float:
    """Return the scale that the optimizer takes out of its gradients by itself."""
    return float(getattr(optimizer, "loss_scale", 1.0))


def new_grad_sum(name: str, parameters: Any) -> tuple:
    """Return one float32 accumulator for each parameter, whatever the parameter's type.

    A plain tuple: of a ParameterTuple a Cell makes weights of its own, and saves them with the model.
    """
    return tuple(
        Parameter(initializer("zeros", p.shape, ms.float32), name=f"{name}.grad_sum.{p.name}", requires_grad=False)
        for p in parameters
    )
