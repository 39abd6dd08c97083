"""How does a training run proceed?"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, Callable

from mindspore import Tensor, nn

from . import _check
from .cells import runner_of
from .evaluation import evaluation_of
from .fitting.runtime import tune
from .network import checks
from .network.as_found import start_training
from .numerics.coupled import objective_of
from .program.report import called_in
from .ranks.parallel import AUTO, check_together, group_of, is_first, meet, total, wait_for_all
from .ranks.reduction import summing
from .run import Run, Ways, epochs_of, facts_of
from .saving.checkpoint import check_path, save_trained
from .saving.checkpointer import NO_WISHES, Checkpointer
from .saving.run_state import RunState
from .saving.trained import Trained
from .saving.training_state import TrainingState
from .window.batches import Data, Position
from .window.callbacks import Callbacks
from .window.ends import TAILS, planned, window_ends
from .window.open_window import Ended, OpenWindow
from .window.record import SkippedInARow

_OWNER = "GradientAccumulation"
_COUNTERS = ("updates", "skipped", "updated")


class GradientAccumulation:
    r"""Train a network with windows of micro-batches.

    The optimizer gets :math:`\sum_i w_i g_i / \sum_i w_i`, the gradient of the mean over the window, also if
    micro-batches differ in size or the last window is short. A window whose gradient is not finite is skipped and
    counted; after 10 in a row the run stops with an error.

    Args:
        network (Cell): the network to train.
        loss_fn (Union[Cell, Callable, None]): from the network's output and the columns after the first, usually one,
            the label, to a scalar; or a `CoupledLoss`. ``None``: the network returns the loss, from all columns.
        optimizer (Optimizer): updates the parameters.
        reduction (str): ``"mean"``, or ``"sum"`` for losses that sum and the tutorial's :math:`\sum_i g_i`. Default:
            ``"mean"``.
        tail (str): treatment of a last, shorter window: ``"flush"`` updates with it,
            ``"carry"`` continues it in the next epoch, ``"drop"`` discards it. Default: ``"flush"``.
        clip_norm (Optional[float]): bound of the global norm of the window's gradient. Default: ``None``, no clipping.
        weight (Union[None, float, Tensor, Callable]): the weight of a micro-batch: a number, or a function of its
            columns, run on the host, such as ``lambda x, y: (y >= 0).sum()``; 0 skips it. Default: ``None``, what
            MindSpore's losses average over (elements, or labels by their class weights), and rows for other losses.
        check (str): ``"first"``: a forward of two rows of the first micro-batch checks that its columns are taken. If
            `weight` is a guess, that micro-batch is split in two parts; a warning follows if its loss is not the
            weighted mean of theirs. ``"off"``: no checks. Default: ``"first"``.
        wait (bool): whether, on CPU in graph mode, up to 8 micro-batches are run in one call, which is faster. Not for
            loaders that set Parameters of the network between micro-batches. Default: ``True``.
        group (Union[str, None, Group]): the processes that train together, each on its own data; their gradients are
            summed at a window's end: ``"auto"``, all that a launcher started; ``None``, only this. Default: ``"auto"``.
        sync_every_micro_batch (bool): whether gradients are summed in every micro-batch, which sends more data; with a
            `ZeroOptimizer` each rank keeps only its part of the sums. Default: ``False``.
        scheduler (Optional[LRScheduler]): MindSpore's experimental one, stepped after each update. Default: ``None``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or the loss does not fit `reduction`.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from ms_accum import GradientAccumulation
        >>> from ms_accum.zoo import MLP, create_dataset
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
        tune(_OWNER, network.get_parameters())
        self._tail = _check.one_of(_OWNER, "tail", tail, TAILS)
        bound = None if clip_norm is None else _check.positive_number(_OWNER, "clip_norm", clip_norm)
        self._group = group_of(_OWNER, group)
        self._ranks = self._group.size if self._group else 1
        kind = checks.kind_of(checks.optimizer(_OWNER, optimizer))
        self._settings = {"reduction": reduction, "tail": tail, "clip_norm": bound, "optimizer": kind}
        self._objective = objective_of(_OWNER, network, loss_fn, reduction, weight, check, self._group)
        self._forward = self._objective.forward
        checks.trains(_OWNER, optimizer, self._forward)
        self._trained = Trained(self._forward, optimizer, checks.scheduler(_OWNER, scheduler, optimizer))
        self._in_step = summing(_OWNER, optimizer, self._group, sync_every_micro_batch).of_micro_batch is not None
        how: Any = {"group": self._group, "sync_every_micro_batch": sync_every_micro_batch}
        how["wait"] = _check.instance(_OWNER, "wait", wait, bool, "a bool")
        runner = partial(runner_of, self._forward, optimizer, reduction, bound, **how)
        self._window = OpenWindow(self._objective, optimizer, runner, self._group)
        self._saved = RunState(network, self._trained, self._window)
        self.updates = 0
        """int, the updates so far."""
        self.skipped = 0
        """int, windows without an update: their gradient was not finite, or all their weights were 0."""
        self.updated = False
        """bool, whether the last micro-batch ended with an update."""

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"{_OWNER}({type(self._network).__name__}, {shown}, updates={self.updates}, skipped={self.skipped})"

    def train_process(
        self,
        epoch: int,
        train_dataset: Any,
        mini_steps: int | None = None,
        *,
        micro_batch_size: int | None = None,
        report: Any = None,
        callbacks: Any = None,
        valid_dataset: Any = None,
        metrics: Any = None,
        eval_every: int = 1,
        initial_epoch: int = 0,
        ckpt_path: str | None = "gradient_accumulation.ckpt",
        checkpointer: Checkpointer | None = None,
    ) -> None:
        """Train for some epochs and save the model.

        Args:
            epoch (int): the last epoch; the number of epochs unless `initial_epoch` is given.
            train_dataset (Union[Dataset, Iterable]): yields micro-batches, or with `micro_batch_size` batches: tuples,
                or dicts, whose key order is that of the first dict.
            mini_steps (Optional[int]): micro-batches in a window. A window of 1 accumulates nothing.
            micro_batch_size (Optional[int]): instead of `mini_steps`, for a dataset that yields the effective batch:
                each batch is a window, split into micro-batches of this number of rows.
            report (Union[None, Callback, Sequence[Callback]]): shows the run, on rank 0 only. Default: ``None``, a
                progress bar on a terminal, else one line per update. ``()``: no reports.
            callbacks (Union[None, Callback, list[Callback]]): MindSpore's callbacks, called on all ranks. A step is a
                window: `cur_step_num` counts windows, `net_outputs` is the mean loss of the window, and `record` its
                `UpdateRecord`. `request_stop` ends the run, with several ranks at the end of the epoch.
                Default: ``None``.
            valid_dataset (Union[None, Dataset, Iterable]): evaluated at the end of epochs. Default: ``None``.
            metrics (Union[None, dict, set]): MindSpore's metrics for the evaluation, as for `mindspore.train.Model`,
                such as ``{"acc"}``; the mean loss is always computed, as ``"eval_loss"``. Default: ``None``.
            eval_every (int): epochs between two evaluations. Default: 1.
            initial_epoch (int): the epoch after which the numbering begins, as for `Model.fit`. Default: 0.
            ckpt_path (Optional[str]): where to save the model, in place of a file that is there. ``None``: not saved.
                Default: the tutorial's name; a file of that name is kept as ``gradient_accumulation.previous.ckpt``.
            checkpointer (Optional[Checkpointer]): saves the run's state, or resumes a run. Default: ``None``.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range, the dataset is empty, or no window would fill.
            RuntimeError: If the window's size changes inside a window, gradients stay non-finite, or ranks differ.
            CheckpointError: If the state to resume can't be read, or is of another run.
            Stopped: If the `checkpointer` got a request to stop; the state is saved.
        """
        epochs = epochs_of(epoch, initial_epoch)
        ends = window_ends("train_process", mini_steps, micro_batch_size)
        windows = self.planned_updates(epochs, train_dataset, mini_steps)  # a resumed run may have another number
        check_together("train_process", self._group, windows, splits_in_step=self._in_step and not mini_steps)
        self._window.check_saved(self._tail if checkpointer else "")
        check_path("train_process", ckpt_path, self._network)
        evaluate = evaluation_of(self._objective, valid_dataset, metrics, eval_every, self._group)
        called = called_in("train_process", report, callbacks, shows=is_first(self._group))
        self._open(mini_steps)
        how: dict[str, Any] = {"mini_steps": mini_steps, "micro_batch_size": micro_batch_size, "ranks": self._ranks}
        if initial_epoch:
            how["initial_epoch"] = initial_epoch
        data = Data(train_dataset, self._ranks)
        with ExitStack() as closing:
            run = self._begin_run(closing, epochs, data, how, called, checkpointer, evaluate)
            run.train(data.epochs(epochs, run.at), ends)
            if ckpt_path is not None and is_first(self._group):
                save_trained(self._network, ckpt_path)  # before the state, which is larger, for a disk that gets full

    def planned_updates(self, epoch: int, train_dataset: Any, mini_steps: int | None = None) -> int | None:
        """Return the number of updates that `train_process` would make with these arguments.

        Args:
            epoch, train_dataset: as for `train_process`.
            mini_steps (Optional[int]): micro-batches in a window. ``None``: each batch is a window.

        Returns:
            Optional[int], None for a dataset of unknown size.

        Raises:
            ValueError: If the dataset is empty, or no window would ever fill.
        """
        _check.positive_int("planned_updates", "epoch", epoch)
        batches = Data(train_dataset).batches
        return planned("train_process", batches, mini_steps, self._tail, epoch, held=self.micro_batches)

    def flush(self) -> bool:
        """Update with the micro-batches left over by ``tail="carry"``; return whether there was an update."""
        if total([self.micro_batches], self._group) == [0]:
            return False
        return self._end(NO_WISHES).updated

    def clear(self) -> None:
        """Discard the micro-batches of an open window."""
        self._window.clear()

    @property
    def micro_batches(self) -> int:
        """int, the micro-batches in the window."""
        return self._window.micro_batches

    def _add(self, micro_batch: tuple) -> None:
        self._window.add(micro_batch)
        self.updated = False

    def _end(self, wishes: Sequence[float]) -> Ended:
        """End the window, and count."""
        ended = self._window.end(wishes)
        self.updated = ended.updated
        self.updates += ended.updated
        self.skipped += not ended.updated
        if ended.updated:
            self._trained.step()
        return ended

    def _begin_run(
        self, closing: ExitStack, epochs: int, data: Data, how: dict, called: list, states: Any, evaluate: Any
    ) -> Run:
        """Return the run at its beginning or where it is resumed; `closing` ends what accompanies it."""
        if states is not None:
            closing.enter_context(states.share(self._group))
        at, windows = self._begin(epochs, data, states, how)
        facts = facts_of(data, epochs, how["mini_steps"], self._tail, at, self._objective, self._trained.optimizer)
        facts["initial_epoch"] = how.get("initial_epoch", 0)
        calls = closing.enter_context(Callbacks(called, facts))
        calls("on_train_begin", planned=None if windows is None else windows - at.windows)
        if states is not None:
            closing.enter_context(states.saving_at_the_end(partial(self._state, at), self._window))
        ways = Ways(
            self._window, self._add, self._end, lambda: self.updates, self._state, self._skips, self._tail, self._group
        )
        return Run(ways, at, calls, states=states, evaluate=evaluate, before=facts["initial_epoch"])

    def _state(self, at: Position) -> TrainingState:
        counters = {name: getattr(self, name) for name in _COUNTERS}
        return self._saved.take(at, {**counters, "skips": self._skips.count})

    def _begin(self, epochs: int, data: Data, states: Checkpointer | None, settings: dict) -> tuple[Position, Any]:
        """Return the position where all ranks begin or resume, and the number of windows, None if unknown."""
        at = data.start(held=self.micro_batches)
        if states is not None:
            wait_for_all(self._group)  # rank 0 may still be writing the state to resume
            at = self._resume(epochs, data, states, {**settings, **self._settings}) or at
        batches = data.batches
        windows = planned("train_process", batches, settings["mini_steps"], self._tail, epochs, held=at.held)
        facts = {"windows": windows, "updates before": self.updates, "windows before": at.windows}
        if self._in_step:  # from the dataset: a resumed position has rank 0's number
            facts |= {"batches in an epoch": batches, **self._window.counts}
        meet("train_process", self._group, facts, self._forward)
        return at, windows

    def _resume(self, epochs: int, data: Data, states: Checkpointer, settings: dict) -> Position | None:
        """Load the state found by the checkpointer, and return its position; None if there is no state."""
        parameters = self._saved.parameters()  # rejects before training what can not be saved
        found = states.find(settings)
        if found is None:
            return None
        at = self._saved.put_back(found, parameters, epochs, data)
        vars(self).update({name: found.state.facts[name] for name in _COUNTERS})
        self._skips.count = found.state.facts["skips"]
        return at

    def _open(self, window: int | None) -> None:
        """Prepare for windows of this size; None means that each batch is a window."""
        if self._tail != "carry" or self._window.size is None:
            self.clear()  # left over by an interrupted run; must not enter this run
        self._window.open(window)
        self._skips = SkippedInARow(_OWNER)
        start_training(self._network, self._forward)
        if window != 1:
            self._objective.warn()
