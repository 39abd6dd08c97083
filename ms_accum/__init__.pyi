from .accumulator import Accumulator as Accumulator
from .cells import TrainClear as TrainClear
from .cells import TrainForwardBackward as TrainForwardBackward
from .cells import TrainOptim as TrainOptim
from .driver import GradientAccumulation as GradientAccumulation
from .evaluation import evaluate as evaluate
from .fitting.batch_size import MicroBatch as MicroBatch
from .fitting.batch_size import find_micro_batch_size as find_micro_batch_size
from .fitting.batch_size import scale_learning_rate as scale_learning_rate
from .fitting.memory import MemoryReport as MemoryReport
from .fitting.memory import memory_report as memory_report
from .fitting.runtime import tune_cpu as tune_cpu
from .loop import ResumableLoop as ResumableLoop
from .loop import SaveStates as SaveStates
from .ranks.parallel import Group as Group
from .ranks.parallel import own_group as own_group
from .ranks.parallel import total as total
from .ranks.zero import ZeroOptimizer as ZeroOptimizer
from .saving.checkpoint import CheckpointError as CheckpointError
from .saving.checkpointer import Checkpointer as Checkpointer
from .saving.checkpointer import Stopped as Stopped
from .train_step import AccumulatedTrainStep as AccumulatedTrainStep
from .train_step import FlushTail as FlushTail
from .window.ends import split_batch as split_batch
from .window.ends import updates_per_epoch as updates_per_epoch
from .window.record import UpdateRecord as UpdateRecord

__version__: str
