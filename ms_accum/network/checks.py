"""Can this optimizer, and can these gradients, be used here?"""

from __future__ import annotations

import inspect
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn, ops
from mindspore.experimental.optim import Optimizer as ExperimentalOptimizer
from mindspore.ops.primitive import jit_context

from .. import _check
from . import tree

# Tested with the CPU wheel: these optimizers can be constructed, but fail in their first update, after a complete
# window. Each is listed with an optimizer to use instead.
_NOT_ON_CPU = {
    "mindspore.nn.optim.lamb.Lamb": "nn.AdamWeightDecay",
    "mindspore.nn.optim.lars.LARS": "nn.Momentum",
    "mindspore.mint.optim.adamw.AdamW": "mindspore.experimental.optim.AdamW",
    "mindspore.mint.optim.fused_adamw.FusedAdamW": "mindspore.experimental.optim.AdamW",
}

_NOT_IN_PYNATIVE = ("mindspore.mint.optim.sgd", "mindspore.mint.optim.adam")
_DIFFERENTIATE = "Differentiate with respect to 'optimizer.parameters'."


def scheduler(owner: str, value: Any, optimizer: Any) -> Any:
    """Return the learning-rate scheduler, or raise an error if it is not valid; None means no scheduler."""
    if value is None:
        return value
    step = getattr(value, "step", None)
    arguments = inspect.signature(step).parameters.values() if step else ()
    needed = [each for each in arguments if each.default is each.empty]
    if step is None or needed or getattr(value, "optimizer", None) is not optimizer:
        rule = "one of mindspore.experimental.optim.lr_scheduler for this optimizer, whose 'step()' needs no argument"
        _check.refuse(TypeError, owner, "scheduler", rule, type(value).__name__)
    if any("lr_float" in group for group in value.optimizer.param_groups):
        remedy = "Use mindspore.experimental.optim.SGD."
        _check.refuse(TypeError, owner, "scheduler", "None", "one of mint.optim.SGD, which ignores it", remedy)
    return value


def inner_of(value: Any) -> Any:
    """Return the optimizer that updates: for a `ZeroOptimizer` the inner one."""
    return getattr(value, "inner", value)


def kind_of(value: Any) -> str:
    """Return the optimizer's class name, for a `ZeroOptimizer` that of the inner optimizer."""
    return type(inner_of(value)).__name__


def is_sharded(value: Any) -> bool:
    """Return whether an optimizer's state is sharded over several ranks."""
    return inner_of(value) is not value and value.group is not None


def optimizer(owner: str, value: Any) -> Any:
    """Return `value`, or raise an error if it is not an optimizer or does not run on this device."""
    _check.instance(
        owner, "optimizer", inner_of(value), (nn.Optimizer, ExperimentalOptimizer, nn.LARS), "a MindSpore optimizer"
    )
    frozen = [parameter.name for parameter in value.parameters if not parameter.requires_grad]
    if frozen:
        rule = "one of parameters that require gradients"
        _check.refuse(
            ValueError, owner, "optimizer", rule, f"'{frozen[0]}', which is frozen", "Freeze before you create it."
        )
    if ms.get_context("device_target") == "CPU":
        kind = type(value)
        instead = _NOT_ON_CPU.get(f"{kind.__module__}.{kind.__name__}")
        if instead:
            rule = "one that MindSpore runs on CPU"
            _check.refuse(ValueError, owner, "optimizer", rule, kind.__name__, f"Use {instead}, or another device.")
        if kind.__module__ in _NOT_IN_PYNATIVE and ms.get_context("mode") == ms.PYNATIVE_MODE:
            # MindSpore raises no error: the optimizer runs and does not change the parameters.
            remedy = f"Use graph mode, or mindspore.experimental.optim.{kind.__name__}."
            _check.refuse(
                ValueError,
                owner,
                "optimizer",
                "one that trains",
                f"mint.optim.{kind.__name__} in PyNative mode",
                remedy,
            )
        if isinstance(value, nn.AdaFactor) and value.is_group:
            # MindSpore raises no error here either: the parameters do not change.
            remedy = "Use it without groups, or nn.Adam."
            _check.refuse(ValueError, owner, "optimizer", "one that trains", "AdaFactor with parameter groups", remedy)
    return value


def trains(owner: str, optimizer: Any, network: nn.Cell) -> None:
    """Raise an error if the optimizer has none of the network's parameters; it may have others in addition."""
    shown = {id(parameter) for parameter in network.get_parameters()}
    if shown and not any(id(parameter) in shown for parameter in optimizer.parameters):
        _check.refuse(ValueError, owner, "optimizer", "one of the network's parameters", "one that has none of them")


def same_for_rows(owner: str, value: Any, networks: Iterable[nn.Cell]) -> None:
    """Raise an error if the optimizer has another rule for sparse gradients: accumulated, they are dense.

    For example, FTRL with a dense gradient sets the rows that were not looked up to 0.
    """
    tables = {id(table) for network in networks for table in tree.tables_of(network)}
    looked_up = [id(parameter) in tables for parameter in value.parameters]
    if any(looked_up) and (other := _other_rule(inner_of(value), looked_up)):
        rule = "one that updates equally with the sparse gradients of nn.EmbeddingLookup and with dense ones"
        remedy = "Use nn.Embedding, or nn.Adam without 'weight_decay' for the table."
        _check.refuse(ValueError, owner, "optimizer", rule, other, remedy)


def _other_rule(optimizer: Any, looked_up: Sequence[bool]) -> str:
    """Return what in an optimizer has another rule for sparse gradients, or "".

    Read in MindSpore's source, and compared with it. Optimizers that are not named here have no rule for sparse ones.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, (nn.FTRL, nn.LazyAdam)):
        return kind
    if isinstance(optimizer, nn.Adam) and not optimizer.use_offload:
        if optimizer.use_lazy:
            return f"{kind} with use_lazy=True"
        if optimizer.use_nesterov and not optimizer._is_device:
            return f"{kind} with use_nesterov=True and target='CPU'"
    elif not isinstance(optimizer, nn.ProximalAdagrad):
        return ""
    elif any(each.asnumpy() for each in (optimizer.l1, optimizer.l2)):
        return f"{kind} with 'l1' or 'l2'"
    decays = optimizer.exec_weight_decay and any(map(operator.and_, looked_up, optimizer.decay_flags))
    return f"{kind} with 'weight_decay' for the table" if decays else ""


@ops.constexpr
def not_traced(owner: str) -> bool:
    """Reject MindSpore's tracing, which fixes each branch as first taken, and changes Parameters twice."""
    if jit_context() is not None:
        raise RuntimeError(
            f"For '{owner}', the step must be compiled by ms.jit without capture_mode='trace', which records one call "
            "and replays it: windows would not end where they should."
        )
    return True


def weight(owner: str, value: Any) -> Any:
    """Return the weight of a micro-batch, or raise an error if it is not one number. Also called while compiling."""
    if not isinstance(value, (int, float, np.number, ms.Tensor)):
        raise TypeError(
            f"For '{owner}', 'weight' must be a number or a Tensor with one element, not a NumPy array, but got "
            f"{value}. Write float(weight)."
        )
    if not isinstance(value, ms.Tensor) and not value >= 0:
        raise ValueError(f"For '{owner}', 'weight' must be a number >= 0, but got {value}.")
    if isinstance(value, ms.Tensor) and value.size != 1:
        raise ValueError(f"For '{owner}', 'weight' must be one number, but got a Tensor of shape {value.shape}.")
    return value


def same_number(owner: str, name: str, tensors: Any, parameters: Any, remedy: str = _DIFFERENTIATE) -> None:
    """Raise an error unless the numbers of tensors and of the optimizer's parameters are equal."""
    if len(tensors) != len(parameters):
        raise ValueError(
            f"For '{owner}', '{name}' must have one tensor for each of the optimizer's {len(parameters)} parameters, "
            f"but got {len(tensors)}. {remedy}"
        )


def gradients(owner: str, grads: Any, parameters: Any) -> Any:
    """Return gradients as a tuple of dense tensors; raise an error if they do not match the parameters. In a graph."""
    not_traced(owner)
    grads = tuple(grads)  # `ms.grad` returns a list if it was given one
    same_number(owner, "grads", grads, parameters)
    return same_layout(owner, "grads", tree.dense(grads, parameters), parameters)


def same_layout(owner: str, name: str, tensors: Any, parameters: Any, remedy: str = _DIFFERENTIATE) -> Any:
    """Return `tensors`, or raise an error if their shapes differ from those of the parameters.

    Runs on the host, and while a graph is compiled, where shapes are constants. There MindSpore prints a warning if
    the returned value is not used.
    """
    for tensor, parameter in zip(tensors, parameters):
        if tensor.shape != parameter.shape:
            raise ValueError(
                f"For '{owner}', '{name}' must have the shapes of the optimizer's parameters, but got "
                f"{tensor.shape} for {parameter.shape}. {remedy}"
            )
    return tensors
