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
from .numerics.collaborators import numerics_of
from .numerics.coupled import objective_of
from .numerics.ema import Ema
from .numerics.noise_scale import NoiseScale
from .numerics.nonfinite import BadBatches
from .numerics.sizes import Sizes, sizes_of
from .program.report import called_in
from .ranks.parallel import AUTO, check_together, group_of, is_first, total
from .ranks.reduction import summing
from .run import Ways, begin_run, epochs_of
from .saving.checkpoint import check_path, save_trained
from .saving.checkpointer import NO_WISHES, Checkpointer
from .saving.run_state import RunState
from .saving.trained import Trained
from .window.batches import Data
from .window.ends import TAILS, planned, window_ends
from .window.open_window import Ended, OpenWindow

_OWNER = "GradientAccumulation"


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
        check (str): ``"first"``: two rows of the first micro-batch are tried; if `weight` is a guess, a warning follows
            unless its loss is the weighted mean of its two parts. ``"off"``: no checks. Default: ``"first"``.
        wait (bool): whether, on CPU in graph mode, up to 8 micro-batches are run in one call, which is faster. Not for
            loaders that set Parameters of the network between micro-batches. Default: ``True``.
        group (Union[str, None, Group]): the processes that train together, each on its own data: ``"auto"``, all that a
            launcher started; ``None``, only this. Default: ``"auto"``.
        sync_every_micro_batch (bool): whether gradients are summed over them in every micro-batch, not once a window;
            with a `ZeroOptimizer` each rank keeps only its part of the sums. Default: ``False``.
        scheduler (Optional[LRScheduler]): MindSpore's experimental one, stepped after each update. Default: ``None``.
        loss_scale (Union[None, float, LossScaler, LossScaleManager]): for float16: a number, or one of `mindspore.amp`.
            If a dynamic one was too large, it is lowered, and the window skipped (`overflows`). Default: ``None``.
        nonfinite (str): what happens to gradients that are not finite: ``"skip_window"``; ``"skip_micro"`` leaves a
            micro-batch out, with its weight; ``"raise"`` ends the run with an error. Default: ``"skip_window"``.
        save_bad_batches (Optional[str]): a folder for micro-batches that are not finite. Default: ``None``.
        ema (Optional[Ema]): an average of the weights, which evaluations use. Default: ``None``.
        noise_scale (Optional[NoiseScale]): estimates how large windows should be. Default: ``None``.

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
        loss_scale: Any = None,
        nonfinite: str = "skip_window",
        save_bad_batches: str | None = None,
        ema: Ema | None = None,
        noise_scale: NoiseScale | None = None,
    ):
        self._network = _check.instance(_OWNER, "network", network, nn.Cell, "a Cell")
        tune(_OWNER, network.get_parameters())
        self._tail = _check.one_of(_OWNER, "tail", tail, TAILS)
        bound = None if clip_norm is None else _check.positive_number(_OWNER, "clip_norm", clip_norm)
        self._group = group_of(_OWNER, group)
        kind = checks.kind_of(checks.optimizer(_OWNER, optimizer))
        given: Any = {"loss_scale": loss_scale, "nonfinite": nonfinite, "ema": ema, "noise_scale": noise_scale}
        self._numerics = numerics_of(_OWNER, optimizer, **given)
        own = {"reduction": reduction, "tail": tail, "clip_norm": bound, "optimizer": kind}
        self._settings = {**own, **self._numerics.settings}
        self._objective = objective_of(_OWNER, network, loss_fn, reduction, weight, check, self._group)
        checks.trains(_OWNER, optimizer, forward := self._objective.forward)
        self._trained = Trained(forward, optimizer, checks.scheduler(_OWNER, scheduler, optimizer), self._numerics)
        how: Any = {"group": self._group, "sync_every_micro_batch": sync_every_micro_batch}
        self._in_step = summing(_OWNER, optimizer, self._group, sync_every_micro_batch).of_micro_batch is not None
        how |= {"wait": _check.instance(_OWNER, "wait", wait, bool, "a bool"), "numerics": self._numerics}
        runner = partial(runner_of, forward, optimizer, reduction, bound, **how)
        self._window = OpenWindow(self._objective, optimizer, runner, self._group, self._numerics)
        self._ways = self._ways_of(None if save_bad_batches is None else BadBatches(save_bad_batches, self._group))

    def _ways_of(self, bad: BadBatches | None) -> Ways:
        saved = RunState(self._network, self._trained, self._window)
        parts = (self._window, self._objective, self._trained, saved, self._end, self._settings)
        return Ways(*parts, self._in_step, self._tail, self._group, bad)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={value!r}" for name, value in self._settings.items())
        return f"{_OWNER}({type(self._network).__name__}, {shown}, updates={self.updates}, skipped={self.skipped})"

    def train_process(
        self,
        epoch: int,
        train_dataset: Any,
        mini_steps: Any = None,
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
            mini_steps (Union[None, int, dict, Callable]): micro-batches in a window; 1 accumulates nothing. A dict
                gives sizes by their first update, such as ``{0: 1, 100: 4}`` or those of :func:`ramp_up`; a function
                gets the number of updates.
            micro_batch_size (Optional[int]): instead of `mini_steps`: each batch is a window, split into micro-batches
                of this number of rows.
            report (Union[None, Callback, Sequence[Callback]]): shows the run, on rank 0 only. Default: ``None``, a
                progress bar on a terminal, else one line per update. ``()``: no reports.
            callbacks (Union[None, Callback, list[Callback]]): MindSpore's callbacks, called on all ranks. A step is a
                window: `cur_step_num` counts windows, `net_outputs` is the mean loss of the window, `record` its
                `UpdateRecord`. `request_stop` ends the run, on several ranks after the epoch. Default: ``None``.
            valid_dataset (Union[None, Dataset, Iterable]): evaluated at the end of epochs. Default: ``None``.
            metrics (Union[None, dict, set]): MindSpore's metrics for the evaluation, as for `mindspore.train.Model`,
                such as ``{"acc"}``; the mean loss is always computed, as ``"eval_loss"``. Default: ``None``.
            eval_every (int): epochs between two evaluations. Default: 1.
            initial_epoch (int): the epoch after which the numbering begins, as for `Model.fit`. Default: 0.
            ckpt_path (Optional[str]): where to save the model, in place of a file that is there. ``None``: not saved.
                Default: the tutorial's name; an older file becomes ``gradient_accumulation.previous.ckpt``.
            checkpointer (Optional[Checkpointer]): saves the run's state, or resumes a run. Default: ``None``.

        Raises:
            TypeError: If an argument has the wrong type.
            ValueError: If an argument is out of range, the dataset is empty, or no window would fill.
            RuntimeError: If the window's size changes inside a window, gradients stay non-finite, or ranks differ.
            CheckpointError: If the state to resume can't be read, or is of another run.
            Stopped: If the `checkpointer` got a request to stop; the state is saved.
        """
        epochs = epochs_of(epoch, initial_epoch)
        ends = window_ends("train_process", mini_steps, micro_batch_size, lambda: self.updates)
        sizes = None if mini_steps is None else sizes_of("train_process", "mini_steps", mini_steps)
        windows = self.planned_updates(epochs, train_dataset, sizes)  # a resumed run may have another number
        check_together("train_process", self._group, windows, splits_in_step=self._in_step and sizes is None)
        self._window.check_saved(self._tail if checkpointer else "")
        check_path("train_process", ckpt_path, self._network)
        evaluate = evaluation_of(self._objective, valid_dataset, metrics, eval_every, self._group, self.ema)
        called = called_in("train_process", report, callbacks, shows=is_first(self._group))
        self._open(sizes)
        data = Data(train_dataset, self._group.size if self._group else 1)
        how = {"micro_batch_size": micro_batch_size} | ({"initial_epoch": initial_epoch} if initial_epoch else {})
        with ExitStack() as closing:
            both: dict[str, Any] = {"states": checkpointer, "evaluate": evaluate}
            run = begin_run(closing, self._ways, epochs, data, sizes, how, called, **both)
            run.train(data.epochs(epochs, run.at), ends)
            if ckpt_path is not None and is_first(self._group):
                save_trained(self._network, ckpt_path)  # before the state, which is larger, for a disk that gets full

    def planned_updates(self, epoch: int, train_dataset: Any, mini_steps: Any = None) -> int | None:
        """Return the number of updates that `train_process` would make with these arguments.

        Args:
            epoch, train_dataset, mini_steps: as for `train_process`. Without `mini_steps` each batch is a window.

        Returns:
            Optional[int], None for a dataset of unknown size.

        Raises:
            ValueError: If the dataset is empty, or no window would ever fill.
        """
        _check.positive_int("planned_updates", "epoch", epoch)
        batches, now = Data(train_dataset).batches, {"held": self.micro_batches, "updates": self.updates}
        return planned("train_process", batches, mini_steps, self._tail, epoch, **now)

    def flush(self) -> bool:
        """Update with the micro-batches left over by ``tail="carry"``; return whether there was an update."""
        if total([self.micro_batches], self._group) == [0]:
            return False
        ended = self._end(NO_WISHES)
        self._window.counters.skips.flushed(ended.updated, ended.overflow)
        return ended.updated

    def clear(self) -> None:
        """Discard the micro-batches of an open window."""
        self._window.clear()

    @property
    def micro_batches(self) -> int:
        """int, the micro-batches in the window."""
        return self._window.micro_batches

    @property
    def updates(self) -> int:
        """int, the updates so far."""
        return self._window.counters.updates

    @property
    def skipped(self) -> int:
        """int, windows without an update: their gradient was not finite, or all their weights were 0."""
        return self._window.counters.skipped

    @property
    def updated(self) -> bool:
        """bool, whether the last micro-batch ended with an update."""
        return self._window.counters.updated

    @property
    def ema(self) -> Ema | None:
        """Optional[Ema], the average of the weights."""
        return self._numerics.ema

    @property
    def noise_scale(self) -> NoiseScale | None:
        """Optional[NoiseScale], the estimate of how large a window should be."""
        return self._numerics.noise

    @property
    def loss_scale(self) -> float:
        """float, the loss scale now; 1 if there is none."""
        return self._numerics.value

    @property
    def overflows(self) -> int:
        """int, windows for which a dynamic loss scale was too large."""
        return self._numerics.overflows

    @property
    def left_out(self) -> int:
        """int, micro-batches that ``nonfinite="skip_micro"`` left out; on several ranks those of this one."""
        return self._numerics.left_out

    def _end(self, wishes: Sequence[float]) -> Ended:
        ended = self._window.end(wishes)
        if ended.updated:
            self._trained.step()
        return ended

    def _open(self, sizes: Sizes | None) -> None:
        """Prepare for windows of these sizes; None means that each batch is a window."""
        window = None if sizes is None else sizes.constant or 0
        if self._tail != "carry" or self._window.size is None:
            self.clear()  # left over by an interrupted run; must not enter this run
        self._window.open(window)
        self._window.counters.begin()
        start_training(self._network, self._objective.forward)
        if window != 1:
            self._objective.warn()
