"""A run of the driver, from one window to the next: data, window, record, callbacks, states."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import nn
from mindspore.train import Callback

from .. import _check
from ..network.generators import offset_seeds_by_rank, random_state
from ..network.training_mode import start_training
from ..ranks.agreement import agree, check_drift, rate_facts, take_from_rank_0, warn_if_data_are_equal
from ..ranks.group import gather, gather_numbers, is_first, total
from ..saving.checkpointer import NO_REQUESTS, Checkpointer, find_together
from ..saving.model_file import save_model
from ..saving.training_state import TrainingState
from .callbacks import (
    UNKNOWN,
    Callbacks,
    RunArguments,
    UpdateRecord,
    callbacks_of,
    check_skipped,
    may_change_parameters,
    warn_about_counters,
)
from .data import Data, Position, check_had_batches
from .evaluation import Evaluation
from .interrupts import interruptible
from .loop import RunState
from .sizes import ByWeight, Sizes, windows_by_epoch
from .step import Ended, Step
from .windows import Windows

_log = logging.getLogger("ms_accum")
_OWNER = "train_process"
_STOP = (1.0, 0.0)  # a request to stop
SAME_ON_ALL = "Give all ranks the same arguments; what only rank 0 shows is for 'report'."


@dataclass(frozen=True)
class Plan:
    """What a run has been asked for: the arguments of `train_process`, checked and resolved once."""

    epochs: int
    """The number of epochs."""
    initial_epoch: int
    """The number that is added to epoch numbers, `initial_epoch`."""
    max_updates: int | None
    """The number of updates at which the run ends before its last epoch."""
    data: Data
    sizes: Sizes | ByWeight | None
    """The sizes of windows; None: each batch is a window."""
    micro_batch_size: int | None
    tail: str
    settings: dict[str, Any]
    """The settings of the driver that must be equal in a resumed run."""
    reports: Sequence[Callback]
    """What shows the run, on this rank."""
    callbacks: Sequence[Callback]
    states: Checkpointer | None
    """Saves the training states."""
    evaluate: Evaluation | None
    ckpt_path: str | None
    """Where the model is saved: an absolute path, as a callback may change the working directory."""

    def windows_by_epoch(self, epochs: int, **now: int) -> list[int] | None:
        """Return the number of windows in each of so many epochs; None if it is unknown. `now` is where they begin."""
        batches = self.data.batches
        if batches is None or isinstance(self.sizes, ByWeight):
            return None
        return windows_by_epoch(batches, self.sizes, self.tail, epochs, **now) if epochs else []


class Run:
    """One call of `train_process`.

    Args:
        network (Cell): the user's network.
        step (Step): runs windows.
        waiting (list): micro-batches that wait for their window to be complete.
        plan (Plan): what to do.
    """

    def __init__(self, network: nn.Cell, step: Step, waiting: list[tuple], plan: Plan):
        self._network = network
        self._step = step
        self._waiting = waiting
        self._plan = plan
        self._group = step.group
        self._state = RunState(network, step)
        self._left_out = 0
        self._stopped = 0  # ranks on which a callback had requested a stop when they last agreed
        self._read: Sequence[int] = (0,)  # batches of the epoch, by each rank
        self._generators: dict[str, Any] | None = None  # those of random numbers when the window began
        self.at = Position()
        """Position, of the end of the last window."""

    def train(self) -> None:
        """Train, and save the model."""
        plan = self._plan
        try:
            self._open()
            with interruptible() as self._raise_lost_interrupt, ExitStack() as closing:
                self._begin(closing)
                self._train_epochs()
                # Before the larger state: the disk may get full.
                if plan.ckpt_path is not None and is_first(self._group):
                    save_model(self._network, plan.ckpt_path)
        except BaseException:
            self._waiting.clear()  # of a window that is not finished
            raise

    def _open(self) -> None:
        """Prepare the step and the network."""
        step, sizes = self._step, self._plan.sizes
        size = None if sizes is None else sizes.constant or 0
        step.open(size)
        start_training(self._network, step.objective.forward)
        if size != 1:
            step.objective.warn()

    def _begin(self, closing: ExitStack) -> None:
        """Begin or resume, and begin the callbacks; `closing` ends them and the states."""
        plan, states = self._plan, self._plan.states
        if states is not None:
            closing.enter_context(states.for_group(self._group))
        windows = self._find_position()
        self._callbacks = closing.enter_context(Callbacks([*plan.reports, *plan.callbacks], self._callback_arguments()))
        self._callbacks("on_train_begin", planned=windows)
        if states is not None:
            closing.enter_context(states.saving_at_the_end(self._take, can_save=lambda: self._step.can_save))
        if self.at.windows:
            warn_about_counters(self._callbacks.arguments.list_callback)

    def _find_position(self) -> int | None:
        """Find where all ranks begin or resume; return the number of windows to come, None if it is unknown."""
        plan, step = self._plan, self._step
        self.at = self._resume() or plan.data.start()
        now = {"done": self.at.batches, "open_micro_batches": len(self._waiting), "updates": step.updates}
        by_epoch = plan.windows_by_epoch(plan.epochs - self.at.epoch + 1, **now)
        windows = None if by_epoch is None else sum(by_epoch)
        if windows is not None and plan.max_updates is not None:
            windows = min(windows, max(0, plan.max_updates - step.updates))
        if self._group is not None:
            equal_on_ranks: dict[str, Any] = {"'epoch'": plan.epochs}
            equal_on_ranks |= {"updates before the run": step.updates, "windows before": self.at.windows}
            equal_on_ranks["epoch to begin with"] = self.at.epoch
            if plan.tail == "carry" and plan.states is not None:  # the position of one is that of all
                equal_on_ranks["number of batches in an epoch"] = plan.data.batches
            agree(_OWNER, self._group, {**equal_on_ranks, **rate_facts(step.optimizer)})
            of_ranks = gather_numbers(np.array([-1 if windows is None else windows], np.int64), self._group)
            windows = None if of_ranks.min() < 0 else int(of_ranks.max())
            take_from_rank_0(step.objective.forward.get_parameters(), self._group)
            offset_seeds_by_rank([step.objective.forward], self._group.rank)
        return windows

    def _resume(self) -> Position | None:
        """Load the state found by the checkpointer, and return its position; None if there is no state."""
        plan = self._plan
        if plan.states is None:
            return None
        parameters = self._state.parameters()  # raises an error before training if a state can't be saved
        settings = {
            "mini_steps": plan.sizes and plan.sizes.settings,
            "micro_batch_size": plan.micro_batch_size,
            **({"initial_epoch": plan.initial_epoch} if plan.initial_epoch else {}),
            "ranks": self._group.size if self._group else 1,
            **plan.settings,
        }
        found_state = find_together(_OWNER, plan.states, settings, parameters, self._group)
        if found_state is None:
            return None
        differences = plan.data.differences(Position(**found_state.state.metadata["at"]), self._group)
        found_state = plan.states.accepted(found_state, differences)
        return self._state.restore(found_state, parameters, plan.epochs, plan.data)

    def _callback_arguments(self) -> RunArguments:
        """Return what `RunContext.original_args` contains for callbacks, under the names of MindSpore's `Model`."""
        plan, objective = self._plan, self._step.objective
        windows = plan.windows_by_epoch(1)
        return RunArguments(
            mode="train",
            train_dataset=plan.data.dataset,
            epoch_num=plan.epochs,
            initial_epoch=plan.initial_epoch,
            dataset_sink_mode=False,
            batch_num=UNKNOWN if windows is None else max(1, *windows),
            cur_epoch_num=plan.initial_epoch + self.at.epochs_begun,
            cur_step_num=self.at.windows,
            train_dataset_element=None,
            parallel_mode=ms.get_auto_parallel_context("parallel_mode"),
            device_number=self.at.ranks,
            train_network=objective.forward,
            network=objective.network,
            loss_fn=objective.loss_fn,
            optimizer=self._step.optimizer,
        )

    def _train_epochs(self) -> None:
        """Train with the remaining epochs."""
        plan, step, callbacks = self._plan, self._step, self._callbacks
        self._ended_at = time.perf_counter()
        updates, skipped = step.updates, step.skipped
        windows = Windows(
            plan.sizes,
            plan.micro_batch_size,
            plan.tail,
            lambda: step.updates,
            self._waiting,
            self._asked_to_stop,
            plan.data.may_reuse_memory,
        )
        self._reading = reading = replace(self.at)
        if self._group is not None and reading.of_ranks is not None:
            reading.batches = reading.of_ranks[self._group.rank]
        for batches in plan.data.epochs(plan.epochs, reading):
            if reading.epoch > reading.reported:
                callbacks("on_train_epoch_begin", cur_epoch_num=plan.initial_epoch + reading.epoch)
            if self.at.windows:
                self._evaluate_if_due()  # the run that is resumed may have ended before or in this evaluation
            self._read = (0,)
            self._train_epoch(windows.of_epoch(batches, reading))
            complete = not self._stopping()
            check_had_batches(reading, complete)
            if not self._waiting:
                self.at, self._generators = self._reached(), None
            if reading.epoch > reading.reported:
                # Before the position moves on: a run that fails here resumes at the end of this epoch.
                results = self._evaluate() if plan.evaluate is not None and not self._evaluates_inside else None
                callbacks.epoch_end(results, evaluates_inside=self._evaluates_inside)
            if complete:
                reading.reported = reading.epoch
                reading.next_epoch()
                self.at = replace(self.at, reported=reading.reported) if self._waiting else replace(reading)
            self._agree()
            check_drift(_OWNER, self._group, step.optimizer.parameters, step.optimizer)
            if self._stopped or self._has_all_updates:
                break
        if not self.at.windows and plan.tail == "drop" and not (callbacks.stopping or self._has_all_updates):
            raise RuntimeError("For 'train_process', no window was filled in the whole run. Lower its size.")
        if self._evaluates_inside and self.at.evaluated != step.updates:
            self._evaluate_inside()
        callbacks("on_train_end", stopped=bool(self._stopped))
        self._warn_unless_updated(updates, skipped)
        self._warn_of_left_out()

    # Evaluations

    @property
    def _evaluates_inside(self) -> bool:
        """bool, whether evaluations come after a number of updates, not at the end of each epoch."""
        return self._plan.evaluate is not None and self._plan.evaluate.every is not None

    def _evaluate_if_due(self) -> None:
        """Evaluate if the number of updates is a multiple of `eval_every`, and was not evaluated."""
        evaluate, updates = self._plan.evaluate, self._step.updates
        if evaluate is None or evaluate.every is None or not updates or updates % evaluate.every:
            return
        if self.at.evaluated != updates:
            self._evaluate_inside()

    def _evaluate_inside(self) -> None:
        """Evaluate inside an epoch, between two windows, or at the end of the run."""
        self._callbacks.evaluated_inside(self._evaluate())
        self._agree()

    def _evaluate(self) -> dict[str, Any] | None:
        """Evaluate, on all ranks; if a stop is requested, save the state and stop: the resumed run evaluates."""
        plan, updates, states = self._plan, self._step.updates, self._plan.states
        if plan.evaluate is None:
            return None
        results = plan.evaluate(self._callbacks, lambda: states is not None and states.requests()[0] > 0)
        if results is None and states is not None:
            states.after_micro_batch(updates, False, self._take, _STOP)
        self.at.evaluated = self._reading.evaluated = updates
        self._ended_at = time.perf_counter()  # the time of the next window is its own
        return results

    def _agree(self) -> None:
        """Agree with the other ranks whether to stop, and note whether callbacks may have changed Parameters."""
        states = self._plan.states
        may_change = may_change_parameters(self._plan.callbacks)
        self._stopped, changing = total([self._callbacks.stopping, may_change], self._group)
        if states is not None and changing:
            states.changed()

    # Windows

    def _train_epoch(self, windows: Iterator[list[tuple]]) -> None:
        """Run the windows of an epoch, on several ranks until none has another."""
        step, states = self._step, self._plan.states
        while not self._stopping():
            if states is not None and not self._waiting:
                # An epoch that begins again draws its order again.
                self._generators = random_state() if self._reading.batches else self._reading.random
            micro_batches = next(windows, None)
            self._stop_if_asked()
            if micro_batches is None and self._group is None:
                break
            if self._group is not None and not self._reading.windows:
                warn_if_data_are_equal(_OWNER, self._group, micro_batches[0] if micro_batches else ())
            requests = states.requests() if states is not None and self._group is not None else NO_REQUESTS
            window = step.share(micro_batches, requests, self._reading.batches)
            self._read = window.batches
            if not window.ranks:
                break
            self._callbacks(
                "on_train_step_begin",
                cur_step_num=self._callbacks.arguments.cur_step_num + 1,
                train_dataset_element=micro_batches[0] if micro_batches else None,
            )
            ended = step.run(window, self._asked_to_stop)
            if ended is None:
                self._stop_if_asked()
            else:
                self._end_window(ended, len(micro_batches or ()), window.requests)
            del micro_batches, window  # or they would be in memory with those of the next window

    def _reached(self) -> Position:
        """Return the position of all ranks: one whose data are over, or that read a shorter window, has no more.

        Where windows end by weight, each rank has its own.
        """
        own = [*self._read] if isinstance(self._plan.sizes, ByWeight) and len(self._read) > 1 else None
        return replace(self._reading, batches=max(self._reading.batches, *self._read), of_ranks=own)

    def _asked_to_stop(self) -> bool:
        """Return whether a signal asks this process to stop; several ranks finish the window and stop together."""
        states = self._plan.states
        return self._group is None and states is not None and states.requests()[0] > 0

    def _stop_if_asked(self) -> None:
        """Save the state of the last window's end, and stop: a window that is not finished did not happen."""
        self._raise_lost_interrupt()
        states = self._plan.states
        if states is not None and self._asked_to_stop():
            states.after_micro_batch(self._step.updates, True, self._take, _STOP)

    def _end_window(self, ended: Ended, micro_batches: int, requests: Sequence[float]) -> None:
        """Do what follows a window: record, callbacks, whether too many were skipped, evaluation, state."""
        step, states = self._step, self._plan.states
        self._reading.step += 1
        self._reading.windows += 1
        self.at, self._generators = self._reached(), None
        record = self._record(ended, micro_batches)
        self._callbacks.step_end(record)
        step.skipped_in_a_row = check_skipped(record, step.skipped_in_a_row, raises=step.raises)
        if ended.updated:
            self._evaluate_if_due()
        if states is not None:
            requests = states.requests() if self._group is None else requests
            states.after_micro_batch(step.updates, False, self._take, requests)

    def _record(self, ended: Ended, micro_batches: int) -> UpdateRecord:
        """Return the record of a window with this number of micro-batches."""
        now = time.perf_counter()
        seconds, self._ended_at = now - self._ended_at, now
        self._left_out += len(ended.bad)
        batches_before = 0 if self._plan.sizes is None else self._reading.batches - micro_batches
        return UpdateRecord(
            epoch=self._plan.initial_epoch + self.at.epoch,
            step=self.at.step,
            update=self._step.updates,
            loss=ended.loss,
            lr=ended.lr,
            grad_norm=ended.grad_norm,
            samples=ended.samples,
            seconds=seconds,
            skipped=not ended.updated,
            overflow=ended.overflow,
            bad=tuple(batches_before + number for number in ended.bad),
            terms=ended.terms,
        )

    @property
    def _has_all_updates(self) -> bool:
        """bool, whether the run has made the updates after which it ends, which is so on all ranks at once."""
        return self._plan.max_updates is not None and self._step.updates >= self._plan.max_updates

    def _stopping(self) -> bool:
        """Return whether to stop inside the epoch; for a callback, several ranks stop when they have agreed."""
        return self._has_all_updates or bool(self._stopped) or (self._group is None and self._callbacks.stopping)

    def _take(self) -> TrainingState:
        """Return the state of the last window's end."""
        state = self._state.take(self.at)
        if self._generators is None:
            return state
        return state._replace(metadata={**state.metadata, "random": self._generators})

    def _warn_unless_updated(self, updates: int, skipped: int) -> None:
        """Warn if there were windows since these counts, and all of them were skipped."""
        count = self._step.skipped - skipped
        if self._step.updates == updates and count:
            _log.warning("For 'train_process', all %d windows were skipped, so nothing was learned.", count)

    def _warn_of_left_out(self) -> None:
        """Report the ranks that left out micro-batches: rank 0, which reports, does not have the others' counts."""
        if self._group is None or self._step.config.skips is None:
            return
        counts = [int(count) for count in gather(np.array([self._left_out], np.float32), self._group)]
        if is_first(self._group) and any(counts):
            counts_by_rank = ", ".join(f"{count:,} on rank {rank}" for rank, count in enumerate(counts) if count)
            subject = f"{_check.quantity(sum(counts), 'micro-batch')} {'was' if sum(counts) == 1 else 'were'}"
            _log.warning("For 'train_process', %s left out, because not finite: %s.", subject, counts_by_rank)


def epochs_of(last: int, initial_epoch: int) -> int:
    """Return the number of epochs of a run that ends with epoch `last` and begins after epoch `initial_epoch`."""
    _check.positive_int(_OWNER, "epoch", last)
    if type(initial_epoch) is not int or not 0 <= initial_epoch < last:
        rule = f"an int >= 0 and < {last}, the last epoch"
        _check.raise_invalid(ValueError, _OWNER, "initial_epoch", rule, initial_epoch)
    return last - initial_epoch


def arguments_equal_on_ranks(
    valid_dataset: Any, metrics: Any, eval_every: Any, checkpointer: Checkpointer | None, callbacks: Any
) -> dict[str, Any]:
    """Return what must be equal on all ranks, because these arguments make the ranks wait for each other."""
    is_given = {"valid_dataset": valid_dataset is not None, "checkpointer": checkpointer is not None}
    is_given["callbacks"] = bool(callbacks_of(_OWNER, "callbacks", callbacks))
    equal: dict[str, Any] = {f"'{name}'": "one" if given else None for name, given in is_given.items()}
    equal |= {"'metrics'": sorted(map(str, metrics or ())), "'eval_every'": eval_every}
    return equal if checkpointer is None else {**equal, **checkpointer.facts}
