"""The loss scale, which keeps small gradients in float16; constant or dynamic."""

from __future__ import annotations

import math
import weakref
from typing import Any, Callable

import mindspore as ms
from mindspore import Parameter, Tensor, amp, ops

from .. import _check
from ..network.state import attached, state, unique_name

_FIXED = (amp.StaticLossScaler, amp.FixedLossScaleManager)
_DYNAMIC = (amp.DynamicLossScaler, amp.DynamicLossScaleManager)
_RULE = "a number, or a loss scaler or a loss scale manager of mindspore.amp"


@ms.jit_class
class DynamicScale:
    """A dynamic loss scale. It is constant inside a window, and may change at its end.

    An overflow is a gradient that is not finite although the loss of the window is finite. That window is skipped, and
    the scale is divided by `factor`. After `window` updates in a row the scale is multiplied by `factor`. A scale of 1
    is not lowered: a gradient that is not finite then has another cause.

    Args:
        value (Parameter): the scale, float32.
        good (Parameter): the number of updates since the last change, int32.
        factor (float): the factor by which the scale changes.
        window (int): the number of updates after which the scale grows.
    """

    def __init__(self, value: Parameter, good: Parameter, factor: float, window: int):
        self.value, self.good = value, good
        self.factor, self.window = float(factor), int(window)
        self.overflows = state(f"{unique_name('loss_scale')}.overflows", 0, ms.int32)
        self.optimizer: Callable[[], Any] = lambda: None
        """Callable, a weak reference to the optimizer that uses it."""

    def __call__(self, end: Any) -> Any:
        """Change the scale: a stage of a window's end. If the loss is not known, what is not finite is an overflow."""
        weight, loss, updated = end["weight_sum"], end["loss"], end["keep"]
        if weight is None:
            weight = end["counted"]
        if weight is not None:  # 0/0 if all weights are 0: then the scale is not the cause
            loss = (weight if loss is None else loss) / weight
        overflow = ops.logical_not(ops.isfinite(end["norm"]))
        if loss is not None:
            overflow = ops.logical_and(overflow, ops.isfinite(loss))
        if end["skip_counts"] is not None:  # left out although their loss was finite
            overflow = ops.logical_or(overflow, end["skip_counts"][1] > 0)
        overflow = ops.logical_and(overflow, self.value > 1.0)
        good = self.good + ops.cast(updated, ms.int32)
        grown = self.value * self.factor
        grows = ops.logical_and(good >= self.window, ops.isfinite(grown))
        value = ops.where(overflow, ops.maximum(self.value / self.factor, Tensor(1.0, ms.float32)), self.value)
        resets = ops.logical_or(overflow, good >= self.window)
        ops.assign(self.value, ops.where(ops.logical_and(grows, ops.logical_not(overflow)), grown, value))
        ops.assign(self.good, ops.where(resets, ops.zeros_like(good), good))
        ops.assign_add(self.overflows, ops.cast(overflow, ms.int32))
        return end

    @property
    def state(self) -> dict[str, Parameter]:
        """dict, its Parameters in a training state, by name."""
        return {"value": self.value, "good": self.good, "overflows": self.overflows}


def own_scale(optimizer: Any) -> float:
    """Return the loss scale by which the optimizer itself divides its gradients."""
    return float(getattr(optimizer, "loss_scale", 1.0))


def scale_of(owner: str, loss_scale: Any, optimizer: Any) -> tuple[float, DynamicScale | None]:
    """Return the loss scale for the user's argument: the constant, 1 if there is none, and the dynamic scale, or None.

    Args:
        owner (str): the name used in error messages.
        loss_scale (Any): the argument.
        optimizer (Optimizer): must not have its own `loss_scale`, by which it would also divide.

    Raises:
        TypeError: If the argument has another type.
        ValueError: If it is out of range, or the optimizer has its own loss scale.
    """
    if loss_scale is None:
        return 1.0, None
    optimizer_scale = own_scale(optimizer)
    if optimizer_scale != 1.0:
        rule = f"None for an optimizer with loss_scale={optimizer_scale:g}"
        remedy = "It divides by that scale itself: give the loss scale to one of the two only."
        _check.raise_invalid(ValueError, owner, "loss_scale", rule, loss_scale, remedy)
    if isinstance(loss_scale, _DYNAMIC):
        return 1.0, _shared_scale(owner, loss_scale, optimizer)
    return _check.positive_number(owner, "loss_scale", _number(owner, loss_scale)), None


def _number(owner: str, loss_scale: Any) -> Any:
    if not isinstance(loss_scale, _FIXED):
        return _check.instance(owner, "loss_scale", loss_scale, (int, float), _RULE)
    value = loss_scale.scale_value if isinstance(loss_scale, amp.StaticLossScaler) else loss_scale.get_loss_scale()
    return float(value.asnumpy()) if isinstance(value, Tensor) else value


def _shared_scale(owner: str, scaler: Any, optimizer: Any) -> DynamicScale:
    """Return the scale that all Cells with this object share.

    Two optimizers can't share one: a window of the first would change it inside a window of the other.
    """
    scale = attached(scaler, "_ms_accum_scale", lambda: _new_scale(owner, scaler))
    if scale.optimizer() is None:
        scale.optimizer = weakref.ref(optimizer)
    elif scale.optimizer() is not optimizer:
        rule = "a separate one for each optimizer"
        _check.raise_invalid(ValueError, owner, "loss_scale", rule, "one that another optimizer uses")
    return scale


def _new_scale(owner: str, scaler: Any) -> DynamicScale:
    name = unique_name("dynamic_loss_scale")
    if isinstance(scaler, amp.DynamicLossScaler):
        # The Parameter of the user's object, because the user's code multiplies the loss by it and may read it.
        value, initial = scaler.scale_value, float(scaler.scale_value.asnumpy())
        value.requires_grad, value.name = False, f"{name}.value"
    else:
        initial = float(scaler.get_loss_scale())
        value = state(f"{name}.value", initial, ms.float32)
    if not (math.isfinite(initial) and initial >= 1):
        _check.raise_invalid(ValueError, owner, "loss_scale", "finite and >= 1", initial)
    return DynamicScale(value, state(f"{name}.good", 0, ms.int32), scaler.scale_factor, scaler.scale_window)
