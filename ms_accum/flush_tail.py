"""How does a run of `Model` end the tail of an epoch?"""

from __future__ import annotations

from typing import Any

from mindspore.train import Callback, RunContext

from . import _check
from .numerics.ema import check_not_applied
from .ranks.agreement import agree, rate_facts
from .ranks.group import total
from .train_step import AccumulatedTrainStep
from .window.record import SKIPPED_IN_A_ROW


class FlushTail(Callback):
    """A callback for `Model` with `AccumulatedTrainStep`: it ends the last window of each epoch.

    The update with the tail comes before `Model.fit` evaluates and before a checkpoint is saved, in any order of the
    callbacks. This callback also

    - applies the average of the weights (`ema`) while `Model.fit` evaluates, and warns if a callback evaluates without,
    - gives other callbacks the optimizer, which `ReduceLROnPlateau` and `LearningRateScheduler` need,
    - checks the first micro-batch, and that all ranks have the same number of micro-batches,
    - updates with the open window if a callback stops the run inside an epoch, unless `SaveStates` saves it,
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
        self._step.clear()  # an interrupted run may have left an open window
        args["optimizer"] = self._step.optimizer
        self._counts = self._step.counts
        self._together = None if self._step.group is None else _StopTogether(run_context, self._step)
        self._flushed = False
        if self._together is not None:
            facts = {"number of micro-batches in an epoch": args["batch_num"], "number of epochs": args["epoch_num"]}
            saves = any(type(each).__name__ == "SaveStates" for each in args.get("list_callback") or ())
            facts |= {"'SaveStates' among the callbacks": saves, **rate_facts(self._step.optimizer)}
            agree("AccumulatedTrainStep", self._step.group, facts)

    def on_train_epoch_begin(self, run_context: RunContext) -> None:
        args = run_context.original_args()
        self._flushed = False
        done = args.get("batches_done", 0)  # set by SaveStates in a run resumed inside an epoch
        self._step.epoch_begins(args["batch_num"] - done)

    def on_train_step_begin(self, run_context: RunContext) -> None:
        self._continue()
        micro_batch = run_context.original_args().get("train_dataset_element")
        if micro_batch is not None:  # in sink mode the host does not have it
            self._step.look_at(tuple(micro_batch))

    def on_train_step_end(self, run_context: RunContext) -> None:
        self._was_trained, ema = self._step.network.training, self._step.ema
        self._times_applied = 0 if ema is None else ema.times_applied
        if run_context.get_stop_requested():
            self._flush(run_context)
        if self._step.raises:
            self._raise_if_skipped(run_context, at_once=True)

    def on_eval_begin(self, run_context: RunContext) -> None:
        self._flush(run_context)  # the number of micro-batches may differ from the data set's size
        if hasattr(self, "_step"):
            self._step.average.applied()

    def on_eval_end(self, run_context: RunContext) -> None:
        if hasattr(self, "_step"):
            self._step.average.restore()

    def on_train_epoch_end(self, run_context: RunContext) -> None:
        self._flush(run_context)
        self._raise_if_skipped(run_context, at_once=self._step.raises)
        self._counts = self._step.counts
        if self._together is not None:
            self._together.epoch_ends()

    def _raise_if_skipped(self, run_context: RunContext, *, at_once: bool) -> None:
        """Warn of windows that were skipped in this epoch, or raise an error."""
        updated, skipped = (now - then for now, then in zip(self._step.counts, self._counts))
        epoch, who = run_context.original_args()["cur_epoch_num"], "For 'AccumulatedTrainStep'"
        if skipped > 0 and at_once:
            raise FloatingPointError(f"{who}, a gradient in epoch {epoch} is not finite, and nonfinite='raise'.")
        if skipped > 0:
            _check.warn(f"{who}, {skipped} windows of epoch {epoch} were skipped: their gradients were not finite.")
        if skipped >= SKIPPED_IN_A_ROW and not updated:
            raise RuntimeError(
                f"{who}, the gradients of all {skipped} windows of an epoch were not finite. "
                "Lower the learning rate or the loss scale, set 'clip_norm', or look for NaN in the data."
            )

    def on_train_end(self, run_context: RunContext) -> None:
        self._continue()
        self._step.average.end_run()
        self._flush(run_context)

    def __exit__(self, kind: Any, *error: Any) -> None:
        if kind is not None and hasattr(self, "_step"):  # `Model` also exits callbacks after each evaluation
            self._step.average.end_run()

    def _continue(self) -> None:
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
        if self._together is not None:  # once in an epoch, as ranks flush together
            flushed, self._flushed = self._flushed, True
            kept = flushed
        else:
            kept = run_context.get_stop_requested() and "batches_done" in run_context.original_args()
        if not kept:
            if self._together is not None or self._step.micro_batches:  # ranks flush together, also without any
                self._step.average.restore()
            self._step.flush()


class _StopTogether:
    """Postpones requests to stop to the end of the epoch, after which all ranks stop if one of them is to.

    `Model` asks after the callbacks whether to stop. A rank that left its epoch before the others would end the job.

    Args:
        run_context (RunContext): that of the run, in which callbacks request a stop.
        step (AccumulatedTrainStep): the network of `Model`.
    """

    def __init__(self, run_context: RunContext, step: AccumulatedTrainStep):
        self._step, self._wanted = step, bool(run_context.get_stop_requested())
        self._over = self._stopping = False
        context: Any = run_context
        context.request_stop, context.get_stop_requested = self._request, self._requested

    def epoch_ends(self) -> None:
        """Let the ranks agree when `Model` asks next."""
        self._over = True

    def _request(self) -> None:
        self._wanted = True

    def _requested(self) -> bool:
        if self._over:
            self._over = False
            self._step.average.restore()  # the weights are compared
            self._stopping = total([self._wanted], self._step.group) != [0]
            self._step.check_drift()
        return self._stopping


def step_of(args: Any) -> AccumulatedTrainStep:
    """Return the train step of a run of `Model`."""
    found = [cell for _, cell in args["train_network"].cells_and_names() if isinstance(cell, AccumulatedTrainStep)]
    alone = found and args.get("optimizer") in (None, found[0].optimizer) and args.get("loss_fn") is None
    if not alone:
        got = type(args["network"]).__name__ + (" with loss_fn or optimizer" if found else "")
        remedy = "Use Model(AccumulatedTrainStep(...)) without loss_fn and optimizer; the driver needs no FlushTail."
        _check.refuse(TypeError, "FlushTail", "network", "an AccumulatedTrainStep alone", got, remedy)
    return found[0]
