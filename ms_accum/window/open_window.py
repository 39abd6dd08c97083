"""What does an open window contain, and how does it end?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Callable, NamedTuple

from .. import _check
from ..loss.objective import Objective
from ..network import checks
from ..network.accumulators import loss_scale
from ..network.first_update import FirstUpdate
from ..network.out_of_memory import memory_advised
from ..network.tree import gives_rows
from ..numerics.collaborators import NONE, Numerics
from ..numerics.coupled import LossOfBatch
from ..numerics.coupled_window import Coupled
from ..numerics.ema import check_not_applied
from ..numerics.noise_scale import NoiseScale
from ..numerics.nonfinite import RAISE, check_dense
from ..ranks.parallel import Group, is_first
from .driver_cells import weighs_loss
from .record import Counters
from .running import Accumulating, Immediate


class Ended(NamedTuple):
    """The result of a finished window."""

    updated: bool
    """Whether the optimizer was called, that is, the gradient was finite."""
    figures: tuple[float, float, float, int]
    """Its loss, learning rate, norm and samples, as in an `UpdateRecord`."""
    wishes: Sequence[float]
    """The requests to stop and to save at its end, summed over the ranks."""
    overflow: bool = False
    """Whether the loss scale was too large."""
    bad: Sequence[int] = ()
    """The micro-batches whose loss was not finite, or that were left out, by their numbers in the window from 1."""


class OpenWindow:
    """The micro-batches of a window: their gradients, losses and number.

    Args:
        objective (Objective): the loss and its weights.
        optimizer (Optimizer): updates the parameters.
        runner (Callable): returns the object that runs micro-batches and accumulates gradients; with
            ``accumulates=False`` that for windows of 1.
        group (Optional[Group]): the ranks, which share each window. Default: ``None``.
        numerics (Numerics): the collaborators. Default: none.
    """

    def __init__(
        self,
        objective: Objective,
        optimizer: Any,
        runner: Callable,
        group: Group | None = None,
        numerics: Numerics = NONE,
    ):
        check_dense("GradientAccumulation", numerics.skips, [objective.forward])
        checks.same_for_rows("GradientAccumulation", optimizer, [objective.forward])
        self._objective, self._weight, self._loss = objective, objective.weight, objective.loss
        self._optimizer, self._runner, self._group = optimizer, runner, group
        self._numerics, self._loss.leaves_out = numerics, numerics.skips is not None
        self.counters = Counters(at_once=numerics.policy == RAISE)
        """Counters, of the finished windows."""
        self._overflows = 0
        self._rows = 1
        self.size: int | None = None
        """Optional[int], the micro-batches of a full window; 0 if it changes; None if each batch is a window."""
        self.micro_batches = 0
        """int, the number of micro-batches in the window."""
        self.lost = False
        """bool, whether the window was discarded because a micro-batch failed."""
        self._first_update = FirstUpdate("train_process", checks.kind_of(optimizer), optimizer.parameters)
        # With several ranks, windows of 1 are also weighted and summed. Sparse gradients become dense when added.
        self._always_added = group is not None or gives_rows(objective.forward)
        self._collects = isinstance(objective.forward, LossOfBatch)
        # With a shared unit a full window needs no division; but in float16 gradients divided by N may underflow.
        alone = weighs_loss(objective.forward, group) and self._weight.weighs and not self._collects
        self._shares = alone and not (numerics.skips or numerics.scales)
        self._cells_made: dict[bool, Accumulating | Immediate | Coupled] = {}
        if group is not None:
            self._cells.clear()  # creates the Cells now, on all ranks at the same time, because they communicate

    def open(self, size: int | None) -> None:
        """Prepare for windows of this size.

        Raises:
            RuntimeError: If the size would change inside a window.
        """
        if self.micro_batches and size != self.size:
            raise RuntimeError(
                f"For 'train_process', 'mini_steps' can't change from {_words(self.size)} to {_words(size)} inside "
                f"a window, which holds {self.micro_batches} micro-batches. Call 'flush()' or 'clear()' first."
            )
        check_not_applied("train_process", self._numerics.ema)
        if self._shares and size != self.size:
            self._weight.share(size or 0)
        self.size, self.lost = size, False
        self._overflows = self._numerics.overflows

    def add(self, micro_batch: tuple) -> None:
        """Run a micro-batch and add it to the window."""
        self._objective.look_at(micro_batch, self.size == 1, self._optimizer.parameters)
        if not self.micro_batches:
            self._first_update.begin()
        weight = self._weight.of(micro_batch)
        self._rows = micro_batch[0].shape[0]
        with self._running():
            # A micro-batch of weight 0 is not run: its loss may be 0/0 (all tokens masked), and 0 times NaN is NaN.
            loss = self._cells.add(micro_batch, self._weight.as_tensor(weight)) if weight else self._cells.pass_over()
        if weight:
            self._loss.add(loss, weight, self._rows, self.micro_batches + 1)
        self.micro_batches += 1
        self.counters.updated = False
        if self._numerics.noise is not None and self._numerics.noise.wants(self.micro_batches):
            self._show_first(self._numerics.noise)

    def run_waiting(self) -> None:
        """Run the micro-batches that have been collected, before callbacks or the user change the weights."""
        if self.micro_batches:
            with self._running():
                self._cells.run_waiting()

    def end(self, wishes: Sequence[float] = ()) -> Ended:
        """Update with the window and open the next one. The window's loss is that of all ranks."""
        alone = self._group is None
        wanted = not alone or self._numerics.dynamic is not None
        weights = self._weight.in_units(self._loss.weight) if self._shares and self.size else None
        with self._running():
            figures = (lambda: [*self._figures(), *wishes]) if wanted else None
            lr, updated, norm, *summed = self._cells.end(figures, weights)
        bad = tuple(self._loss.bad)
        if summed and not alone:
            total, weights, samples, *wishes = summed[0].asnumpy().tolist()
            self._loss.load([total, weights, samples])
        shown = (self._loss.mean, lr, float(norm.asnumpy()), self._loss.samples)
        self._forget()
        if updated.asnumpy():
            self._first_update.end(*shown[1:3])
        self.counters.add(bool(updated.asnumpy()))
        if self._numerics.noise is not None:
            rows = shown[3]
            norm = shown[2] / (1 if self._weight.weighs else rows)
            self._numerics.noise.window_ended(norm, rows, counts=self.counters.updated and not bad)
        before, self._overflows = self._overflows, self._numerics.overflows
        return Ended(self.counters.updated, shown, wishes, self._overflows > before, bad)

    def _show_first(self, noise: NoiseScale) -> None:
        """Let it read the accumulators after the window's first micro-batch, unless that does not count."""
        held = dict(self._cells.accumulators)
        weight = held.pop("window.weight_sum", None)
        counts = held.pop("window.counts", None)
        if held and self._loss.samples and (counts is None or counts.asnumpy()[0]):
            divisor = float(self._rows if weight is None else weight.asnumpy()) * self._numerics.value
            divisor *= loss_scale(self._optimizer)
            noise.first([*held.values()], divisor, self._rows)

    def _figures(self) -> list[float]:
        """Return the sums of the loss, to be summed in float32. The mean is a quotient, so the unit cancels out."""
        total, weights, samples = self._loss.state
        return [self._weight.in_units(total), self._weight.in_units(weights), samples]

    def clear(self) -> None:
        """Discard the window."""
        if self.micro_batches:
            self._cells.clear()
            self._numerics.clear()
        self._forget()

    def state(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the accumulators, if they are in use, and the values that `load` needs."""
        with self._running():
            held = self.accumulators(self.micro_batches)
        facts = {"micro_batches": self.micro_batches, "loss": self._loss.state, "unit": self._weight.unit}
        return held, {**facts, "bad": self._loss.bad} if self._loss.bad else facts

    def holds(self, micro_batches: int) -> bool:
        """Return whether an open window with this number of micro-batches can be loaded; windows of 1 can't."""
        return not micro_batches or (self.size != 1 and self.saved_inside)

    def accumulators(self, micro_batches: int) -> dict[str, Any]:
        """Return the accumulators of a window with this number of micro-batches; none if it is empty."""
        return self._cells.accumulators if micro_batches else {}

    @property
    def counts(self) -> dict[str, int | None]:
        """The numbers that must be equal on ranks that wait for each other in every micro-batch."""
        return {"micro-batches in a window": self.size, "micro-batches held": self.micro_batches}

    @property
    def is_first(self) -> bool:
        """bool, whether this process writes for all ranks."""
        return is_first(self._group)

    @property
    def leaves_out(self) -> bool:
        """bool, whether micro-batches that are not finite are left out."""
        return self._numerics.skips is not None

    @property
    def saved_inside(self) -> bool:
        """bool, whether an open window can be saved: not with several ranks, and not with a `CoupledLoss`."""
        return self._group is None and not self._collects

    def check_saved(self, tail: str) -> None:
        """Raise an error if states would have to be saved inside windows that continue in the next epoch."""
        if tail == "carry" and not self.saved_inside:
            who = "a CoupledLoss" if self._collects else "several processes"
            rule = f"'flush' or 'drop' with a 'checkpointer' and {who}"
            remedy = "They can resume between two windows only."
            _check.refuse(ValueError, "train_process", "tail", rule, "'carry'", remedy)

    @property
    def is_whole(self) -> bool:
        """bool, whether this process can save the state now, without the other ranks."""
        return self.saved_inside or not (self.micro_batches or checks.is_sharded(self._optimizer))

    def load(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; the accumulators have been loaded, in its unit."""
        if not state["micro_batches"]:
            self.clear()
        self.micro_batches = state["micro_batches"]
        self._loss.load(state["loss"], state.get("bad", ()))
        self._weight.unit = state["unit"]
        self._overflows = self._numerics.overflows

    def _forget(self) -> None:
        self._loss.clear()
        self._weight.begin()
        self.micro_batches = 0

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Discard the window if one of its micro-batches fails."""
        try:
            with memory_advised(self._rows, self.size):
                yield
        except BaseException:  # also Ctrl-C
            self.lost = True
            self._forget()
            self._numerics.clear()
            for cells in self._cells_made.values():  # even the first micro-batch may have added a part
                cells.clear()
            raise

    @property
    def _cells(self) -> Accumulating | Immediate | Coupled:
        """The object that runs the window, created when it is first needed."""
        added = self.size != 1 or self._always_added
        if added not in self._cells_made:
            self._cells_made[added] = self._runner(accumulates=added)
        return self._cells_made[added]


def _words(size: int | None) -> str:
    return "complete batches" if size is None else str(size or "sizes that change")
