"""How does a run go?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cached_property
from typing import Any, Callable

from mindspore import Tensor, nn

from . import _check
from ._batches import batches_per_epoch, epochs_of
from .accumulator import REDUCTIONS
from .batch_norm import warn_about_batch_norm
from .checkpoint import check_folder, check_name, save_model
from .metrics import SkippedInARow, UpdateRecord, WindowLoss, check_loss
from .out_of_memory import memory_advised
from .report import Reporter, progress
from .running import Windows, WindowsOfOne
from .weights import Weight
from .windows import TAILS, updates_in_run, window_ends

_OWNER = "GradientAccumulation"


class GradientAccumulation:
    r"""Train a network with windows of micro-batches.

    The optimizer sees :math:`\sum_i w_i g_i / \sum_i w_i`, the gradient of the mean over the whole window, also
    when micro-batches differ in size or the last window is shorter. A window whose gradient is not finite
    is skipped and counted; after 10 in a row the run stops.

    Args:
        network (Cell): the network to train.
        loss_fn (Union[Cell, Callable, None]): from the network's output and the label to a scalar.
            ``None``: the network returns its loss itself, from any number of columns.
        optimizer (Optimizer): updates the parameters.
        reduction (str): ``"mean"``, or ``"sum"`` for losses that sum and for the tutorial's
            :math:`\sum_i g_i`. Default: ``"mean"``.
        tail (str): what becomes of a last window shorter than the others: ``"flush"`` updates with
            what is there, ``"carry"`` goes on with it in the next epoch, ``"drop"`` forgets it.
            Default: ``"flush"``.
        clip_norm (Optional[float]): bound of the global norm of the window's gradient.
            Default: ``None``, no clipping.
        weight (Union[None, float, Tensor, Callable]): what a micro-batch counts for: a number, or a
            function of its columns, run on the host, such as ``lambda x, y: (y >= 0).sum()``.
            A micro-batch of weight 0 is passed over. Default: ``None``, its rows; with `nn.CrossEntropyLoss` and
            `nn.NLLLoss` its labels that are not ignored, by their class weights, as those losses average.

    Raises:
        TypeError: If an argument is of the wrong kind.
        ValueError: If an argument is out of its range, or the loss doesn't go with `reduction`.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from ms_accum import GradientAccumulation
        >>> from model_zoo import MLP, create_dataset
        >>> net = MLP()
        >>> optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
        >>> model = GradientAccumulation(net, nn.CrossEntropyLoss(), optimizer)
        >>> model.train_process(1, create_dataset(image_size=28), mini_steps=4, report=(), ckpt_path=None)
        >>> model.updates, model.skipped
        (12, 0)
    """

    def __init__(
        self,
        network: nn.Cell,
        loss_fn: Callable | None,
        optimizer: Any,
        *,
        reduction: str = "mean",
        tail: str = "flush",
        clip_norm: float | None = None,
        weight: None | float | Tensor | Callable = None,
    ):
        self._network = _check.instance(_OWNER, "network", network, nn.Cell, "a Cell")
        self._optimizer = _check.optimizer(_OWNER, optimizer)
        self._reduction = _check.one_of(_OWNER, "reduction", reduction, REDUCTIONS)
        self._tail = _check.one_of(_OWNER, "tail", tail, TAILS)
        self._clip_norm = None if clip_norm is None else _check.positive_number(_OWNER, "clip_norm", clip_norm)
        self._weight = Weight(_OWNER, weight, self._reduction, loss_fn)
        self._loss = WindowLoss(summing=check_loss(_OWNER, loss_fn, self._reduction) == "sum")
        self._forward = network if loss_fn is None else nn.WithLossCell(network, loss_fn)
        self._window: int | None = None
        self._rows = 1
        self.micro_batches = 0
        """int, the micro-batches that the window holds."""
        self.updates = 0
        """int, the updates so far."""
        self.skipped = 0
        """int, the windows so far whose gradient was not finite, or in which nothing counted."""
        self.updated = False
        """bool, whether the last micro-batch ended with an update."""

    def train_process(
        self,
        epoch: int,
        train_dataset: Any,
        mini_steps: int | None = None,
        *,
        micro_batch_size: int | None = None,
        report: Sequence[Reporter] | None = None,
        ckpt_path: str | None = "gradient_accumulation.ckpt",
    ) -> None:
        """Train for some epochs and save the model.

        Args:
            epoch (int): how many epochs.
            train_dataset (Union[Dataset, Iterable]): yields micro-batches, or with `micro_batch_size` batches.
            mini_steps (Optional[int]): micro-batches in a window. 1 accumulates nothing.
            micro_batch_size (Optional[int]): instead of `mini_steps`, for a dataset that yields the
                effective batch: each batch is a window, split into micro-batches of so many rows.
            report (Optional[Sequence[Reporter]]): who is told of each update. Default: ``None``, a
                progress bar on a terminal and a line an update elsewhere. ``()``: nobody.
            ckpt_path (Optional[str]): where the model is saved. ``None``: nowhere.
                Default: ``"gradient_accumulation.ckpt"``, as in the tutorial.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If an argument is out of its range, the dataset is empty, or no window would fill.
            RuntimeError: If the window's size changes inside a window, or no gradient is finite any more.
        """
        _check.positive_int("train_process", "epoch", epoch)
        ends = window_ends("train_process", mini_steps, micro_batch_size)
        total = self.planned_updates(epoch, train_dataset, mini_steps)
        if ckpt_path is not None:
            check_name("train_process", ckpt_path)
            check_folder("train_process", ckpt_path)
        if mini_steps != 1:
            warn_about_batch_norm(self._network)
        self._open(mini_steps)
        reporters = (progress(),) if report is None else tuple(report)
        ended = 0
        with ExitStack() as closing:
            for reporter in reporters:
                reporter.start(total)
                closing.callback(reporter.close)
            self._ended_at = time.perf_counter()
            for number, batches in enumerate(epochs_of(train_dataset, epoch), start=1):
                ended += self._run_epoch(number, ends(batches, self.micro_batches), reporters)
        if not ended and self._tail == "drop":
            raise RuntimeError("For 'train_process', no window was filled in the whole run. Lower 'mini_steps'.")
        if ckpt_path is not None:
            save_model(self._network, ckpt_path)

    def planned_updates(self, epoch: int, train_dataset: Any, mini_steps: int | None = None) -> int | None:
        """Return how many updates `train_process` would make with these arguments.

        Args:
            epoch (int): how many epochs.
            train_dataset (Union[Dataset, Iterable]): as for `train_process`.
            mini_steps (Optional[int]): micro-batches in a window. ``None``: each batch is a window.

        Returns:
            Optional[int], the updates, or None for a dataset that doesn't know its size.

        Raises:
            ValueError: If the dataset is empty, or no window would ever fill.
        """
        _check.positive_int("planned_updates", "epoch", epoch)
        batches = batches_per_epoch(train_dataset)
        if batches is None:
            return None
        if batches < 1:
            raise ValueError("For 'train_process', 'train_dataset' must have batches, but got an empty one.")
        if mini_steps is None:
            return epoch * batches
        _check.positive_int("planned_updates", "mini_steps", mini_steps)
        held = self.micro_batches if self._tail == "carry" else 0
        updates = updates_in_run(batches, mini_steps, self._tail, epoch, held)
        if not updates and self._tail == "drop":
            raise ValueError(
                f"For 'train_process', 'mini_steps' must be at most {batches} with tail='drop', but got "
                f"{mini_steps}. No window would ever fill; take a smaller one, or tail='flush'."
            )
        return updates

    def flush(self) -> bool:
        """Update with the micro-batches that ``tail="carry"`` left over.

        Returns:
            bool, whether the parameters were updated: False for an empty window.
        """
        if not self.micro_batches:
            return False
        self._end_window()
        return self.updated

    def clear(self) -> None:
        """Forget the micro-batches of an unfinished window."""
        if self.micro_batches:
            self._cells.clear()
        self._forget()

    def _forget(self) -> None:
        self._loss.clear()
        self.micro_batches = 0

    def _run_epoch(self, epoch: int, micro_batches: Iterable, reporters: Sequence[Reporter]) -> int:
        """Return how many windows ended in the epoch."""
        step, empty = 0, True
        for micro_batch, ends in micro_batches:
            empty = False
            self._add(micro_batch)
            if ends:
                step += 1
                self._end_window(epoch, step, reporters)
        if empty:
            raise ValueError(
                "For 'train_process', 'train_dataset' must yield batches in every epoch, "
                f"but got none in epoch {epoch}."
            )
        if self.micro_batches and self._tail == "flush":
            step += 1
            self._end_window(epoch, step, reporters)
        elif self._tail == "drop":
            self.clear()
        return step

    def _add(self, micro_batch: tuple) -> None:
        weight = self._weight.of(micro_batch)
        # Zero times a loss that is 0/0 (every token masked) is NaN: what counts for nothing is not run.
        if weight:
            scale = self._weight.as_tensor(weight) if self._reduction == "mean" else None
            self._rows = micro_batch[0].shape[0]
            with self._running():
                loss = self._cells.add(micro_batch, scale)
            self._loss.add(loss, weight, self._rows)
        self.micro_batches += 1
        self.updated = False

    def _end_window(self, epoch: int = 0, step: int = 0, reporters: Sequence[Reporter] = ()) -> None:
        with self._running():
            lr, updated, norm = self._cells.end()
        self.updated = bool(updated.asnumpy())
        self.updates += self.updated
        self.skipped += not self.updated
        samples = self._loss.samples
        now = time.perf_counter()
        record = UpdateRecord(
            epoch,
            step,
            self.updates,
            self._loss.mean,
            lr,
            float(norm.asnumpy()),
            samples,
            now - self._ended_at,
            not self.updated,
        )
        self._ended_at = now
        self._forget()
        for reporter in reporters:
            reporter.update(record)
        if samples:  # a window in which nothing counted says nothing about gradients
            self._skips.add(record.skipped)

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Give up the window if one of its micro-batches fails."""
        try:
            with memory_advised(self._rows, self._window):
                yield
        except Exception:
            self.clear()
            raise

    @cached_property
    def _windows(self) -> Windows:
        return Windows(self._forward, self._optimizer, self._reduction, self._clip_norm)

    @cached_property
    def _windows_of_one(self) -> WindowsOfOne:
        return WindowsOfOne(self._forward, self._optimizer, self._clip_norm)

    @property
    def _cells(self) -> Windows | WindowsOfOne:
        return self._windows_of_one if self._window == 1 else self._windows

    def _open(self, window: int | None) -> None:
        """Get ready for windows of this size; None stands for windows of whole batches."""
        if self.micro_batches and self._tail != "carry":
            self.clear()  # an interrupted run left them, and nothing may leak into this one
        if self.micro_batches and window != self._window:
            raise RuntimeError(
                f"For 'train_process', 'mini_steps' can't change from {self._window} to {window} inside a window, "
                f"which holds {self.micro_batches} micro-batches. Call 'flush()' or 'clear()' first."
            )
        self._window = window
        self._skips = SkippedInARow(_OWNER)
        self._forward.set_train()
