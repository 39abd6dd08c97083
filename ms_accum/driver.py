"""How does a run go?"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Callable

from mindspore import Tensor, nn

from . import _check
from ._as_found import start_training
from ._batches import Position, batches_per_epoch, epochs_of, start_of
from ._heartbeat import heartbeat
from .accumulator import REDUCTIONS
from .checkpoint import CheckpointError, check_path, save_model
from .checkpointer import NO_WISHES, Checkpointer
from .metrics import SkippedInARow, UpdateRecord
from .objective import Objective
from .open_window import OpenWindow
from .parallel import AUTO, check_together, group_of, is_first, meet, total, wait_for_all
from .reduction import summing
from .report import Reporter, progress
from .trained import SETTING, Trained
from .training_state import TrainingState, capture, restore, warn_about_random_layers
from .windows import TAILS, planned, window_ends

_OWNER = "GradientAccumulation"
_COUNTERS = ("updates", "skipped", "updated")
Reporters = Sequence[Reporter]


class GradientAccumulation:
    r"""Train a network with windows of micro-batches.

    The optimizer sees :math:`\sum_i w_i g_i / \sum_i w_i`, the gradient of the mean over the whole window, also when
    micro-batches differ in size or the last window is shorter. A window whose gradient is not finite is skipped and
    counted; after 10 in a row the run stops.

    Args:
        network (Cell): the network to train.
        loss_fn (Union[Cell, Callable, None]): from the network's output and the columns behind the first, mostly one,
            the label, to a scalar. ``None``: the network returns its loss itself, from any number of columns.
        optimizer (Optimizer): updates the parameters.
        reduction (str): ``"mean"``, or ``"sum"`` for losses that sum and the tutorial's :math:`\sum_i g_i`. Default:
            ``"mean"``.
        tail (str): what becomes of a last window shorter than the others: ``"flush"`` updates with what is there,
            ``"carry"`` goes on with it in the next epoch, ``"drop"`` forgets it. Default: ``"flush"``.
        clip_norm (Optional[float]): bound of the global norm of the window's gradient. Default: ``None``, no clipping.
        weight (Union[None, float, Tensor, Callable]): what a micro-batch counts for: a number, or a function of its
            columns, run on the host, such as ``lambda x, y: (y >= 0).sum()``; 0 passes it over. Default: ``None``, what
            MindSpore's losses average over (elements, or labels by their class weights), and rows with other losses.
        check (str): ``"first"``: where `weight` is a guess, the first micro-batch is cut in two, and a warning says if
            its loss is not the mean of theirs. ``"off"``: not. Default: ``"first"``.
        wait (bool): whether, on CPU in graph mode, up to 8 micro-batches are run in one call, which is faster. Not for
            loaders that set Parameters of the network between micro-batches. Default: ``True``.
        group (Union[str, None, Group]): who trains together, each with its own data, by gradients that are summed when
            a window ends: ``"auto"``, all that a launcher started, or ``None``, this process. Default: ``"auto"``.
        sync_every_micro_batch (bool): whether they are summed in every micro-batch, which sends more; with a
            `ZeroOptimizer` each keeps its part of the sums only. Default: ``False``.
        scheduler (Optional[LRScheduler]): MindSpore's experimental, stepped after each update. Default: ``None``.

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
        check: str = "first",
        wait: bool = True,
        group: Any = AUTO,
        sync_every_micro_batch: bool = False,
        scheduler: Any = None,
    ):
        self._network = _check.instance(_OWNER, "network", network, nn.Cell, "a Cell")
        _check.one_of(_OWNER, "reduction", reduction, REDUCTIONS)
        self._tail = _check.one_of(_OWNER, "tail", tail, TAILS)
        bound = None if clip_norm is None else _check.positive_number(_OWNER, "clip_norm", clip_norm)
        self._group = group_of(_OWNER, group)
        self._ranks = self._group.size if self._group else 1
        kind = _check.kind_of(_check.optimizer(_OWNER, optimizer))
        self._settings = {"reduction": reduction, "tail": tail, "clip_norm": bound, "optimizer": kind}
        self._objective = Objective(_OWNER, network, loss_fn, reduction, weight, check, self._group)
        self._forward = self._objective.forward
        _check.trains(_OWNER, optimizer, self._forward)
        self._trained = Trained(self._forward, optimizer, _check.scheduler(_OWNER, scheduler, optimizer))
        self._in_step = summing(_OWNER, optimizer, self._group, sync_every_micro_batch).of_micro_batch is not None
        how: Any = {"group": self._group, "sync_every_micro_batch": sync_every_micro_batch, "wait": wait}
        self._window = OpenWindow(self._objective, optimizer, bound, **how)
        self.updates = 0
        """int, the updates so far."""
        self.skipped = 0
        """int, those whose gradient was not finite, or in which nothing counted."""
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
        checkpointer: Checkpointer | None = None,
    ) -> None:
        """Train for some epochs and save the model.

        Args:
            epoch (int): how many epochs.
            train_dataset (Union[Dataset, Iterable]): yields micro-batches, or with `micro_batch_size` batches: tuples,
                or dicts, whose order of keys is that of the first.
            mini_steps (Optional[int]): micro-batches in a window. 1 accumulates nothing.
            micro_batch_size (Optional[int]): instead of `mini_steps`, for a dataset that yields the effective batch:
                each batch is a window, split into micro-batches of so many rows.
            report (Optional[Sequence[Reporter]]): told of each update. Default: ``None``, a progress bar on a terminal
                and a line an update elsewhere. ``()``: nobody.
            ckpt_path (Optional[str]): where to save the model. ``None``: nowhere. Default: the tutorial's name.
            checkpointer (Optional[Checkpointer]): saves the run's state, and resumes one. Default: ``None``.

        Raises:
            TypeError: If an argument is of the wrong kind.
            ValueError: If an argument is out of its range, the dataset is empty, or no window would fill.
            RuntimeError: If the window's size changes inside a window, no gradient is finite any more, or ranks differ.
            CheckpointError: If the state to resume can't be read, or is of another run.
            Stopped: If the `checkpointer` was asked to stop; the state is saved.
        """
        _check.positive_int("train_process", "epoch", epoch)
        ends = window_ends("train_process", mini_steps, micro_batch_size)
        windows = self.planned_updates(epoch, train_dataset, mini_steps)  # a resumed run's may be others
        tail, splits = self._tail if checkpointer else "", self._in_step and mini_steps is None
        check_together("train_process", self._group, windows, saved_tail=tail, splits_in_step=splits)
        check_path("train_process", ckpt_path, self._network)
        self._open(mini_steps)
        reporters = ((progress(),) if report is None else tuple(report)) if is_first(self._group) else ()
        with ExitStack() as closing:
            if checkpointer is not None:
                closing.enter_context(checkpointer.share(self._group))
            settings = {"mini_steps": mini_steps, "micro_batch_size": micro_batch_size, "ranks": self._ranks}
            at, windows = self._begin(epoch, train_dataset, checkpointer, settings)
            for reporter in reporters:
                reporter.start(None if windows is None else windows - at.windows)
                closing.callback(reporter.close)
            if checkpointer is not None:
                closing.enter_context(checkpointer.saving_at_the_end(partial(self._state, at), self._window))
            self._ended_at = time.perf_counter()
            for batches in epochs_of(train_dataset, epoch, at):
                self._run_epoch(at, ends(batches, self.micro_batches), reporters, checkpointer)
                at.next_epoch()
        if not at.windows and self._tail == "drop":
            raise RuntimeError("For 'train_process', no window was filled in the whole run. Lower 'mini_steps'.")
        if ckpt_path is not None and is_first(self._group):
            save_model(self._network, ckpt_path)

    def planned_updates(self, epoch: int, train_dataset: Any, mini_steps: int | None = None) -> int | None:
        """Return how many updates `train_process` would make with these arguments.

        Args:
            epoch, train_dataset: as for `train_process`.
            mini_steps (Optional[int]): micro-batches in a window. ``None``: each batch is a window.

        Returns:
            Optional[int], None for a dataset that doesn't know its size.

        Raises:
            ValueError: If the dataset is empty, or no window would ever fill.
        """
        _check.positive_int("planned_updates", "epoch", epoch)
        batches = batches_per_epoch(train_dataset)
        return planned("train_process", batches, mini_steps, self._tail, epoch, held=self.micro_batches)

    def flush(self) -> bool:
        """Update with the micro-batches that ``tail="carry"`` left over, and return whether: not if there are none."""
        if total([self.micro_batches], self._group) == [0]:
            return False
        self._end_window(Position(epoch=0), (), None)
        return self.updated

    def clear(self) -> None:
        """Forget the micro-batches of an unfinished window."""
        self._window.clear()

    @property
    def micro_batches(self) -> int:
        """int, the micro-batches that the window holds."""
        return self._window.micro_batches

    def _run_epoch(self, at: Position, data: Iterable, reporters: Reporters, states: Checkpointer | None) -> None:
        """Run what is left of an epoch."""
        for micro_batch, ends in data:
            self._window.add(micro_batch)
            heartbeat().beat()
            self.updated = False
            at.batches += ends or self._window.size is not None
            at.rows += micro_batch[0].shape[0]
            if ends:
                self._end_window(at, reporters, states)
            elif states is not None:
                wishes = states.wishes()  # kept, if ranks have to agree on them when the window ends
                if self._group is None:
                    states.after_micro_batch(self.updates, True, partial(self._state, at), wishes)
        if self.micro_batches and self._tail == "flush":
            self._end_window(at, reporters, states)
        elif self._tail == "drop":
            self.clear()

    def _end_window(self, at: Position, reporters: Reporters, states: Checkpointer | None) -> None:
        ended = self._window.end(states.wishes() if states and self._group else NO_WISHES)
        self.updated = ended.updated
        self.updates += self.updated
        if self.updated:
            self._trained.step()
        self.skipped += not self.updated
        at.step, at.windows = at.step + 1, at.windows + 1
        now = time.perf_counter()
        seconds, self._ended_at = now - self._ended_at, now
        record = UpdateRecord(at.epoch, at.step, self.updates, *ended.figures, seconds, not self.updated)
        for reporter in reporters:
            reporter.update(record)
        self._skips.add(record)
        if states is not None:
            wishes = states.wishes() if self._group is None else ended.wishes
            states.after_micro_batch(self.updates, False, partial(self._state, at), wishes)

    def _state(self, at: Position) -> TrainingState:
        accumulators, window = self._window.state()
        facts = {"at": asdict(at), "window": window, "skips": self._skips.count}
        facts |= {name: getattr(self, name) for name in _COUNTERS}
        return capture({**self._trained.parameters(), **accumulators}, facts)

    def _begin(self, epochs: int, dataset: Any, states: Checkpointer | None, settings: dict) -> tuple[Position, Any]:
        """Return where the run begins or goes on, on all ranks, and how many windows it has, if that is known."""
        at = replace(start_of(dataset, self._ranks), held=self.micro_batches)
        if states is not None:
            wait_for_all(self._group)  # rank 0 may still be writing what is to be found
            at = self._resume(epochs, dataset, states, {**settings, **self._settings}) or at
        batches = batches_per_epoch(dataset)
        windows = planned("train_process", batches, settings["mini_steps"], self._tail, epochs, held=at.held)
        facts = {"windows": windows, "updates before": self.updates, "windows before": at.windows}
        if self._in_step:  # of the dataset: a position that was resumed is rank 0's
            facts |= {"batches in an epoch": batches, **self._window.counts}
        meet("train_process", self._group, facts, self._forward)
        return at, windows

    def _resume(self, epochs: int, dataset: Any, states: Checkpointer, settings: dict) -> Position | None:
        """Take over the state that the checkpointer finds, and return where it was."""
        held = self._trained.parameters()  # refuses what can't be saved now, not at the first save
        found = states.find(settings)
        if found is None:
            return None
        facts, window = found.state.facts, found.state.facts["window"]
        at = Position(**facts["at"])
        if at.begun > epochs:
            raise CheckpointError(f"'{found.path}' is in epoch {at.begun}, and 'epoch' is {epochs}. Make it more.")
        warn_about_random_layers(self._network)
        parameters = {**held, **self._window.accumulators(window["micro_batches"])}
        restore(found.state, parameters, found.path, leave_out=SETTING if found.changed else "")
        self._window.load(window)
        vars(self).update({name: facts[name] for name in _COUNTERS})
        self._skips.count = facts["skips"]
        if found.changed and self._window.size is None:  # it may hold a part of a batch that is another one now
            self.clear()
        return at.in_batches_of(dataset, self._ranks) if found.changed else at

    def _open(self, window: int | None) -> None:
        """Get ready for windows of this size; None stands for windows of whole batches."""
        if self._tail != "carry" or self._window.size is None:
            self.clear()  # an interrupted run left them, and nothing may leak into this one
        self._window.open(window)
        self._skips = SkippedInARow(_OWNER)
        start_training(self._network, self._forward)
        if window != 1:
            self._objective.warn()
