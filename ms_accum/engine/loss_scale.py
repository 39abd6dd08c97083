"""The loss scale, which keeps small gradients in float16; constant or dynamic."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Callable

import mindspore as ms
from mindspore import Parameter, Tensor, amp, ops

from .. import _check
from ..network.parameters import attached, unique_name, untrained

_FIXED = (amp.StaticLossScaler, amp.FixedLossScaleManager)
_DYNAMIC = (amp.DynamicLossScaler, amp.DynamicLossScaleManager)
_RULE = "a number, or a loss scaler or a loss scale manager of mindspore.amp"


@ms.jit_class
class LossScale:
    """A constant loss scale; 1 if there is none.

    Args:
        constant (float): the factor of the loss. Default: 1.0.
    """

    value: Parameter | None = None
    """Optional[Parameter], the scale, if it is dynamic."""
    state: Mapping[str, Parameter] = MappingProxyType({})
    """dict, its Parameters in a training state, by name."""
    changed: Sequence[Parameter] = ()
    """tuple[Parameter], those that the end of a window changes."""
    overflows = 0
    """int, the windows so far that lowered it."""

    def __init__(self, constant: float = 1.0):
        self.constant = constant

    @property
    def number(self) -> float:
        """float, the scale now, on the host."""
        return self.constant

    @property
    def is_used(self) -> bool:
        """bool, whether there is one."""
        return self.constant != 1.0

    @property
    def settings(self) -> float | None:
        """Optional[float], what must be equal in a resumed run, and on all ranks."""
        return None if self.constant == 1.0 else self.constant


@ms.jit_class
class DynamicScale:
    """A dynamic loss scale: what `LossScale` is, and a stage of a window's end, where it may change.

    An overflow is a gradient that is not finite although the loss of the window is finite. That window is skipped, and
    the scale is divided by `factor`. After `window` updates in a row the scale is multiplied by `factor`. A scale of 1
    is not lowered: a gradient that is not finite then has another cause.

    Args:
        value (Parameter): the scale, float32.
        good (Parameter): the number of updates since the last change, int32.
        factor (float): the factor by which the scale changes.
        window (int): the number of updates after which the scale grows.
    """

    constant, is_used = 1.0, True

    def __init__(self, value: Parameter, good: Parameter, factor: float, window: int):
        self.value, self.good = value, good
        self.factor, self.window = float(factor), int(window)
        self.counted = untrained(f"{unique_name('loss_scale')}.overflows", 0, ms.int32)
        self.optimizer: Callable[[], Any] = lambda: None
        """Callable, a weak reference to the optimizer that uses it."""

    def __call__(self, end: Any) -> Any:
        """Change the scale: a stage of a window's end. If the loss is not known, what is not finite is an overflow."""
        weight, updated, losses = end["weight"], end["keep"], end["losses"]
        overflow = ops.logical_not(ops.isfinite(end["norm"]))
        loss = None if losses is None else ops.sum(losses)  # of several terms, one may be what is not finite
        if weight is not None:  # 0/0 if all weights are 0: then the scale is not the cause
            loss = (weight if loss is None else loss) / weight
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
        ops.assign_add(self.counted, ops.cast(overflow, ms.int32))
        return end

    @property
    def number(self) -> float:
        """float, the scale now, on the host."""
        return float(self.value.asnumpy())

    @property
    def overflows(self) -> int:
        """int, the windows so far that lowered it."""
        return int(self.counted.asnumpy())

    @property
    def state(self) -> dict[str, Parameter]:
        """dict, its Parameters in a training state, by name."""
        return {"value": self.value, "good": self.good, "overflows": self.counted}

    @property
    def changed(self) -> Sequence[Parameter]:
        """tuple[Parameter], those that the end of a window changes."""
        return tuple(self.state.values())

    @property
    def settings(self) -> str:
        """str, what must be equal in a resumed run, and on all ranks."""
        return f"dynamic, times {self.factor:g} after {self.window} updates"


def own_scale(optimizer: Any) -> float:
    """Return the loss scale by which the optimizer itself divides its gradients."""
    return float(getattr(optimizer, "loss_scale", 1.0))


def scale_of(owner: str, loss_scale: Any, optimizer: Any) -> LossScale | DynamicScale:
    """Return the loss scale for the user's argument.

    Args:
        owner (str): the name used in error messages.
        loss_scale (Any): the argument.
        optimizer (Optimizer): must not have its own `loss_scale`, by which it would also divide.

    Raises:
        TypeError: If the argument has another type.
        ValueError: If it is out of range, or the optimizer has its own loss scale.
    """
    if loss_scale is None:
        return LossScale()
    optimizer_scale = own_scale(optimizer)
    if optimizer_scale != 1.0:
        rule = f"None for an optimizer with loss_scale={optimizer_scale:g}"
        remedy = "It divides by that scale itself: give the loss scale to one of the two only."
        _check.raise_invalid(ValueError, owner, "loss_scale", rule, loss_scale, remedy)
    if isinstance(loss_scale, _DYNAMIC):
        return _shared_scale(owner, loss_scale, optimizer)
    return LossScale(_check.positive_number(owner, "loss_scale", _number(owner, loss_scale)))


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
        value = untrained(f"{name}.value", initial, ms.float32)
    if not (math.isfinite(initial) and initial >= 1):
        _check.raise_invalid(ValueError, owner, "loss_scale", "finite and >= 1", initial)
    return DynamicScale(value, untrained(f"{name}.good", 0, ms.int32), scaler.scale_factor, scaler.scale_window)
