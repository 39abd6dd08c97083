"""The driver's open window, on the host: it weighs micro-batches, runs them, and ends the window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import Tensor

from .. import _check
from ..engine.config import WindowConfig
from ..engine.coupled import LossOfBatch, SumOfProducts, trained_by_loss
from ..engine.ema import check_not_applied
from ..engine.nonfinite import RAISE
from ..engine.window import new_window
from ..loss.objective import Objective
from ..network.optimizers import is_sharded, warn_if_no_gradient
from ..network.out_of_memory import memory_advice
from ..network.state import unique_name
from ..ranks.group import is_first
from .runners import Accumulating, AtOnce, Runner
from .window_loss import WindowLoss
from .window_of_batch import Coupled
from .window_of_terms import TermLosses, WindowOfTerms

_OWNER = "GradientAccumulation"


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
    requests: Sequence[float]
    """The requests to stop and to save at its end, summed over the ranks."""
    overflow: bool = False
    """Whether the loss scale was too large."""
    bad: Sequence[int] = ()
    """The micro-batches whose loss was not finite, or that were left out, by their numbers in the window from 1."""
    terms: Mapping[str, float] = {}
    """The mean of each term of the loss."""


class OpenWindow:
    """The open window of a driver: its micro-batches, their losses and weights, and the counters of past windows.

    Args:
        objective (Objective): the loss and its weights.
        config (WindowConfig): what a window works with.
        scheduler (Optional[LRScheduler]): sets the learning rate after each update. Default: ``None``.
    """

    def __init__(self, objective: Objective, config: WindowConfig, *, scheduler: Any = None):
        self.objective = objective
        self.config = config
        self.optimizer = config.optimizer
        self.scheduler = scheduler
        self.group = config.group
        self.size: int | None = None
        """Optional[int], the micro-batches of a full window; 0 if it changes; None if each batch is a window."""
        self.micro_batches = 0
        """int, the number of micro-batches in the window."""
        self.updates = 0
        """int, the number of updates so far."""
        self.skipped = 0
        """int, the number of windows so far without an update."""
        self.updated = False
        """bool, whether the last micro-batch ended a window and updated the parameters."""
        self.skipped_in_a_row = 0
        """int, the current number of windows in a row without a finite gradient."""
        self.raises = config.policy == RAISE
        """bool, whether the first window without a finite gradient ends the run."""
        self.was_discarded = False
        """bool, whether the window was discarded because a micro-batch failed."""
        self._weight = objective.weight
        leaves_out, terms = config.skips is not None, objective.terms
        self._losses = WindowLoss(objective.summing, leaves_out) if terms is None else TermLosses(terms, leaves_out)
        self._overflows = 0
        self._rows = 1
        self._coupled = isinstance(objective.forward, LossOfBatch)
        self.collects = self._coupled or objective.terms is not None
        """bool, whether a window is run when it is complete, so that a state inside it is that of its beginning."""
        self._check_conflicts()
        self._runners: dict[bool, Runner] = {}
        self._runner: Runner

    def _check_conflicts(self) -> None:
        """Raise an error for config that can't work together."""
        if self._coupled and self.config.skips is not None:
            rule, remedy = "the default with a CoupledLoss", "Its loss is computed once per window."
            _check.raise_invalid(ValueError, _OWNER, "nonfinite", rule, "another value", remedy)

    def open(self, size: int | None) -> None:
        """Prepare for windows of this size.

        Raises:
            RuntimeError: If the size would change inside a window.
        """
        if self.micro_batches and size != self.size:
            raise RuntimeError(
                f"For 'train_process', 'mini_steps' can't change from {_size_text(self.size)} to {_size_text(size)} "
                f"inside a window, which holds {_check.quantity(self.micro_batches, 'micro-batch')}. "
                "Call 'flush()' or 'clear()' first."
            )
        check_not_applied("train_process", self.config.ema)
        self.size = size
        self._use_runner()
        self.was_discarded = False
        self.skipped_in_a_row = 0
        self._overflows = self.config.overflows

    def add(self, micro_batch: tuple, ends: bool = False) -> None:
        """Run a micro-batch and add it to the window.

        Args:
            micro_batch (tuple): its columns.
            ends (bool): whether `end` follows, so that the update may be a part of the same graph. Default: ``False``.
        """
        self.objective.check_micro_batch(micro_batch, self.size == 1, self.optimizer.parameters)
        weight: Any = self._weight.of(micro_batch)
        self._rows = micro_batch[0].shape[0]
        with self._running():
            if weight:
                loss = self._runner.add(micro_batch, self._weight.as_tensor(weight), ends)
                self._losses.add(loss, weight, self._rows, self.micro_batches + 1)
            else:  # not run: its loss may be 0/0 (all tokens masked), and 0 times NaN is NaN
                self._runner.pass_over()
        self.micro_batches += 1
        self.updated = False

    def end(self, requests: Sequence[float] = ()) -> Ended:
        """Update with the window and begin the next one. The window's loss is that of all ranks."""
        alone = self.group is None
        with self._running():
            sends = not alone or self.config.dynamic is not None
            scalars = partial(self._scalars, requests) if sends else None
            lr, has_updated, norm, *sums = self._runner.end(scalars)
        bad = tuple(self._losses.bad)
        if sums and not alone:
            figures = sums[0].asnumpy().tolist()
            size = len(figures) - len(requests)
            self._losses.load(figures[:size])
            requests = figures[size:]
        loss, terms, samples, grad_norm = self._losses.mean, self._losses.terms, self._losses.samples, float(norm)
        self._reset()
        self.updated = bool(has_updated)
        self.updates += self.updated
        self.skipped += not self.updated
        if self.updated:
            if self.updates == 1 and samples:
                warn_if_no_gradient("train_process", grad_norm)
            if self.scheduler is not None:
                self.scheduler.step()
        overflows_before = self._overflows
        self._overflows = self.config.overflows
        overflow = self._overflows > overflows_before
        return Ended(self.updated, loss, lr, grad_norm, samples, requests, overflow, bad, terms)

    def _scalars(self, requests: Sequence[float]) -> Tensor:
        """Return the sums of the loss, and the requests."""
        return Tensor([*self._losses.state, *requests], ms.float32)

    def clear(self) -> None:
        """Discard the window."""
        if self.micro_batches:
            self._runner.clear()
        self._reset()

    @property
    def counters(self) -> dict[str, int]:
        """dict, the counters of past windows, for a training state."""
        return {
            "updates": self.updates,
            "skipped": self.skipped,
            "updated": self.updated,
            "skips": self.skipped_in_a_row,
        }

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the accumulators, if they are in use, and the values that `load` needs.

        A window that is collected has changed nothing yet: this is the state of its beginning.
        """
        if self.collects:
            return {}, {"micro_batches": 0, "loss": [0.0, 0.0, 0]}
        with self._running():
            accumulators = self.accumulators(self.micro_batches)
        metadata = {"micro_batches": self.micro_batches, "loss": self._losses.state}
        return accumulators, {**metadata, "bad": self._losses.bad} if self._losses.bad else metadata

    def load(self, window: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        """Continue from a saved state; the accumulators have been loaded."""
        if not window["micro_batches"]:
            self.clear()
        else:
            self._losses.load(window["loss"], window.get("bad", ()))
        self.micro_batches = window["micro_batches"]
        self._overflows = self.config.overflows
        self.updates = counters["updates"]
        self.skipped = counters["skipped"]
        self.updated = counters["updated"]
        self.skipped_in_a_row = counters["skips"]

    def can_load(self, micro_batches: int) -> bool:
        """Return whether an open window with this number of micro-batches can be loaded; windows of 1 can't."""
        return not micro_batches or (self.size != 1 and self.saved_inside and not self.collects)

    def accumulators(self, micro_batches: int) -> dict[str, Any]:
        """Return the accumulators of a window with this number of micro-batches; none if it is empty."""
        return self._runner.accumulators if micro_batches else {}

    @property
    def counts(self) -> dict[str, int | None]:
        """The numbers that must be equal on ranks that wait for each other in every micro-batch."""
        return {"micro-batches in a window": self.size, "micro-batches held": self.micro_batches}

    @property
    def is_first(self) -> bool:
        """bool, whether this process writes for all ranks."""
        return is_first(self.group)

    @property
    def saved_inside(self) -> bool:
        """bool, whether a state can be saved inside a window: not with several ranks."""
        return self.group is None

    def check_saved(self, tail: str) -> None:
        """Raise an error if states would have to be saved inside windows that continue in the next epoch."""
        if tail == "carry" and (self.collects or not self.saved_inside):
            collected = "a CoupledLoss" if self._coupled else "several terms"
            cannot_save = collected if self.collects else "several processes"
            rule = f"'flush' or 'drop' with a 'checkpointer' and {cannot_save}"
            remedy = "They can resume between two windows only."
            _check.raise_invalid(ValueError, "train_process", "tail", rule, "'carry'", remedy)

    @property
    def can_save(self) -> bool:
        """bool, whether this process has a state that it can save after an error, without the other ranks."""
        if self.was_discarded:
            return False
        return self.saved_inside or not (self.micro_batches or is_sharded(self.optimizer))

    def _reset(self) -> None:
        self._losses.clear()
        self.micro_batches = 0

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Discard the window if one of its micro-batches fails."""
        try:
            yield
        except BaseException as error:  # also Ctrl-C
            self.was_discarded = True
            self._reset()
            for runner in self._runners.values():  # even the first micro-batch may have added a part
                runner.clear()
            advice = memory_advice(error, self._rows, self.size)
            if advice is not None:
                raise RuntimeError(advice) from error
            self.objective.raise_in_one_line(error)
            raise

    def _use_runner(self) -> None:
        """Use what runs the micro-batches of windows of this size, created when it is first needed."""
        # With several ranks, windows of 1 are summed as well.
        accumulates = self.size != 1 or self.group is not None or self.config.sparse
        if accumulates not in self._runners:
            create = self._new_runner if accumulates else partial(AtOnce, self.objective, self.config)
            self._runners[accumulates] = self._collecting(create(), accumulates)
        self._runner = self._runners[accumulates]

    def _collecting(self, runner: Runner, accumulates: bool) -> Runner:
        """Return the runner; for a loss of several terms, what collects windows for it."""
        if self.objective.terms is None:
            return runner
        skips = self.config.skips if accumulates else None  # in windows of 1 it is the same as to skip them
        return WindowOfTerms(self.objective, runner, self.config, lambda: self.updates, skips)

    def _new_runner(self) -> Runner:
        name = unique_name("gradient_accumulation")
        forward = self.objective.forward
        if not isinstance(forward, LossOfBatch):
            window = new_window(name, self.config)
            return Accumulating(forward, window)
        loss_parameters = trained_by_loss(forward, self.optimizer.parameters)
        window = new_window(name, replace(self.config, weighted=False))
        third_pass = Accumulating(SumOfProducts(forward, loss_parameters), window)
        compiles = self.config.compiles
        return Coupled(forward, third_pass, self.optimizer.parameters, loss_parameters, self.group, compiles)


def _size_text(size: int | None) -> str:
    return "complete batches" if size is None else str(size or "sizes that change")
