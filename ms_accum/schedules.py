"""Window sizes that grow during a run, and learning rates for a larger effective batch."""

from __future__ import annotations

import math
from typing import Any

from . import _check
from .network.private import LearningRateSchedule


def ramp_up(first: int, last: int, samples: int, *, micro_batch_size: int) -> dict[int, int]:
    """Return window sizes that grow linearly with the number of samples seen, from `first` to `last`.

    The data is one stream: short windows at the ends of epochs are not counted.

    Args:
        first (int): the number of micro-batches in the first window.
        last (int): the number of micro-batches in a window after `samples` samples.
        samples (int): the number of samples over which the window grows.
        micro_batch_size (int): the rows of a micro-batch, on all ranks together.

    Returns:
        dict[int, int], the window sizes by their first update; pass it as `mini_steps`, `accumulate_step` or
        `gradient_accumulation_steps`.

    Raises:
        TypeError: If an argument is not an int.
        ValueError: If an argument is less than 1, or `last` less than `first`.

    Examples:
        >>> from ms_accum import ramp_up
        >>> ramp_up(1, 4, 1000, micro_batch_size=50)
        {0: 1, 7: 2, 11: 3, 13: 4}
    """
    arguments = {"first": first, "last": last, "samples": samples, "micro_batch_size": micro_batch_size}
    first, last, samples, rows = (_check.positive_int("ramp_up", name, value) for name, value in arguments.items())
    if last < first:
        _check.raise_invalid(ValueError, "ramp_up", "last", f">= {first}, the size of the first window", last)
    sizes, size, read, update = {0: first}, first, 0, 0
    while size < last:
        read, update = read + size, update + 1
        grown = min(last, first + (last - first) * read * rows // samples)
        if grown > size:
            sizes[update] = size = grown
    return sizes


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
    factor = ratio if _check.one_of(owner, "rule", rule, ("linear", "sqrt")) == "linear" else math.sqrt(ratio)
    if isinstance(lr, (list, tuple)):
        return type(lr)(value * factor for value in lr)
    if isinstance(lr, LearningRateSchedule):
        return _ScaledSchedule(lr, factor)
    return _check.positive_number(owner, "lr", lr) * factor


class _ScaledSchedule(LearningRateSchedule):
    """A schedule times a constant; a subclass, because optimizers accept nothing else."""

    def __init__(self, schedule: LearningRateSchedule, factor: float):
        super().__init__()
        self.schedule = schedule
        self.factor = factor

    def construct(self, global_step: Any) -> Any:
        return self.schedule(global_step) * self.factor
