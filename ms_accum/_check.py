"""How do we word a bad argument?"""

from __future__ import annotations

import math
from numbers import Integral, Real
from typing import Any, NoReturn

import mindspore as ms
from mindspore import nn
from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer

# Measured on the CPU wheel: these construct without complaint and fail inside their first update, after
# the user has waited for a whole window. Each comes with the optimizer to take instead.
_NOT_ON_CPU = {
    "mindspore.nn.optim.lamb.Lamb": "nn.AdamWeightDecay",
    "mindspore.nn.optim.lars.LARS": "nn.Momentum",
    "mindspore.mint.optim.adamw.AdamW": "mindspore.experimental.optim.AdamW",
    "mindspore.mint.optim.fused_adamw.FusedAdamW": "mindspore.experimental.optim.AdamW",
}

_DIFFERENTIATE = "Differentiate with respect to 'optimizer.parameters'."


def refuse(error: type[Exception], owner: str, name: str, rule: str, value: Any, remedy: str = "") -> NoReturn:
    """Raise `error` in the one form that every message of this package has."""
    message = f"For '{owner}', '{name}' must be {rule}, but got {value}."
    raise error(f"{message} {remedy}".rstrip())


def positive_int(owner: str, name: str, value: Any) -> int:
    """Return `value` as an int, or raise because it is not an int >= 1."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        refuse(TypeError, owner, name, "an int >= 1", f"{value!r} ({type(value).__name__})")
    if value < 1:
        refuse(ValueError, owner, name, "an int >= 1", value)
    return int(value)


def positive_number(owner: str, name: str, value: Any) -> float:
    """Return `value` as a float, or raise because it is not a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, Real):
        refuse(TypeError, owner, name, "a number > 0", f"{value!r} ({type(value).__name__})")
    value = float(value)
    if not (math.isfinite(value) and value > 0):
        refuse(ValueError, owner, name, "a finite number > 0", value)
    return value


def one_of(owner: str, name: str, value: Any, choices: tuple[str, ...]) -> str:
    """Return `value`, or raise because it is none of `choices`."""
    if value not in choices:
        refuse(ValueError, owner, name, "one of " + ", ".join(map(repr, choices)), repr(value))
    return value


def instance(owner: str, name: str, value: Any, kind: type | tuple[type, ...], rule: str) -> Any:
    """Return `value`, or raise because it is not a `kind`, which `rule` says in words."""
    if not isinstance(value, kind):
        refuse(TypeError, owner, name, rule, type(value).__name__)
    return value


def inner_of(value: Any) -> Any:
    """Return the optimizer that does the work: the one inside, where the state is dealt out."""
    return getattr(value, "inner", value)


def is_dealt_out(value: Any) -> bool:
    """Return whether an optimizer has its state in parts on several ranks."""
    return inner_of(value) is not value and value.group is not None


def optimizer(owner: str, value: Any) -> Any:
    """Return `value`, or raise because it is no optimizer or one that this device can't run."""
    instance(
        owner, "optimizer", inner_of(value), (nn.Optimizer, ExperimentalOptimizer, nn.LARS), "a MindSpore optimizer"
    )
    frozen = [parameter.name for parameter in value.parameters if not parameter.requires_grad]
    if frozen:
        rule = "one of parameters that require gradients"
        refuse(ValueError, owner, "optimizer", rule, f"'{frozen[0]}', which is frozen", "Freeze first, then make it.")
    if ms.get_context("device_target") == "CPU":
        kind = type(value)
        instead = _NOT_ON_CPU.get(f"{kind.__module__}.{kind.__name__}")
        if instead:
            rule = "one that MindSpore runs on CPU"
            refuse(ValueError, owner, "optimizer", rule, kind.__name__, f"Use {instead}, or another device.")
        if isinstance(value, nn.AdaFactor) and value.is_group:
            # No error here: it runs and leaves the parameters as they are.
            remedy = "Use it without groups, or nn.Adam."
            refuse(ValueError, owner, "optimizer", "one that trains", "AdaFactor with parameter groups", remedy)
    return value


def trains(owner: str, optimizer: Any, network: nn.Cell) -> None:
    """Refuse the optimizer of another network. One that trains more than the network shows is the user's business."""
    shown = {id(parameter) for parameter in network.get_parameters()}
    if shown and not any(id(parameter) in shown for parameter in optimizer.parameters):
        refuse(ValueError, owner, "optimizer", "one of the network's parameters", "one that has none of them")


def same_layout(owner: str, name: str, tensors: Any, parameters: Any, remedy: str = _DIFFERENTIATE) -> None:
    """Raise unless `tensors` are as many, and of the same shapes, as the optimizer's parameters.

    Runs on the host and, because shapes are constants there, while a graph is compiled.
    """
    if len(tensors) != len(parameters):
        raise ValueError(
            f"For '{owner}', '{name}' must be as many as the optimizer's {len(parameters)} parameters, "
            f"but got {len(tensors)}. {remedy}"
        )
    for tensor, parameter in zip(tensors, parameters):
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"For '{owner}', '{name}' must have the shapes of the optimizer's parameters, but got "
                f"{tensor.shape} for {parameter.shape}. {remedy}"
            )
