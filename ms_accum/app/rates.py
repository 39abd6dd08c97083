"""Learning rates for a larger effective batch, and rates by update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Tensor, ops
from mindspore.nn.learning_rate_schedule import LearningRateSchedule

from .. import _check

RULES = ("linear", "sqrt")


class _ScaledSchedule(LearningRateSchedule):
    """A schedule times a constant; a subclass, because optimizers accept nothing else."""

    def __init__(self, schedule: LearningRateSchedule, factor: float):
        super().__init__()
        self.schedule = schedule
        self.factor = factor

    def construct(self, global_step: Any) -> Any:
        return self.schedule(global_step) * self.factor


def scale_learning_rate(lr: Any, base_batch: int, batch: int, rule: str = "linear") -> Any:
    """Scale a learning rate chosen for `base_batch` to the effective batch `batch`.

    Args:
        lr (Union[float, list, tuple, LearningRateSchedule]): the learning rate for `base_batch`.
        base_batch (int): the batch size for which `lr` was chosen.
        batch (int): the effective batch: rows of a micro-batch times micro-batches in a window times ranks.
        rule (str): ``"linear"`` multiplies by ``batch / base_batch`` (usual for SGD and Momentum),
            ``"sqrt"`` by its square root (usual for the Adam family). Default: ``"linear"``.

    Returns:
        Union[float, list, tuple, LearningRateSchedule], the scaled learning rate, of the same kind as `lr`.

    Raises:
        TypeError: If `lr` has another type, or a batch size is not an int.
        ValueError: If a batch size is less than 1, or `rule` is neither ``"linear"`` nor ``"sqrt"``.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from ms_accum import scale_learning_rate
        >>> scale_learning_rate(0.1, base_batch=32, batch=128)
        0.4
        >>> scale_learning_rate([0.25, 0.5], 32, 128, rule="sqrt")
        [0.5, 1.0]
    """
    owner = "scale_learning_rate"
    ratio = _check.positive_int(owner, "batch", batch) / _check.positive_int(owner, "base_batch", base_batch)
    factor = ratio if _check.one_of(owner, "rule", rule, RULES) == "linear" else math.sqrt(ratio)
    if isinstance(lr, (list, tuple)):
        return type(lr)(value * factor for value in lr)
    if isinstance(lr, LearningRateSchedule):
        return _ScaledSchedule(lr, factor)
    return _check.positive_number(owner, "lr", lr) * factor


class _RateByUpdate(LearningRateSchedule):
    """A schedule with one rate per update; the last rate is used for all later updates."""

    def __init__(self, rates: Sequence[float]):
        super().__init__()
        self.rates = Tensor(rates, ms.float32)
        self.last = len(rates) - 1

    def construct(self, global_step: Any) -> Any:
        return self.rates[ops.minimum(global_step, self.last)]


def rate_by_update(rates: Sequence[float]) -> Any:
    """Return an optimizer's `learning_rate` with one rate per update; the last is used for all later updates."""
    return rates[0] if len(rates) == 1 else _RateByUpdate(rates)
