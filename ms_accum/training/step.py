"""The step of the driver and of `AccumulatedTrainStep`: runs a window, which is read and shared, and counts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from .. import _check
from ..engine.cells import check_network
from ..engine.config import Options, resolve
from ..engine.ema import Ema, check_not_applied
from ..engine.nonfinite import RAISE, SKIP_MICRO
from ..engine.window import new_window
from ..loss.objective import Objective
from ..network.compiled import in_graphs
from ..network.optimizers import LearningRate, check_scheduler, inner_of, is_sharded, kind_of, warn_if_no_gradient
from ..network.out_of_memory import memory_advice
from ..network.parameters import copies_of, restore, unique_name
from ..network.runtime import tune
from ..network.undo import Undo
from ..ranks.agreement import begin_together, name_of
from .coupled import Coupled, LossOfBatch, SumOfProducts, trained_by_loss
from .runners import ByCalls, ByLoops, WithoutSums, loops
from .shares import Counted, OneLoss, SeveralTerms, Shared, shared, without

_MANY = 9
"""int, the number of shapes of which a run warns."""


def never() -> bool:
    """Return False: nothing asks to stop."""
    return False


class Ended(NamedTuple):
    """The result of a finished window."""

    updated: bool
    """Whether the optimizer was called: the gradient was finite, and not all weights were 0."""
    loss: float
    """Its mean loss."""
    lr: float
    """The learning rate of its update."""
    grad_norm: float
    """The norm of its gradient, before clipping."""
    samples: int
    """Its rows, on all ranks."""
    overflow: bool
    """Whether the loss scale was too large."""
    bad: Sequence[int]
    """The micro-batches whose loss was not finite, or that were left out, by their numbers in the window from 1."""
    terms: Mapping[str, float]
    """The mean of each term of the loss."""


class Shapes:
    """Warns, once in a run, of micro-batches of many shapes: each is compiled, and keeps its memory.

    Args:
        owner (str): the name used in error messages.
    """

    def __init__(self, owner: str):
        self._owner, self._seen, self._seconds = owner, set[tuple](), 0.0

    @contextmanager
    def running(self, parts: Sequence[Counted]) -> Iterator[None]:
        """Count the shapes of a window's micro-batches, and the seconds of a window with a new one."""
        before, began = len(self._seen), time.perf_counter()
        self._seen |= {tuple(column.shape for column in part.columns) for part in parts}
        yield
        if len(self._seen) > before:
            self._seconds += time.perf_counter() - began
            if before < _MANY <= len(self._seen):
                _check.warn(
                    f"For '{self._owner}', micro-batches have had {len(self._seen)} shapes so far, each of which is "
                    f"compiled: the windows with a new one took {self._seconds:.1f} s. Pad to a few lengths, as "
                    "TokenBatches does, or give compile=False."
                )


class Step:
    """Runs windows, and counts them.

    Args:
        owner (str): the name used in error messages.
        objective (Objective): the loss and its weights.
        optimizer (Optimizer): updates the parameters.
        options (Options): all of them, from `config.checked`.
        settings (dict): more settings that must be equal in a resumed run, and on all ranks.
        scheduler (Optional[LRScheduler]): sets the learning rate after each update. Default: ``None``.
    """

    def __init__(
        self,
        owner: str,
        objective: Objective,
        optimizer: Any,
        options: Options,
        settings: Mapping[str, Any],
        scheduler: Any = None,
    ):
        check_network(owner, objective.forward)
        config = resolve(
            owner,
            optimizer,
            objective.forward,
            options,
            # Otherwise the shares add up to 1, and nothing divides.
            divides=options["nonfinite"] == SKIP_MICRO and objective.reduction == "mean" and objective.terms is None,
            shares=True,
        )
        tune(owner, objective.forward.get_parameters())
        check_scheduler(owner, scheduler, optimizer)
        settings = {**objective.settings, **settings}
        facts = {**{f"'{name}'": value for name, value in settings.items()}, **objective.facts, **config.facts}
        facts["'scheduler'"] = name_of(scheduler)
        begin_together(owner, config.group, facts, optimizer, objective.forward)
        self.settings = {**settings, **config.settings, "optimizer": kind_of(optimizer)}
        """dict, what must be equal in a resumed run."""
        self.objective, self.config, self.optimizer = objective, config, optimizer
        self.scheduler, self.group = scheduler, config.group
        self.updates = 0
        """int, the number of updates so far."""
        self.skipped = 0
        """int, the number of windows so far without an update."""
        self.updated = False
        """bool, whether the last window updated the parameters."""
        self.skipped_in_a_row = 0
        """int, the current number of windows in a row without a finite gradient."""
        self.raises = config.policy == RAISE
        """bool, whether the first window without a finite gradient ends the run."""
        self.can_save = True
        """bool, whether this process has a state that it can save after an error, without the other ranks."""
        self._overflows = 0
        self.is_coupled = isinstance(objective.forward, LossOfBatch)
        """bool, whether the loss is a `CoupledLoss`, computed once per window."""
        if self.is_coupled and config.skips is not None:
            rule, remedy = "the default with a CoupledLoss", "Its loss is computed once per window."
            _check.raise_invalid(ValueError, config.owner, "nonfinite", rule, "another value", remedy)
        if objective.terms is not None and config.skips is not None and config.summing.of_micro_batch is not None:
            # The others of a window run again: a rank with one less would add sums of other micro-batches.
            rule, remedy = "False with several terms and nonfinite='skip_micro'", "Sum once per window."
            _check.raise_invalid(ValueError, config.owner, "sync_every_micro_batch", rule, True, remedy)
        self._network = objective.forward
        self._losses = self._losses_of(objective)
        self._learning_rate = LearningRate(self.optimizer)
        self._undo: Undo
        self._counts: list[tuple[Parameter, np.ndarray]] = []
        self._runners: dict[bool, Any] = {}

    def _losses_of(self, objective: Objective) -> Any:
        config, terms = self.config, objective.terms
        if self.is_coupled:
            loss_parameters = trained_by_loss(objective.forward, config.parameters)
            self._network = SumOfProducts(objective.forward, loss_parameters)
            return Coupled(objective.forward, loss_parameters, self.group, config.compiles, lambda: self._undo.undo())
        if terms is None:
            return OneLoss(objective, config.skips is not None)
        return SeveralTerms(terms, lambda: self.updates, config.half, config.skips is not None)

    def open(self, size: int | None) -> None:
        """Prepare for windows of this size; 0 if it changes, None if each batch is a window."""
        check_not_applied(self.config.owner, self.config.ema)
        runs_again = self.is_coupled or self._losses.runs_again
        # Layers may have been frozen until now.
        self._undo = Undo(self.objective.forward, self.config.parameters, runs_again=runs_again)
        self._size = size
        self._shapes = Shapes(self.config.owner) if in_graphs(self.config.compiles) else None
        self.skipped_in_a_row = 0
        self._overflows = self.config.scale.overflows
        self._steps_before = self._optimizer_steps() - self.updates

    def _optimizer_steps(self) -> float:
        """Return the number of updates that the optimizer has counted; NaN if it does not count."""
        counted = getattr(inner_of(self.optimizer), "global_step", None)
        return math.nan if counted is None else int(counted.asnumpy().reshape(-1)[0])

    def share(self, micro_batches: Sequence[tuple] | None, requests: Sequence[float] = (), batches: int = 0) -> Shared:
        """Return what a window counts for, on all ranks together; None is that of a rank whose data are over."""
        alone = self._size == 1
        for micro_batch in micro_batches or ():
            self.objective.check_micro_batch(micro_batch, alone, self.config.parameters)
        window = shared(micro_batches, self.objective, requests, self.group, batches=batches)
        if self.is_coupled and self.group is not None and 0 < window.ranks < self.group.size:
            raise RuntimeError(
                f"For '{self.config.owner}', all ranks must have the same number of windows with a CoupledLoss, but "
                f"{self.group.size - window.ranks} of {self.group.size} have no more data. "
                "Give all the same number of batches."
            )
        return window

    def run(self, window: Shared, stops: Callable[[], bool] = never) -> Ended | None:
        """Run a window; None if `stops` has asked to stop inside it: then it has changed nothing.

        Args:
            window (Shared): what `share` returned.
            stops (Callable): is asked between micro-batches.
        """
        lr, bad, sums = self._learning_rate(), [], None
        updated, norm = False, math.nan
        if self._losses.can_update(window):
            with self._running(window), nullcontext() if self._shapes is None else self._shapes.running(window.parts):
                ran = self._run(window, stops)
            if ran is None:
                self._discard()
                return None
            updated, norm, sums, window, bad = ran
        loss, terms = (math.nan, {}) if sums is None else self._losses.result(sums, window)
        self.updated = updated
        self.updates += updated
        self.skipped += not updated
        if updated:
            if self.updates == 1 and window.samples:
                warn_if_no_gradient(self.config.owner, norm)
            if self.scheduler is not None:
                self.scheduler.step()
        overflows_before, self._overflows = self._overflows, self.config.scale.overflows
        overflow = self._overflows > overflows_before
        self.can_save = self.group is None or not is_sharded(self.optimizer)
        return Ended(updated, loss, lr, norm, window.samples, overflow, bad, terms)

    def _run(self, window: Shared, stops: Callable[[], bool]) -> tuple | None:
        """Run the micro-batches and the end of a window."""
        self._undo.begin()
        skips = self.config.skips
        self._counts = [] if skips is None else copies_of(skips.changed)
        inputs = self._losses.inputs(window)
        runner = self._runner(inputs)
        if skips is not None and self.objective.reduction == "sum":
            for _ in range(window.empty):
                skips.pass_over()
        left_out: list[int] = []
        may_run_again = self._losses.runs_again and not isinstance(runner, WithoutSums)
        while True:
            added = runner.add(inputs, ends=not may_run_again, stops=stops if self._undo.is_sure else never)
            if added is None:
                return None
            runner.pass_over(window.longest - len(inputs))
            sums, bad = self._losses.sums(window, added.losses)
            # What is left out takes its shares out of the divisors of all terms, so the others are run again.
            fewer = without(window, bad, self.group) if may_run_again else None
            if fewer is None or skips is None:
                break
            window, left_out = fewer, left_out + bad
            overflows = skips.counts.asnumpy()[1]
            runner.clear()
            self._undo.undo()
            ops.assign(skips.counts, Tensor([0.0, overflows], ms.float32))
            inputs = self._losses.inputs(window)
        updated, norm, summed = added.ended or runner.end(sums)
        if self.group is not None:
            sums = summed.asnumpy().astype(np.float64)
        if window.parts:
            self._undo.learn()
        return bool(updated), float(norm), sums, window, sorted({*left_out, *bad})

    def _runner(self, inputs: Sequence[tuple]) -> Any:
        """Return what runs such a window, created when it is first needed."""
        # With several ranks, windows of 1 are summed as well; a sum of no rows is 0, and updates.
        sums = self._size != 1 or self.group is not None or not inputs
        if sums not in self._runners:
            self._runners[sums] = self._new_runner(inputs) if sums else WithoutSums(self._network, self.config)
        return self._runners[sums]

    def _new_runner(self, inputs: Sequence[tuple]) -> Any:
        config = self.config
        by_calls = ByCalls(self._network, new_window(unique_name("gradient_accumulation"), config))
        columns = [each for each in (inputs[0][1] if inputs else ()) if isinstance(each, ms.Tensor)]
        return ByLoops(by_calls) if not self.is_coupled and loops(self._network, config, columns) else by_calls

    @contextmanager
    def _running(self, window: Shared) -> Iterator[None]:
        """Discard the window if one of its micro-batches fails."""
        self.can_save = False
        try:
            yield
        except BaseException as error:  # also Ctrl-C
            self._discard()
            rows = window.parts[0].columns[0].shape[0] if window.parts else 1
            advice = memory_advice(error, rows, self._size)
            if advice is not None:
                raise RuntimeError(advice) from error
            self.objective.columns.raise_in_one_line(error)
            raise
        self.objective.columns.ran()

    def _discard(self) -> None:
        """Discard what a window has added, and put back what its forwards have changed."""
        for runner in self._runners.values():  # even the first micro-batch may have added a part
            runner.clear()
        has_not_updated = self._optimizer_steps() == self._steps_before + self.updates
        self.can_save = self._undo.undo() and has_not_updated and self.group is None
        restore(self._counts)

    @property
    def counters(self) -> dict[str, int]:
        """dict, the counters of past windows, for a training state."""
        return {
            "updates": self.updates,
            "skipped": self.skipped,
            "updated": self.updated,
            "skips": self.skipped_in_a_row,
        }

    def load(self, counters: Mapping[str, Any]) -> None:
        """Continue from saved counters."""
        self._overflows = self.config.scale.overflows
        self.updates = counters["updates"]
        self._steps_before = self._optimizer_steps() - self.updates
        self.skipped = counters["skipped"]
        self.updated = counters["updated"]
        self.skipped_in_a_row = counters.get("skips") or 0  # none in a state of an Accumulator


class ShowsWindows:
    """What the driver and the step of `Model` show of the windows that their `Step` has run, and of those that wait."""

    _step: Step
    _waiting: list[tuple]

    @property
    def micro_batches(self) -> int:
        """int, the number of micro-batches that wait for their window to be complete."""
        return len(self._waiting)

    @property
    def updates(self) -> int:
        """int, the number of updates so far."""
        return self._step.updates

    @property
    def skipped(self) -> int:
        """int, the number of windows so far without an update: not finite, all weights 0, or skipped by a stage."""
        return self._step.skipped

    @property
    def ema(self) -> Ema | None:
        """Optional[Ema], the average of the weights."""
        return self._step.config.ema

    @property
    def loss_scale(self) -> float:
        """float, the current loss scale; 1 if there is none."""
        return self._step.config.scale.number

    @property
    def overflows(self) -> int:
        """int, the number of windows so far that overflowed, so that the dynamic loss scale was lowered."""
        return self._step.config.scale.overflows

    @property
    def left_out(self) -> int:
        """int, the number of micro-batches that ``nonfinite="skip_micro"`` left out, on all ranks."""
        return self._step.config.left_out
