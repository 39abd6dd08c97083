"""Writes the curves of a run for TensorBoard."""

from __future__ import annotations

import contextlib
import math
import os
import socket
import time
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from mindspore.train import Callback, RunContext

from .. import _check
from ..ranks.group import is_first, own_group
from ..saving.files import absolute
from .metrics import numbers_of

_OWNER = "TensorBoardLog"
_NAMES = {"eval_loss": "loss"}
_NOT_DRAWN = ("correct", "total")  # of an evaluation; its accuracy is drawn
_FLUSH_SECONDS = 1.0  # between two flushes, which wait for the disk


class TensorBoardLog(Callback):
    """Write the curves of a run to a folder for TensorBoard. A step is an update; with several ranks, rank 0 writes.

    It writes ``train/loss``, ``train/lr``, ``train/grad_norm``, ``train/images_per_second``, ``train/skipped`` (windows
    so far) and the results of evaluations, such as ``test/accuracy``. Values that are not finite are left out. A
    resumed run adds to the folder, and replaces the steps that it repeats. If the folder can't be written to, there is
    one warning and training continues. The package tensorboardX must be installed.

    Args:
        folder (str): the folder, one for each run; it is created.

    Raises:
        TypeError: If the argument has the wrong type.
        ImportError: If tensorboardX is not installed.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import os, tempfile
        >>> from mindspore import nn
        >>> from model_zoo import MLP, create_dataset
        >>> from ms_accum import GradientAccumulation, TensorBoardLog
        >>> net = MLP()
        >>> model = GradientAccumulation(net, nn.CrossEntropyLoss(), nn.SGD(net.trainable_params(), 0.1))
        >>> how = {"report": (), "ckpt_path": None}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     model.train_process(1, create_dataset(image_size=28), 4, callbacks=TensorBoardLog(folder), **how)
        ...     print(len(os.listdir(folder)))
        1
    """

    def __init__(self, folder: str | os.PathLike[str]):
        self._shown_path = os.fspath(_check.instance(_OWNER, "folder", folder, (str, os.PathLike), "a path"))
        self._folder = absolute(self._shown_path)
        if find_spec("tensorboardX") is None:
            raise ImportError(f"'{_OWNER}' needs tensorboardX. Run: pip install tensorboardX")
        self._file: Any = None
        self._last_flush = -math.inf
        self._runs = False
        self._writes = False
        self._replaces = False  # whether the next value is the run's first
        self._updates: int | None = None  # None before the first window
        self._windows = 0
        self._is_shown = True  # whether the number of skipped windows has been written

    def on_train_begin(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        self._windows = args.get("cur_step_num", 0)
        self._updates = None
        self._last_flush = -math.inf
        self._runs = True
        self._replaces = True
        # Processes that train on their own are no ranks, and may not join a group here.
        self._writes = args.get("device_number", 1) == 1 or is_first(own_group())

    def on_train_step_end(self, run_context: RunContext) -> None:
        record = run_context.original_args().record
        if self._updates is None:  # windows before the run may not be known, but its updates are
            self._windows = max(self._windows, record.update - (not record.skipped))
        self._windows += 1
        self._updates = record.update
        self._is_shown = not record.skipped
        if record.skipped:
            return  # it has no step of its own; the next update shows it
        values = {
            "train/loss": record.loss,
            "train/lr": record.lr,
            "train/grad_norm": record.grad_norm,
            "train/images_per_second": record.samples / record.seconds if record.seconds > 0 else math.nan,
            "train/skipped": self._windows - record.update,
            **{f"train/loss_{name}": value for name, value in record.terms.items()},
        }
        self._write(record.update, values, record.update)

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        results = run_context.original_args().get("eval_results")
        if results and self._updates is not None:
            self.evaluated(self._updates, results)

    def evaluated(self, updates: int, results: Mapping[str, Any]) -> None:
        """Write the results of an evaluation, during the run or after it; of a run that has not begun, nothing."""
        numbers = numbers_of(results).items()
        values = {f"test/{_NAMES.get(name, name)}": value for name, value in numbers if name not in _NOT_DRAWN}
        self._write(updates, values, updates + 1)

    def __exit__(self, *error: object) -> None:
        if self._updates is not None and not self._is_shown:
            # At the step of the update that did not take place: if the run is continued, that is replaced.
            step = self._updates + 1
            self._write(step, {"train/skipped": self._windows - self._updates}, step)
            self._is_shown = True
        self._runs = False
        self._flush()

    def _write(self, step: int, values: Mapping[str, float], first_step: int) -> None:
        """Write values of a step; if they are the run's first, those of steps from `first_step` on are replaced."""
        values = {tag: value for tag, value in values.items() if math.isfinite(value)}
        if not (self._writes and values):
            return
        try:
            if self._file is None:
                self._file = _new_file(self._folder, first_step if self._replaces else None)
                self._replaces = False
            self._file.write(_event(step, summary=_summary(values)))
        except OSError as error:
            self._give_up(error)
        if not self._runs or time.monotonic() - self._last_flush > _FLUSH_SECONDS:
            self._flush()

    def _flush(self) -> None:
        """Flush the buffer to the disk; after the run, also close the file."""
        self._last_flush = time.monotonic()
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                self._give_up(error)
        if not self._runs:
            self._close()

    def _give_up(self, error: OSError) -> None:
        self._writes = False
        self._close()
        _check.warn(f"nothing more is written to '{self._shown_path}' for TensorBoard: {error}")

    def _close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None


# Not with a SummaryWriter: its thread ends at the first error, such as a full disk, and the next call waits forever.
def _new_file(folder: str, first_step: int | None) -> Any:
    """Return a new file in the folder; TensorBoard discards values of earlier files at steps from `first_step` on."""
    from tensorboardX import RecordWriter
    from tensorboardX.proto.event_pb2 import SessionLog

    os.makedirs(folder, exist_ok=True)
    # TensorBoard reads files in the order of their names.
    file = RecordWriter(os.path.join(folder, f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}"))
    file.write(_event(first_step or 0, file_version="brain.Event:2"))
    if first_step is not None:
        file.write(_event(first_step, session_log=SessionLog(status=SessionLog.START)))
    return file


def _event(step: int, **content: Any) -> bytes:
    from tensorboardX.proto.event_pb2 import Event

    event: bytes = Event(wall_time=time.time(), step=step, **content).SerializeToString()
    return event


def _summary(values: Mapping[str, float]) -> Any:
    from tensorboardX.proto.summary_pb2 import Summary

    return Summary(value=[Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()])
