"""Exact gradient accumulation for MindSpore in graph mode."""

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
