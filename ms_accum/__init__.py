"""Exact gradient accumulation for MindSpore in graph mode."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .accumulator import Accumulator
    from .batch_size import MicroBatch, find_micro_batch_size, scale_learning_rate
    from .cells import TrainClear, TrainForwardBackward, TrainOptim
    from .checkpoint import CheckpointError
    from .checkpointer import Checkpointer, Stopped
    from .driver import GradientAccumulation
    from .memory import MemoryReport, memory_report
    from .metrics import UpdateRecord, evaluate
    from .parallel import Group, own_group, total
    from .runtime import tune_cpu
    from .windows import split_batch, updates_per_epoch
    from .zero import ZeroOptimizer

__all__ = [
    "Accumulator",
    "CheckpointError",
    "Checkpointer",
    "GradientAccumulation",
    "Group",
    "MemoryReport",
    "MicroBatch",
    "Stopped",
    "TrainClear",
    "TrainForwardBackward",
    "TrainOptim",
    "UpdateRecord",
    "ZeroOptimizer",
    "evaluate",
    "find_micro_batch_size",
    "memory_report",
    "own_group",
    "scale_learning_rate",
    "split_batch",
    "total",
    "tune_cpu",
    "updates_per_epoch",
]
__version__ = "0.1.0"

# A name is imported when it is asked for. Not all of the package needs MindSpore, whose import takes seconds and
# hundreds of megabytes: `launch` only watches processes, and `signals` wants to come first.
_HOMES = {
    "Accumulator": "accumulator",
    "CheckpointError": "checkpoint",
    "Checkpointer": "checkpointer",
    "GradientAccumulation": "driver",
    "Group": "parallel",
    "MemoryReport": "memory",
    "MicroBatch": "batch_size",
    "Stopped": "checkpointer",
    "TrainClear": "cells",
    "TrainForwardBackward": "cells",
    "TrainOptim": "cells",
    "UpdateRecord": "metrics",
    "ZeroOptimizer": "zero",
    "evaluate": "metrics",
    "find_micro_batch_size": "batch_size",
    "memory_report": "memory",
    "own_group": "parallel",
    "scale_learning_rate": "batch_size",
    "split_batch": "windows",
    "total": "parallel",
    "tune_cpu": "runtime",
    "updates_per_epoch": "windows",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
    value = getattr(import_module(f".{_HOMES[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
