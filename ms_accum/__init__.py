"""Exact gradient accumulation for MindSpore.

Each public name is imported on first use: the import of MindSpore takes seconds, and a program that only checks its
flags does not need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # for type checkers and editors
    from .accumulator import Accumulator as Accumulator
    from .driver import GradientAccumulation as GradientAccumulation
    from .engine.cells import TrainClear as TrainClear
    from .engine.cells import TrainForwardBackward as TrainForwardBackward
    from .engine.cells import TrainOptim as TrainOptim
    from .engine.config import Options as Options
    from .engine.ema import Ema as Ema
    from .layers import CountedDropout as CountedDropout
    from .layers import batch_to_group_norm as batch_to_group_norm
    from .layers import freeze_batch_norm as freeze_batch_norm
    from .layers import replace_dropout as replace_dropout
    from .loss.terms import Terms as Terms
    from .loss.terms import window_factors as window_factors
    from .micro_batch_size import MicroBatch as MicroBatch
    from .micro_batch_size import find_micro_batch_size as find_micro_batch_size
    from .model_step import AccumulatedTrainStep as AccumulatedTrainStep
    from .network.runtime import tune_cpu as tune_cpu
    from .ranks.group import Group as Group
    from .ranks.group import own_group as own_group
    from .ranks.group import total as total
    from .ranks.zero import ZeroOptimizer as ZeroOptimizer
    from .saving.checkpointer import Checkpointer as Checkpointer
    from .saving.checkpointer import Stopped as Stopped
    from .saving.model_file import CheckpointError as CheckpointError
    from .schedules import ramp_up as ramp_up
    from .schedules import scale_learning_rate as scale_learning_rate
    from .training.callbacks import UpdateRecord as UpdateRecord
    from .training.coupled import CoupledLoss as CoupledLoss
    from .training.evaluation import evaluate as evaluate
    from .training.loop import ResumableLoop as ResumableLoop
    from .training.model_callbacks import FlushTail as FlushTail
    from .training.model_callbacks import SaveStates as SaveStates
    from .training.sizes import split_batch as split_batch
    from .training.sizes import updates_per_epoch as updates_per_epoch
    from .training.token_batches import TokenBatches as TokenBatches
    from .verification import Verification as Verification
    from .verification import verify as verify

__version__ = "0.1.0"

_MODULES = {
    "AccumulatedTrainStep": "model_step",
    "Accumulator": "accumulator",
    "CheckpointError": "saving.model_file",
    "Checkpointer": "saving.checkpointer",
    "CountedDropout": "layers",
    "CoupledLoss": "training.coupled",
    "Ema": "engine.ema",
    "FlushTail": "training.model_callbacks",
    "GradientAccumulation": "driver",
    "Group": "ranks.group",
    "MicroBatch": "micro_batch_size",
    "Options": "engine.config",
    "ResumableLoop": "training.loop",
    "SaveStates": "training.model_callbacks",
    "Stopped": "saving.checkpointer",
    "Terms": "loss.terms",
    "TokenBatches": "training.token_batches",
    "TrainClear": "engine.cells",
    "TrainForwardBackward": "engine.cells",
    "TrainOptim": "engine.cells",
    "UpdateRecord": "training.callbacks",
    "Verification": "verification",
    "ZeroOptimizer": "ranks.zero",
    "batch_to_group_norm": "layers",
    "evaluate": "training.evaluation",
    "find_micro_batch_size": "micro_batch_size",
    "freeze_batch_norm": "layers",
    "own_group": "ranks.group",
    "ramp_up": "schedules",
    "replace_dropout": "layers",
    "scale_learning_rate": "schedules",
    "split_batch": "training.sizes",
    "total": "ranks.group",
    "tune_cpu": "network.runtime",
    "updates_per_epoch": "training.sizes",
    "verify": "verification",
    "window_factors": "loss.terms",
}
__all__ = list(_MODULES)


if not TYPE_CHECKING:  # a type checker would take every name for an object

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
        value = getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
