"""Parameters that hold the state of this package's objects, and are trained by no optimizer."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Callable, TypeVar

import mindspore as ms
from mindspore import Parameter, Tensor
from mindspore.common.initializer import initializer

_numbers = itertools.count()
_T = TypeVar("_T")


def unique_name(kind: str) -> str:
    """Return a name for the state of an object: unique in the process, and the same in every run."""
    return f"{kind}_{next(_numbers)}"


def state(name: str, value: Any, dtype: Any) -> Parameter:
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
        initial = parameter.init_mode if parameter.has_init else None
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
