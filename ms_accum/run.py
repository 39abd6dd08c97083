"""How does a run proceed, from one window to the next?"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from contextlib import ExitStack, nullcontext
from functools import partial
from typing import Any, Callable, NamedTuple

import mindspore as ms
import numpy as np

from . import _check
from .loss.objective import Objective
from .network.generators import offset_seeds_by_rank
from .numerics.nonfinite import BadBatches
from .numerics.sizes import Sizes
from .ranks.agreement import agree, check_drift, rate_facts, take_from_rank_0
from .ranks.group import Group, gather, is_first, total
from .ranks.heartbeat import exchange, heartbeat
from .saving.checkpointer import NO_WISHES, Checkpointer, find_together
from .saving.run_state import RunState
from .saving.trained import Trained
from .window.batches import Data, Position
from .window.callbacks import UNKNOWN, Callbacks, Facts, callbacks_of, warn_about_counters
from .window.ends import planned, windows_by_epoch, windows_in_run
from .window.open_window import Ended, OpenWindow
from .window.record import UpdateRecord

_log = logging.getLogger("ms_accum")
SAME_ON_ALL = "Give all ranks the same arguments; what only rank 0 shows is for 'report'."


class Ways(NamedTuple):
    """What a run needs from the driver."""

    window: OpenWindow
    objective: Objective
    trained: Trained
    saved: RunState
    end: Callable[[Any], Ended]
    """Ends the window, with the requests to stop and to save."""
    settings: dict[str, Any]
    """The settings that must be equal in a resumed run."""
    in_step: bool
    """Whether the ranks wait for each other in every micro-batch."""
    tail: str
    group: Group | None
    bad: BadBatches | None
    """Writes micro-batches that are not finite to a folder."""


class Run:
    """One call of `train_process`.

    Args:
        ways (Ways): the parts of the driver.
        at (Position): where it begins.
        calls (Callbacks): the callbacks.
        states (Optional[Checkpointer]): saves the training states.
        evaluate (Optional[Callable]): gets the epoch and the callbacks; returns the results, or None.
        before (int): the number that is added to epoch numbers, `initial_epoch`.
    """

    def __init__(
        self,
        ways: Ways,
        at: Position,
        calls: Callbacks,
        *,
        states: Checkpointer | None = None,
        evaluate: Callable[[int, Callbacks], dict[str, Any] | None] | None = None,
        before: int = 0,
    ):
        self._ways, self._window, self._calls = ways, ways.window, calls
        self.at = at
        """Position, of the run in its data."""
        self._states, self._evaluate, self._before = states, evaluate, before
        self._step_begun, self._left_out = False, 0

    def train(self, epochs: Iterable[Iterable], ends: Callable) -> None:
        """Train with the remaining epochs; `ends` marks in an epoch's batches where windows end."""
        if self.at.windows:
            warn_about_counters(self._calls.facts.list_callback)
        self._ended_at = time.perf_counter()
        before = self._window.counters.updates, self._window.counters.skipped
        for batches in epochs:
            epoch = self._before + self.at.epoch
            self._calls("on_train_epoch_begin", cur_epoch_num=epoch)
            if not self._stopping():
                self._run_epoch(ends(batches, self._window.micro_batches))
            over = not self._stopping()
            self.at.check(over)
            # Before the position moves to the next epoch: a run that fails here resumes at the end of this one.
            self._calls.epoch_end(None if self._evaluate is None else self._evaluate(epoch, self._calls))
            if over:
                self.at.next_epoch()
            stopping, changing = total([self._calls.stopping, self._calls.may_change_parameters], self._ways.group)
            if self._states is not None and changing:
                self._states.changed()
            trained = self._ways.trained.optimizer
            check_drift("train_process", self._ways.group, trained.parameters, trained)
            if stopping:
                break
        if not self.at.windows and self._ways.tail == "drop" and not self._calls.stopping:
            raise RuntimeError("For 'train_process', no window was filled in the whole run. Lower 'mini_steps'.")
        self._calls("on_train_end")
        self._warn_unless_updated(*before)
        self._warn_of_left_out()

    def _warn_unless_updated(self, updates: int, skipped: int) -> None:
        """Warn if there were windows since these counts, and all of them were skipped."""
        counters = self._window.counters
        if counters.updates == updates and counters.skipped > skipped:
            count = counters.skipped - skipped
            _log.warning("For 'train_process', all %d windows were skipped, so nothing was learned.", count)

    def _warn_of_left_out(self) -> None:
        """Say on which ranks micro-batches were left out: rank 0, which reports, does not see those of the others."""
        if self._ways.group is None or not self._window.leaves_out:
            return
        counts = [int(count) for count in gather(np.array([self._left_out], np.float32), self._ways.group)]
        if is_first(self._ways.group) and any(counts):
            where = ", ".join(f"{count:,} on rank {rank}" for rank, count in enumerate(counts) if count)
            what = "1 micro-batch was" if sum(counts) == 1 else f"{sum(counts):,} micro-batches were"
            _log.warning("For 'train_process', %s left out, because not finite: %s.", what, where)

    def _run_epoch(self, micro_batches: Iterable) -> None:
        try:
            self._run_windows(micro_batches)
        finally:  # the end of the epoch, its evaluation, and the user after an error may change the weights
            self._window.run_waiting()

    def _run_windows(self, micro_batches: Iterable) -> None:
        for micro_batch, ends in micro_batches:
            self._add(micro_batch)
            self.at.batches += ends or self._window.size is not None
            self.at.rows += micro_batch[0].shape[0]
            if ends:
                self._end_window()
            elif self._states is not None:
                wishes = self._states.wishes()  # with several ranks, kept until they are summed at the window's end
                if self._window.saved_inside:
                    self._save_if_due(True, wishes)
            if self._stopping() and not self._window.micro_batches:
                return
        if self._window.micro_batches and self._ways.tail == "flush":
            self._end_window()
        elif self._ways.tail == "drop":
            self._window.clear()

    def _add(self, micro_batch: tuple) -> None:
        if not self._step_begun:
            self._step_begun = True
            step = self._calls.facts.cur_step_num + 1
            self._calls("on_train_step_begin", cur_step_num=step, train_dataset_element=micro_batch)
        self._window.add(micro_batch)
        if self._ways.bad is not None:
            self._ways.bad.keep(self._window.micro_batches, micro_batch)
        heartbeat().beat()

    def _stopping(self) -> bool:
        """Return whether to stop inside the epoch; several ranks stop at its end, after they have agreed."""
        return self._ways.group is None and self._calls.stopping

    def _end_window(self) -> None:
        at, states, group = self.at, self._states, self._ways.group
        held = self._window.micro_batches
        wishes = states.wishes() if states and group else NO_WISHES
        with nullcontext() if group is None else exchange():
            ended = self._ways.end(wishes)
        at.step, at.windows = at.step + 1, at.windows + 1
        self._left_out += len(ended.bad)
        now = time.perf_counter()
        seconds, self._ended_at = now - self._ended_at, now
        record = self._record(ended, seconds, held)
        if self._ways.bad is not None:
            self._ways.bad.window_ended(record, ended.bad)
        self._step_begun = False
        self._calls.step_end(record)
        self._window.counters.skips.add(record)
        if states is not None:
            self._save_if_due(False, states.wishes() if group is None else ended.wishes)

    def _record(self, ended: Ended, seconds: float, held: int) -> UpdateRecord:
        """Return the record of a window with this number of micro-batches."""
        at, counters = self.at, self._window.counters
        before = 0 if self._window.size is None else at.batches - held
        bad = tuple(before + number for number in ended.bad)
        epoch, skipped = self._before + at.epoch, not ended.updated
        return UpdateRecord(epoch, at.step, counters.updates, *ended.figures, seconds, skipped, ended.overflow, bad)

    def _save_if_due(self, in_window: bool, wishes: Any) -> None:
        if self._states is not None:
            updates, take = self._window.counters.updates, partial(self._ways.saved.take, self.at)
            self._states.after_micro_batch(updates, in_window, take, wishes)


def epochs_of(last: int, before: int) -> int:
    """Return the number of epochs of a run that ends with epoch `last` and begins after epoch `before`."""
    _check.positive_int("train_process", "epoch", last)
    if type(before) is not int or not 0 <= before < last:
        _check.refuse(ValueError, "train_process", "initial_epoch", f"an int >= 0 and < {last}, the last epoch", before)
    return last - before


def begin_run(
    closing: ExitStack,
    ways: Ways,
    epochs: int,
    data: Data,
    sizes: Sizes | None,
    how: dict[str, Any],
    called: list,
    *,
    states: Checkpointer | None,
    evaluate: Any,
) -> Run:
    """Return the run, at its beginning or where it resumes; `closing` closes its callbacks and states."""
    how = {"mini_steps": sizes and sizes.settings, **how, "ranks": ways.group.size if ways.group else 1}
    if states is not None:
        closing.enter_context(states.share(ways.group))
    at, windows = _begin(ways, epochs, data, sizes, states, how)
    facts = _facts_of(ways, data, epochs, sizes, at)
    facts["initial_epoch"] = how.get("initial_epoch", 0)
    calls = closing.enter_context(Callbacks(called, facts))
    calls("on_train_begin", planned=None if windows is None else windows - at.windows)
    if states is not None:
        closing.enter_context(states.saving_at_the_end(partial(ways.saved.take, at), ways.window))
    return Run(ways, at, calls, states=states, evaluate=evaluate, before=facts["initial_epoch"])


def _begin(
    ways: Ways, epochs: int, data: Data, sizes: Sizes | None, states: Checkpointer | None, how: dict
) -> tuple[Position, Any]:
    """Return the position where all ranks begin or resume, and the number of windows, None if unknown."""
    window = ways.window
    at = data.start(held=window.micro_batches)
    if states is not None:
        at = _resume(ways, epochs, data, states, how) or at
    batches = data.batches
    before = max(0, window.counters.updates - at.windows)  # updates before the run: window sizes may depend on them
    windows = planned("train_process", batches, sizes, ways.tail, epochs, held=at.held, updates=before)
    if ways.group is not None:
        facts = windows_facts(ways, epochs, batches, sizes, held=at.held, updates=before)
        facts |= {"updates before the run": window.counters.updates, "windows before": at.windows}
        facts |= {"epoch to begin with": at.epoch, "batches before": at.batches, **rate_facts(ways.trained.optimizer)}
        agree("train_process", ways.group, facts)
        take_from_rank_0(ways.objective.forward.get_parameters(), ways.group)
        offset_seeds_by_rank([ways.objective.forward], ways.group.rank)
    return at, windows


def windows_facts(
    ways: Ways, epochs: int, batches: int | None, sizes: Sizes | None, *, held: int, updates: int
) -> dict[str, Any]:
    """Return the facts about windows on which ranks must agree: they wait for each other at the end of each."""
    windows = windows_by_epoch(batches or 0, sizes, ways.tail, epochs, held=held, updates=updates)
    facts: dict[str, Any] = {"number of windows": sum(windows)}
    facts |= {f"number of windows in epoch {number}": each for number, each in enumerate(windows, 1)}
    if ways.in_step or (sizes is not None and sizes.constant is None):
        # Sizes may depend on the updates, and a skipped window is none. Counted in the dataset: a resumed position has
        # rank 0's number.
        facts["number of batches in an epoch"] = batches
    if ways.in_step:
        facts |= {f"number of {name}": count for name, count in ways.window.counts.items()}
    return facts


def given_facts(
    valid_dataset: Any, metrics: Any, eval_every: Any, checkpointer: Checkpointer | None, callbacks: Any
) -> dict[str, Any]:
    """Return the facts about the arguments on which ranks must agree: they make the ranks wait for each other."""
    given = {"valid_dataset": valid_dataset is not None, "checkpointer": checkpointer is not None}
    given["callbacks"] = bool(callbacks_of("train_process", "callbacks", callbacks))
    facts: dict[str, Any] = {f"'{name}'": "one" if is_given else None for name, is_given in given.items()}
    facts |= {"'metrics'": sorted(map(str, metrics or ())), "'eval_every'": eval_every}
    return facts if checkpointer is None else {**facts, **checkpointer.facts}


def _resume(ways: Ways, epochs: int, data: Data, states: Checkpointer, how: dict) -> Position | None:
    """Load the state found by the checkpointer, and return its position; None if there is no state."""
    parameters = ways.saved.parameters()  # raises an error before training if a state can't be saved
    found = find_together("train_process", states, {**how, **ways.settings}, ways.group)
    return None if found is None else ways.saved.put_back(found, parameters, epochs, data)


def _facts_of(ways: Ways, data: Data, epochs: int, sizes: Sizes | None, at: Position) -> Facts:
    """Return what `RunContext.original_args` contains for callbacks, under the names of MindSpore's `Model`."""
    batches, objective = data.batches, ways.objective
    if batches is not None and sizes is not None:
        batches = max(1, windows_in_run(batches, sizes, ways.tail, 1))
    facts = Facts(mode="train", train_dataset=data.dataset, epoch_num=epochs, dataset_sink_mode=False)
    facts.update(batch_num=batches or UNKNOWN, cur_step_num=at.windows, train_dataset_element=None)
    facts.update(parallel_mode=ms.get_auto_parallel_context("parallel_mode"), device_number=at.ranks)
    facts.update(train_network=objective.forward, network=objective.network, loss_fn=objective.loss_fn)
    facts.update(optimizer=ways.trained.optimizer)
    return facts
