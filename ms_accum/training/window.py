"""The driver's open window, on the host: it weighs micro-batches, runs them, and ends the window."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, Protocol

import mindspore as ms
from mindspore import Tensor, nn, ops

from .. import _check
from ..engine.cells import TrainForwardBackward, TrainOptim, cells_around, part_of_larger_graph
from ..engine.collaborators import Collaborators
from ..engine.coupled import LossOfBatch, SumOfProducts, trained_by_loss
from ..engine.ema import check_not_applied
from ..engine.forward import Forward
from ..engine.loss_scale import own_scale
from ..engine.nonfinite import RAISE
from ..engine.window import Window, new_window
from ..loss.objective import Objective
from ..network.branch import branch
from ..network.calls import call
from ..network.compiled import Compiled
from ..network.optimizers import LearningRate, is_sharded, warn_if_no_gradient
from ..network.out_of_memory import memory_advice
from ..network.state import unique_name
from ..ranks.group import is_first
from .coupled import Coupled
from .terms import TermLosses, WindowOfTerms

_GOES_ON, _ENDS = Tensor(False), Tensor(True)
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


class Runner(Protocol):
    """Runs the micro-batches of a window."""

    @property
    def accumulators(self) -> dict[str, ms.Parameter]: ...
    def add(self, micro_batch: tuple, weight: Tensor | None, last: bool) -> Any: ...
    def pass_over(self) -> None: ...
    def end(self, scalars: Callable[[], Tensor] | None) -> tuple: ...
    def clear(self) -> None: ...


class OpenWindow:
    """The open window of a driver: its micro-batches, their losses and weights, and the counters of past windows.

    Args:
        objective (Objective): the loss and its weights.
        collaborators (Collaborators): what a window works with.
        scheduler (Optional[LRScheduler]): sets the learning rate after each update. Default: ``None``.
    """

    def __init__(self, objective: Objective, collaborators: Collaborators, *, scheduler: Any = None):
        self.objective = objective
        self.collaborators = collaborators
        self.optimizer = collaborators.optimizer
        self.scheduler = scheduler
        self.group = collaborators.group
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
        self.raises = collaborators.policy == RAISE
        """bool, whether the first window without a finite gradient ends the run."""
        self.was_discarded = False
        """bool, whether the window was discarded because a micro-batch failed."""
        self._weight = objective.weight
        leaves_out, terms = collaborators.skips is not None, objective.terms
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
        """Raise an error for collaborators that can't work together."""
        if self._coupled and self.collaborators.skips is not None:
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
        check_not_applied("train_process", self.collaborators.ema)
        self.size = size
        self._use_runner()
        self.was_discarded = False
        self.skipped_in_a_row = 0
        self._overflows = self.collaborators.overflows

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
            sends = not alone or self.collaborators.dynamic is not None
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
        self._overflows = self.collaborators.overflows
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
        self._overflows = self.collaborators.overflows
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
        accumulates = self.size != 1 or self.group is not None or self.collaborators.sparse
        if accumulates not in self._runners:
            create = self._new_runner if accumulates else partial(_AtOnce, self.objective, self.collaborators)
            self._runners[accumulates] = self._collecting(create(), accumulates)
        self._runner = self._runners[accumulates]

    def _collecting(self, runner: Runner, accumulates: bool) -> Runner:
        """Return the runner; for a loss of several terms, what collects windows for it."""
        if self.objective.terms is None:
            return runner
        skips = self.collaborators.skips if accumulates else None  # in windows of 1 it is the same as to skip them
        return WindowOfTerms(self.objective, runner, self.collaborators, lambda: self.updates, skips)

    def _new_runner(self) -> Runner:
        name = unique_name("gradient_accumulation")
        forward = self.objective.forward
        if not isinstance(forward, LossOfBatch):
            window = new_window(name, self.collaborators)
            return _Accumulating(forward, window)
        loss_parameters = trained_by_loss(forward, self.optimizer.parameters)
        window = new_window(name, replace(self.collaborators, weighted=False))
        third_pass = _Accumulating(SumOfProducts(forward, loss_parameters), window)
        compiles = self.collaborators.compiles
        return Coupled(forward, third_pass, self.optimizer.parameters, loss_parameters, self.group, compiles)


def _size_text(size: int | None) -> str:
    return "complete batches" if size is None else str(size or "sizes that change")


class _Accumulating:
    """Runs windows with accumulators: the three Cells around one `Window`.

    Where its end needs nothing from the host, and leaves nothing to clear, the last micro-batch and the end are one
    graph, the same that runs the other micro-batches: on CPU a call costs as much as a small network.

    Args:
        network (Cell): returns a micro-batch's loss from its columns.
        window (Window): the window.
    """

    def __init__(self, network: nn.Cell, window: Window):
        collaborators = window.collaborators
        self._window = window
        sens = own_scale(collaborators.optimizer)
        self._forward_backward, self._optim, self._clear = cells_around(window, network, sens)
        self._add_and_end: _AddAndEnd | None = None
        if window.is_empty_when_closed and collaborators.group is None and collaborators.dynamic is None:
            self._add_and_end = _AddAndEnd(part_of_larger_graph(window, network, sens), self._optim)
        self._ended: tuple | None = None
        self._add_zeros = None if window.sum_over_ranks is None else _AddZeros(window)
        self._learning_rate = LearningRate(collaborators.optimizer)

    def add(self, micro_batch: tuple, weight: Tensor | None, last: bool = False) -> Any:
        """Add a micro-batch and return its loss.

        Args:
            micro_batch (tuple): its columns.
            weight (Optional[Tensor]): its weight.
            last (bool): whether `end` follows. Default: ``False``.
        """
        if self._add_and_end is None:
            return self._forward_backward(*micro_batch, weight=weight)
        if not last:
            return self._add_and_end(_GOES_ON, weight, *micro_batch)[0]
        lr = self._learning_rate()
        loss, updated, norm = self._add_and_end(_ENDS, weight, *micro_batch)
        self._ended = (lr, updated, norm)
        return loss

    def pass_over(self) -> None:
        """Skip a micro-batch of weight 0."""
        if self._add_zeros is not None:
            self._add_zeros()
        if self._window.skips is not None:
            self._window.skips.pass_over()

    @property
    def accumulators(self) -> dict[str, ms.Parameter]:
        """The accumulators, by names that are the same in every process."""
        return {f"window.{name}": parameter for name, parameter in self._window.state.items()}

    def clear(self) -> None:
        """Discard the window."""
        self._ended = None
        self._clear()

    def end(self, scalars: Callable[[], Tensor] | None) -> tuple:
        """Update and clear; return the learning rate used, whether the optimizer was called, and the norm.

        Args:
            scalars (Optional[Callable]): returns numbers to sum over the ranks; their sums are also returned.
        """
        if self._ended is not None:
            ended, self._ended = self._ended, None
            return ended
        lr = self._learning_rate()
        updated, norm, *sums = self._optim(None if scalars is None else scalars())
        if not self._window.is_empty_when_closed:
            # After an update the norm was finite, so every element is finite.
            self._clear(bool(updated))
        return (lr, updated, norm, *sums)


class _AddAndEnd(Compiled):
    """Add a micro-batch to a window, and end the window if it is the last.

    Args:
        forward_backward (TrainForwardBackward): the Cell that adds it.
        optim (TrainOptim): the Cell that ends the window, and leaves it empty.

    Inputs:
        - **last** (Tensor) - whether the window ends with it.
        - **weight** (Optional[Tensor]), **\\*inputs** (tuple[Tensor]) - those of `TrainForwardBackward`.

    Outputs:
        tuple[Tensor], the loss of the micro-batch; whether the parameters were updated, and the norm before clipping.
    """

    def __init__(self, forward_backward: TrainForwardBackward, optim: TrainOptim):
        window = forward_backward.window
        optimizer, network = window.collaborators.optimizer, forward_backward.loss_and_gradients.network
        super().__init__(forward_backward.owner, forward_backward.compiles, network, optimizer)
        self.forward_backward, self.optim = forward_backward, optim
        self.boundary = window.boundary

    def construct(self, last: Any, weight: Any, *inputs: Any) -> Any:
        loss = call(self.forward_backward, inputs, weight=weight)
        updated, norm = Tensor(False), Tensor(0.0, ms.float32)
        if self.boundary.touch(last):
            updated, norm = self.optim()
        return loss, updated, norm


class _AddZeros(Compiled):
    """Add zeros to the sum over the ranks if this rank's micro-batch has weight 0: the other ranks wait for the sum."""

    def __init__(self, window: Window):
        super().__init__(_OWNER, window.collaborators.compiles)
        self.window = window

    def construct(self) -> Any:
        return ops.depend(Tensor(True), self.window.add(self.window.zeros()))


class _AtOnce:
    """Runs windows of one micro-batch, without accumulators.

    Args:
        objective (Objective): the loss.
        collaborators (Collaborators): what a window works with.
    """

    accumulators: dict[str, ms.Parameter] = {}
    _ended: tuple | None = None

    def __init__(self, objective: Objective, collaborators: Collaborators):
        self._cell = _UpdateAtOnce(objective.forward, collaborators)
        self._update_with_zeros = None if collaborators.weighted else _UpdateWithZeros(self._cell)
        self._learning_rate = LearningRate(collaborators.optimizer)

    def add(self, micro_batch: tuple, weight: Tensor | None, last: bool) -> Tensor:
        """Run a micro-batch and update with it; a weight would cancel out."""
        del weight, last
        lr = self._learning_rate()
        loss, updated, norm = self._cell(*micro_batch)
        self._ended = (lr, updated, norm)
        return loss

    def pass_over(self) -> None:
        """Skip a micro-batch of weight 0. The mean over no rows does not exist; their sum is 0, and updates."""
        if self._update_with_zeros is not None:
            self._ended = (self._learning_rate(), *self._update_with_zeros())

    def end(self, scalars: Any) -> tuple:
        """Do what `_Accumulating.end` does; if the micro-batch had weight 0, a mean has no update and no norm."""
        del scalars
        ended, self._ended = self._ended, None
        return ended or (self._learning_rate(), Tensor(False), Tensor(math.nan, ms.float32))

    def clear(self) -> None:
        """Discard the window."""
        self._ended = None


class _UpdateAtOnce(Compiled):
    """Run one micro-batch and update with it.

    Args, Inputs and Outputs as for `TrainForwardBackward` and `TrainOptim`, without a weight, which would cancel out.
    """

    def __init__(self, network: nn.Cell, collaborators: Collaborators):
        super().__init__(_OWNER, collaborators.compiles, network, collaborators.optimizer)
        self.loss_and_gradients = Forward(network, collaborators, own_scale(collaborators.optimizer))
        self.window = Window(collaborators, None)
        self.scaled = collaborators.dynamic is not None
        self.through_branch = branch(self.compiles)

    def construct(self, *inputs: Any) -> Any:
        loss, grads = call(self.loss_and_gradients, inputs)
        total = loss[0] if self.loss_and_gradients.has_terms else loss
        scalars = ops.reshape(ops.cast(total, ms.float32), (1,)) if self.scaled else None
        updated, norm = self.window.close_at_once(grads, None, scalars)[:2]
        return loss, updated, norm if self.through_branch is None else self.through_branch(norm)


class _UpdateWithZeros(Compiled):
    """Update with a gradient of 0, the sum of no rows, as windows of several micro-batches do."""

    def __init__(self, at_once: _UpdateAtOnce):
        super().__init__(_OWNER, at_once.compiles, at_once.window.collaborators.optimizer)
        self.window = at_once.window
        self.scaled = at_once.scaled

    def construct(self) -> Any:
        scalars = ops.zeros((1,), ms.float32) if self.scaled else None
        return self.window.close_at_once(self.window.zeros(), None, scalars)[:2]


class WindowLoss:
    """The mean loss of a window: losses and weights are summed, and divided at the end.

    Args:
        summing (bool): whether the losses are sums over rows, which are added without multiplying by the weight.
        leaves_out (bool): whether micro-batches whose loss is not finite are left out.
    """

    def __init__(self, summing: bool = False, leaves_out: bool = False):
        self.leaves_out = leaves_out
        self.summing = summing
        """bool, whether losses are added as they are."""
        self.clear()

    def clear(self) -> None:
        """Discard the window."""
        self._terms: list[tuple[Any, float, int]] = []
        self._sums = (0.0, 0.0)
        self._bad: list[int] = []
        self.samples = 0

    def add(self, loss: Any, weight: float, samples: int, number: int = 0) -> None:
        """Add a micro-batch with its number. Its loss is read from the device when the window's mean is needed."""
        if weight:  # a loss over no labels is 0/0, and 0 times NaN is NaN
            self._terms.append((loss, weight, number))
        self.samples += samples

    @property
    def terms(self) -> dict[str, float]:
        """dict, the means of the loss's terms: it is one."""
        return {}

    @property
    def bad(self) -> list[int]:
        """list[int], the numbers of the micro-batches whose loss is not finite."""
        self._carry()
        return self._bad

    @property
    def mean(self) -> float:
        """The mean loss so far; NaN for a window without weight."""
        total, weights = self._carry()
        return total / weights if weights else float("nan")

    def _carry(self) -> tuple[float, float]:
        """Return the sums of the losses and of the weights so far."""
        total, weights = self._sums
        for loss, weight, number in self._terms:
            value = float(loss.asnumpy())
            if not math.isfinite(value):
                self._bad.append(number)
                if self.leaves_out:
                    continue
            total += value * (1.0 if self.summing else weight)
            weights += weight
        self._sums, self._terms = (total, weights), []
        return self._sums

    @property
    def state(self) -> list[float]:
        """list, the values that `load` needs."""
        return [*self._carry(), self.samples]

    def load(self, state: Sequence[float], bad: Sequence[int] = ()) -> None:
        """Continue from a saved state."""
        total, weights, samples = state
        self._sums, self._terms, self.samples = (total, weights), [], int(samples)
        self._bad = [*bad]
