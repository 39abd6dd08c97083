"""The callbacks of MindSpore's `Model`: one ends the tail of an epoch, one saves training states."""

from __future__ import annotations

from functools import partial
from typing import Any

from mindspore.train import Callback, RunContext

from .. import _check
from ..engine.ema import check_not_applied
from ..network.optimizers import warn_if_rates_are_of_micro_batches
from ..ranks.agreement import agree, rate_facts
from ..ranks.group import total
from ..saving.checkpointer import Checkpointer
from .callbacks import SKIPPED_IN_A_ROW, warn_about_counters
from .loop import ResumableLoop
from .step import never


class FlushTail(Callback):
    """A callback for `Model` with `AccumulatedTrainStep`: it ends the last window of each epoch.

    The update with the tail comes before `Model.fit` evaluates and before a checkpoint is saved, in any order of the
    callbacks. This callback also

    - applies the average of the weights (`ema`) while `Model.fit` evaluates, and warns if a callback evaluates without,
    - gives other callbacks the optimizer, which `ReduceLROnPlateau` and `LearningRateScheduler` need,
    - checks that all ranks have the same number of micro-batches,
    - updates with the open window if a callback stops the run inside an epoch, unless `SaveStates` saves a state, from
      which it is read again,
    - with several ranks, stops all of them at the end of the epoch in which a callback of one rank requests a stop,
    - discards an open window of an interrupted run, and warns if windows were skipped.

    Raises:
        TypeError: If the network of `Model` is not an `AccumulatedTrainStep`.
        RuntimeError: If ranks differ in their number of micro-batches or drift apart, or an epoch had no finite
            gradient.
        FloatingPointError: If a gradient is not finite and the step has ``nonfinite="raise"``.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        See `AccumulatedTrainStep`.
    """

    def on_train_begin(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        self._step = step_of(args)
        check_not_applied("AccumulatedTrainStep", self._step.ema)
        self._step.average.begin_run()
        self._was_trained, self._times_applied, self._warned = False, 0, False
        self._run_context: RunContext | None = None
        self._step.clear()  # an interrupted run may have left an open window
        args["optimizer"] = self._step.optimizer
        self._counts = self._step.counts
        batches, epochs = args["batch_num"], args["epoch_num"]
        planned = partial(self._step.planned, batches, epochs)
        warn_if_rates_are_of_micro_batches("AccumulatedTrainStep", self._step.optimizer, batches * epochs, planned)
        self._stop_together = None if self._step.group is None else _StopTogether(run_context, self._step)
        self._flushed = False
        if self._stop_together is not None:
            kinds = {type(callback).__name__ for callback in args.get("list_callback") or ()}
            equal_on_ranks = {
                "number of micro-batches in an epoch": batches,
                "number of epochs": epochs,
                "'SaveStates' among the callbacks": "SaveStates" in kinds,
                **rate_facts(self._step.optimizer),
            }
            agree("AccumulatedTrainStep", self._step.group, equal_on_ranks)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        self._flushed = False
        batches_done = args.get("batches_done", 0)  # set by SaveStates in a run resumed inside an epoch
        self._step.epoch_begins(args["batch_num"] - batches_done)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        self._end_evaluation()

    def on_train_step_end(self, run_context: RunContext) -> None:
        self._run_context = run_context  # later callbacks may request a stop, of which an evaluation has no notice
        self._was_trained, ema = self._step.network.training, self._step.ema
        self._times_applied = 0 if ema is None else ema.times_applied
        if run_context.get_stop_requested():
            self._flush(run_context)
        if self._step.raises:
            self._raise_if_skipped(run_context, raises=True)

    def on_eval_begin(self, run_context: RunContext) -> None:
        self._flush(run_context)  # the number of micro-batches may differ from the data set's size
        if hasattr(self, "_step"):
            self._step.average.applied()

    def on_eval_end(self, run_context: RunContext) -> None:
        if hasattr(self, "_step"):
            self._step.average.restore()

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self._flush(run_context)
        self._raise_if_skipped(run_context, raises=self._step.raises)
        self._counts = self._step.counts
        if self._stop_together is not None:
            self._stop_together.epoch_ends()

    def _raise_if_skipped(self, run_context: RunContext, *, raises: bool) -> None:
        """Warn of windows that were skipped in this epoch, or raise an error."""
        updated, skipped = (now - then for now, then in zip(self._step.counts, self._counts))
        epoch, prefix = run_context.original_args()["cur_epoch_num"], "For 'AccumulatedTrainStep'"
        if skipped > 0 and raises:
            raise FloatingPointError(f"{prefix}, a gradient in epoch {epoch} is not finite, and nonfinite='raise'.")
        if skipped > 0:
            windows = _check.quantity(skipped, "window")
            _check.warn(f"{prefix}, {windows} skipped in epoch {epoch}: gradients were not finite.")
        if skipped >= SKIPPED_IN_A_ROW and not updated:
            raise RuntimeError(
                f"{prefix}, the gradients of all {skipped} windows of an epoch were not finite. "
                "Lower the learning rate or the loss scale, set 'clip_norm', or look for NaN in the data."
            )

    def on_train_end(self, run_context: RunContext) -> None:
        self._end_evaluation()
        self._step.average.end_run()
        self._flush(run_context)
        self._step.epoch_begins(0)

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None and hasattr(self, "_step"):  # `Model` also exits callbacks after each evaluation
            self._step.average.end_run()
            self._step.clear()

    def _end_evaluation(self) -> None:
        """Restore the weights after an evaluation; warn if it did not use their average."""
        self._step.average.restore()
        ema = self._step.ema
        if ema is None or not self._was_trained or self._step.network.training:
            return
        self._was_trained = False
        if ema.updates and ema.times_applied == self._times_applied and not self._warned:
            self._warned = True
            _check.warn(
                "For 'AccumulatedTrainStep', a callback has evaluated weights that are not averaged, although 'ema' is "
                "given. Use Model(step, eval_network=step.eval_network, eval_indexes=[0, 1, 2])."
            )

    def _flush(self, run_context: RunContext) -> None:
        """Update with an open window, unless a stop was requested and `SaveStates` saves it."""
        if not hasattr(self, "_step"):
            return
        if self._stop_together is not None:  # once in an epoch, as ranks flush together
            already_flushed, self._flushed = self._flushed, True
            flushes = not already_flushed
        else:
            run = self._run_context or run_context
            is_saved_open = run.get_stop_requested() and "batches_done" in run.original_args()
            flushes = not is_saved_open
        if flushes:
            if self._stop_together is not None or self._step.micro_batches:  # ranks flush together, also without any
                self._step.average.restore()
            self._step.flush()


class _StopTogether:
    """Postpones requests to stop to the end of the epoch, after which all ranks stop if one of them is to.

    `Model` asks after the callbacks whether to stop. A rank that left its epoch before the others would end the job.

    Args:
        run_context (RunContext): that of the run, in which callbacks request a stop.
        step (AccumulatedTrainStep): the network of `Model`.
    """

    def __init__(self, run_context: RunContext, step: Any):
        self._step, self._is_requested = step, bool(run_context.get_stop_requested())
        self._epoch_has_ended = self._stopping = False
        context: Any = run_context
        context.request_stop, context.get_stop_requested = self._request, self._requested

    def epoch_ends(self) -> None:
        """Let the ranks agree when `Model` asks next."""
        self._epoch_has_ended = True

    def _request(self) -> None:
        self._is_requested = True

    def _requested(self) -> bool:
        if self._epoch_has_ended:
            self._epoch_has_ended = False
            self._step.average.restore()  # the weights are compared
            self._stopping = total([self._is_requested], self._step.group) != [0]
            self._step.check_drift()
        return self._stopping


def step_of(args: Any) -> Any:
    """Return the `AccumulatedTrainStep` of a run of `Model`."""
    steps = [cell for _, cell in args["train_network"].cells_and_names() if hasattr(cell, "epoch_begins")]
    is_valid = steps and args.get("optimizer") in (None, steps[0].optimizer) and args.get("loss_fn") is None
    if not is_valid:
        got = type(args["network"]).__name__ + (" with loss_fn or optimizer" if steps else "")
        remedy = "Use Model(AccumulatedTrainStep(...)) without loss_fn and optimizer; the driver needs no FlushTail."
        _check.raise_invalid(TypeError, "FlushTail", "network", "an AccumulatedTrainStep alone", got, remedy)
    return steps[0]


class SaveStates(Callback):
    """A callback that saves the training state of a run of `Model` and resumes it exactly, even inside a window.

    The state is loaded when the callback is created. A callback serves one run and locks the folder until that run
    ends. `Model` skips finished epochs with `initial_epoch`, and raises an error if no epoch is left: check
    ``states.initial_epoch < epochs`` first. The data set skips finished batches with its `set_init_step`.

    States are saved as the `Checkpointer` defines (`every`, `minutes`, a request to stop) and at the end, but not after
    an error or Ctrl-C. Counters of callbacks, such as the patience of `EarlyStopping`, restart, with a warning. Python
    functions in the data set must draw their random numbers as a function of the row or the epoch.

    Args:
        checkpointer (Checkpointer): defines when and where states are saved, and which one to resume.
        step (AccumulatedTrainStep): the network of `Model`.
        dataset (Dataset): the data set that `Model` trains on, shuffled with a fixed seed.

    Raises:
        CheckpointError: If the state to resume can't be read, or belongs to another run.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import tempfile
        >>> from mindspore import nn
        >>> from mindspore.train import Model
        >>> from model_zoo import MLP, create_dataset
        >>> from ms_accum import AccumulatedTrainStep, Checkpointer, FlushTail, SaveStates
        >>> def train(epochs, folder):
        ...     net, digits = MLP(), create_dataset(image_size=28)
        ...     step = AccumulatedTrainStep((net, nn.CrossEntropyLoss()), nn.SGD(net.trainable_params(), 0.1))
        ...     states = SaveStates(Checkpointer(folder, every=10, resume="auto"), step, digits)
        ...     Model(step).train(epochs, digits, callbacks=[FlushTail(), states], initial_epoch=states.initial_epoch)
        ...     return step.updates
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     print(train(1, folder), train(2, folder))
        12 24
    """

    def __init__(self, checkpointer: Checkpointer, step: Any, dataset: Any):
        self._loop = ResumableLoop(checkpointer, step.trained, step)
        self._step, self._checkpointer = step, checkpointer
        self._data = dataset
        self._size = dataset.get_dataset_size()
        self._loop.set_epoch_size(self._size)
        self._loop.__enter__()
        self._is_resumed, self._is_used = self._loop.is_resumed, False
        self._epoch, self._batches = self._loop.epoch, self._loop.batches
        if self._batches == self._size:
            reason = f"stopped before the end of epoch {self._epoch}, whose evaluation and callbacks are not repeated"
            _check.warn(f"For 'SaveStates', the resumed run {reason}.")
            self._epoch, self._batches = self._epoch + 1, 0
        dataset.set_init_step(self._size * self.initial_epoch + self._batches)
        source: Any = getattr(dataset, "source", None)
        if hasattr(source, "begin_with_epoch") and not hasattr(source, "__getitem__"):  # such as TokenBatches
            source.begin_with_epoch(source.next_epoch + self.initial_epoch)

    @property
    def initial_epoch(self) -> int:
        """int, the number of finished epochs; pass it to `Model.train` or `Model.fit` as `initial_epoch`."""
        return self._epoch - 1

    def on_train_begin(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        if self._is_used:
            raise RuntimeError("For 'SaveStates', a run of Model has used it already. Create a new one for each run.")
        if args["train_dataset"] is not self._data:
            _check.raise_invalid(ValueError, "SaveStates", "dataset", "the one that Model trains on", "another one")
        if self._is_resumed:
            warn_about_counters(args.get("list_callback", ()))
        args["batches_done"] = self._batches
        self._step.stops = lambda: self._checkpointer.requests()[0] > 0
        args["cur_step_num"] = args["batch_num"] * self.initial_epoch + self._batches

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        epoch = run_context.original_args()["cur_epoch_num"]
        if epoch < self._epoch:
            remedy = "Pass initial_epoch=states.initial_epoch to Model.train or Model.fit."
            rule = f"{self.initial_epoch}, the number of epochs that the resumed run has finished"
            _check.raise_invalid(ValueError, "SaveStates", "initial_epoch", rule, epoch - 1, remedy)

    def on_train_step_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        self._step.average.restore()  # a callback may have evaluated
        args["batches_done"] += 1
        self._loop.after_micro_batch(args["cur_epoch_num"], args["batches_done"])

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        self._step.average.restore()
        if args["batches_done"] == args["batch_num"]:
            args["batches_done"] = 0
            self._loop.move_to(args["cur_epoch_num"] + 1)

    def on_train_end(self, run_context: RunContext) -> None:
        del run_context
        self._end(None)

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None:  # `Model` also exits callbacks after each evaluation
            self._end(kind, *error)

    def _end(self, *error: Any) -> None:
        self._is_used = True
        self._step.average.restore()
        self._step.stops = never
        self._data.set_init_step(0)
        self._loop.__exit__(*error)
