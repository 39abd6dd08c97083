"""What does a window hold that has not ended?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from . import _check
from ._first_update import FirstUpdate
from ._tree import gives_rows
from .checkpoint import CheckpointError
from .objective import Objective
from .out_of_memory import memory_advised
from .parallel import Group
from .running import Accumulating, Immediate


class Ended(NamedTuple):
    """What a window was, once it has ended."""

    updated: bool
    """Whether the optimizer was called: the gradient was finite."""
    figures: tuple[float, float, float, int]
    """Its loss, learning rate, norm and samples, as an `UpdateRecord` has them."""
    wishes: Sequence[float]
    """What was wished at its end, summed over the ranks."""


class OpenWindow:
    """Its micro-batches: their gradients, their losses and how many there are.

    Args:
        objective (Objective): what is trained.
        optimizer (Optimizer): updates the parameters.
        clip_norm (Optional[float]): bound of the window's gradient.
        group (Optional[Group]): the processes whose windows are one window. Default: ``None``.
        sync_every_micro_batch (bool): whether they sum each micro-batch's gradients. Default: ``False``.
        wait (bool): whether micro-batches may be run together. Default: ``True``.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: Any,
        clip_norm: float | None,
        *,
        group: Group | None = None,
        sync_every_micro_batch: bool = False,
        wait: bool = True,
    ):
        self._objective, self._weight, self._loss = objective, objective.weight, objective.loss
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._group = group
        self._sync_every_micro_batch = sync_every_micro_batch
        self._wait = _check.instance("GradientAccumulation", "wait", wait, bool, "a bool")
        self._rows = 1
        self.size: int | None = None
        """Optional[int], the micro-batches of a full one. None: a window is a batch, which is split."""
        self.micro_batches = 0
        """int, the micro-batches that it holds."""
        self.lost = False
        """bool, whether it was given up because one of them failed."""
        self._first_update = FirstUpdate("train_process", _check.kind_of(optimizer), optimizer.parameters)
        # With ranks windows of 1 are summed, and weighted; gradients of rows become whole where they are added.
        self._always_added = group is not None or gives_rows(objective.forward)
        self._cells_made: dict[bool, Accumulating | Immediate] = {}
        if group is not None:
            self._cells.clear()  # ranks meet where the Cells are made: now, not when each has its first micro-batch

    def open(self, size: int | None) -> None:
        """Get ready for windows of this size.

        Raises:
            RuntimeError: If it would change inside a window.
        """
        if self.micro_batches and size != self.size:
            raise RuntimeError(
                f"For 'train_process', 'mini_steps' can't change from {self.size} to {size or 'whole batches'} inside "
                f"a window, which holds {self.micro_batches} micro-batches. Call 'flush()' or 'clear()' first."
            )
        self.size, self.lost = size, False

    def add(self, micro_batch: tuple) -> None:
        """Take a micro-batch in."""
        self._objective.look_at(micro_batch, self.size == 1, self._optimizer.parameters)
        if not self.micro_batches:
            self._first_update.begin()
        weight = self._weight.of(micro_batch)
        self._rows = micro_batch[0].shape[0]
        with self._running():
            # Zero times a loss that is 0/0 (every token masked) is NaN: what counts for nothing is not run.
            loss = self._cells.add(micro_batch, self._weight.as_tensor(weight)) if weight else self._cells.pass_over()
        if weight:
            self._loss.add(loss, weight, self._rows)
        self.micro_batches += 1

    def end(self, wishes: Sequence[float] = ()) -> Ended:
        """Update with what it holds; the next window is open. The losses of all ranks become its loss."""
        figures = None if self._group is None else lambda: [*self._figures(), *wishes]
        with self._running():
            lr, updated, norm, *summed = self._cells.end(figures)
        if summed:
            total, weights, samples, *wishes = summed[0].asnumpy().tolist()
            self._loss.load([total, weights, samples])
        shown = (self._loss.mean, lr, float(norm.asnumpy()), self._loss.samples)
        self._forget()
        if updated.asnumpy():
            self._first_update.end(*shown[1:3])
        return Ended(bool(updated.asnumpy()), shown, wishes)

    def _figures(self) -> list[float]:
        """Return the loss's sums for the ranks' float32. The mean is a quotient, so that any unit will do."""
        total, weights, samples = self._loss.state
        return [self._weight.in_units(total), self._weight.in_units(weights), samples]

    def clear(self) -> None:
        """Forget what it holds."""
        if self.micro_batches:
            self._cells.clear()
        self._forget()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the accumulators, as far as they hold anything, and what `load` needs."""
        with self._running():
            held = self.accumulators(self.micro_batches)
        return held, {"micro_batches": self.micro_batches, "loss": self._loss.state, "unit": self._weight.unit}

    def accumulators(self, micro_batches: int) -> dict[str, Any]:
        """Return what holds a window of so many micro-batches.

        Raises:
            CheckpointError: If windows of 1, which hold nothing, are to go on with one, or several ranks.
        """
        if micro_batches and (self.size == 1 or self._group is not None):
            who = "windows of 1" if self._group is None else "several ranks"
            held = f"{micro_batches} micro-batches of a window, which {who} can't go on with"
            raise CheckpointError(f"The state holds {held}. Resume as it was saved, or from one between two windows.")
        return self._cells.accumulators if micro_batches else {}

    @property
    def counts(self) -> dict[str, int | None]:
        """What ranks that wait for each other in every micro-batch need to have alike."""
        return {"micro-batches in a window": self.size, "micro-batches held": self.micro_batches}

    @property
    def is_whole(self) -> bool:
        """bool, whether this process can save it: one of several ranks can between two windows only."""
        return self._group is None or not (self.micro_batches or _check.is_dealt_out(self._optimizer))

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from there, once the accumulators are filled."""
        if not state["micro_batches"]:
            self.clear()
        self.micro_batches = state["micro_batches"]
        self._loss.load(state["loss"])
        self._weight.unit = state["unit"]

    def _forget(self) -> None:
        self._loss.clear()
        self.micro_batches = 0

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Give up the window if one of its micro-batches fails."""
        try:
            with memory_advised(self._rows, self.size):
                yield
        except BaseException:  # also Ctrl-C
            self.lost = True
            self._forget()
            for cells in self._cells_made.values():  # also after the first one, which may have begun to add
                cells.clear()
            raise

    @property
    def _cells(self) -> Accumulating | Immediate:
        """What runs it, made when it is first needed."""
        added = self.size != 1 or self._always_added
        if added not in self._cells_made:
            self._cells_made[added] = self._accumulating() if added else self._immediate()
        return self._cells_made[added]

    def _accumulating(self) -> Accumulating:
        return Accumulating(
            self._objective.forward,
            self._optimizer,
            self._objective.reduction,
            self._clip_norm,
            group=self._group,
            sync_every_micro_batch=self._sync_every_micro_batch,
            wait=self._wait,
        )

    def _immediate(self) -> Immediate:
        return Immediate(self._objective.forward, self._optimizer, self._clip_norm)
