"""The driver's open window, on the host: it weighs micro-batches, runs them, and ends the window."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from .. import _check
from ..engine.cells import TrainForwardBackward, cells_around, part_of_larger_graph
from ..engine.collaborators import Collaborators
from ..engine.coupled import LossOfBatch, SumOfProducts, trained_by_loss
from ..engine.ema import check_not_applied
from ..engine.forward import Forward
from ..engine.loss_scale import own_scale
from ..engine.noise_scale import NoiseScale
from ..engine.nonfinite import RAISE
from ..engine.window import Window, new_window
from ..loss.objective import Objective
from ..network.branch import branch
from ..network.compiled import Compiled, in_graphs
from ..network.optimizers import FirstUpdate, LearningRate, is_sharded, kind_of
from ..network.out_of_memory import memory_advice
from ..network.parameters import has_half
from ..network.state import unique_name
from ..ranks.group import is_first
from .coupled import Coupled

# Up to this number of micro-batches are collected and run in one call, if they need no more than this number of bytes.
TOGETHER = 8
_LIMIT = 64 * 2**20
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


class Runner(Protocol):
    """Runs the micro-batches of a window."""

    @property
    def accumulators(self) -> dict[str, ms.Parameter]: ...
    def add(self, micro_batch: tuple, weight: Tensor | None) -> Any: ...
    def pass_over(self) -> None: ...
    def run_waiting(self) -> None: ...
    def finish(self) -> None: ...
    def end(self, scalars: Tensor | None, weights: float | None) -> tuple: ...
    def clear(self) -> None: ...


class OpenWindow:
    """The open window of a driver: its micro-batches, their losses and weights, and the counters of past windows.

    Args:
        objective (Objective): the loss and its weights.
        collaborators (Collaborators): what a window works with.
        scheduler (Optional[LRScheduler]): sets the learning rate after each update. Default: ``None``.
        wait (bool): whether micro-batches may be collected and run in one call. Default: ``True``.
    """

    def __init__(self, objective: Objective, collaborators: Collaborators, *, scheduler: Any = None, wait: bool = True):
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
        self._wait = wait
        self._weight = objective.weight
        self._losses = WindowLoss(objective.summing, leaves_out=collaborators.skips is not None)
        self._overflows = 0
        self._rows = 1
        self._first_update = FirstUpdate("train_process", kind_of(self.optimizer), collaborators.parameters)
        self._coupled = isinstance(objective.forward, LossOfBatch)
        # The weight multiplies the loss, which costs nothing, in a unit near the first weight of a window. Else it
        # multiplies the gradients in float32 when these are added: in float16 a loss times another weight of the window
        # may overflow or underflow, and several ranks would have to agree on the unit of each window.
        self._weighs_loss = self._weight.weighs and self.group is None and not has_half(objective.forward)
        # With a shared unit a full window needs no division; but in float16 gradients divided by N may underflow.
        self._uses_shared_unit = self._weighs_loss and not (
            self._coupled or collaborators.skips or collaborators.scales
        )
        self._check_conflicts()
        self._runners: dict[bool, Runner] = {}
        self._runner: Runner

    def _check_conflicts(self) -> None:
        """Raise an error for collaborators that can't work together."""
        in_step = self.collaborators.summing.of_micro_batch is not None
        if self.collaborators.noise is not None and in_step:
            remedy = "The accumulators hold sums over the ranks from the first micro-batch on."
            _check.raise_invalid(ValueError, _OWNER, "noise_scale", "None with sync_every_micro_batch", "one", remedy)
        if self._coupled and (self.collaborators.skips is not None or self.collaborators.noise is not None):
            name = "noise_scale" if self.collaborators.skips is None else "nonfinite"
            remedy = "Its loss is computed once per window, not for each micro-batch."
            _check.raise_invalid(ValueError, _OWNER, name, "the default with a CoupledLoss", "another value", remedy)

    def open(self, size: int | None) -> None:
        """Prepare for windows of this size.

        Raises:
            RuntimeError: If the size would change inside a window.
        """
        if self.micro_batches and size != self.size:
            raise RuntimeError(
                f"For 'train_process', 'mini_steps' can't change from {_size_text(self.size)} to {_size_text(size)} "
                f"inside a window, which holds {self.micro_batches} micro-batches. Call 'flush()' or 'clear()' first."
            )
        check_not_applied("train_process", self.collaborators.ema)
        if self._uses_shared_unit and size != self.size:
            self._weight.set_unit_for(size or 0)
        self.size = size
        self._use_runner()
        self.was_discarded = False
        self.skipped_in_a_row = 0
        self._overflows = self.collaborators.overflows

    def add(self, micro_batch: tuple) -> None:
        """Run a micro-batch and add it to the window."""
        self.objective.check_micro_batch(micro_batch, self.size == 1, self.optimizer.parameters)
        if not self.micro_batches:
            self._first_update.begin()
        weight = self._weight.of(micro_batch)
        self._rows = micro_batch[0].shape[0]
        with self._running():
            if weight:
                loss = self._runner.add(micro_batch, self._weight.as_tensor(weight))
                self._losses.add(loss, weight, self._rows, self.micro_batches + 1)
            else:  # not run: its loss may be 0/0 (all tokens masked), and 0 times NaN is NaN
                self._runner.pass_over()
        self.micro_batches += 1
        self.updated = False
        noise = self.collaborators.noise
        if noise is not None and noise.wants(self.micro_batches):
            self._observe_first(noise)

    def run_waiting(self) -> None:
        """Run the micro-batches that have been collected, before callbacks or the user change the weights."""
        if self.micro_batches:
            with self._running():
                self._runner.run_waiting()

    def end(self, requests: Sequence[float] = ()) -> Ended:
        """Update with the window and begin the next one. The window's loss is that of all ranks."""
        alone = self.group is None
        weights = self._weight.in_units(self._losses.weight) if self._uses_shared_unit and self.size else None
        with self._running():
            self._runner.finish()
            sends = not alone or self.collaborators.dynamic is not None
            scalars = Tensor([*self._loss_sums(), *requests], ms.float32) if sends else None
            lr, has_updated, norm, *sums = self._runner.end(scalars, weights)
        bad = tuple(self._losses.bad)
        if sums and not alone:
            total, weights, samples, *requests = sums[0].asnumpy().tolist()
            self._losses.load([total, weights, samples])
        loss, samples, grad_norm = self._losses.mean, self._losses.samples, float(norm)
        self._reset()
        self.updated = bool(has_updated)
        self.updates += self.updated
        self.skipped += not self.updated
        if self.updated:
            self._first_update.end(lr, grad_norm)
            if self.scheduler is not None:
                self.scheduler.step()
        noise = self.collaborators.noise
        if noise is not None:
            of_mean = grad_norm / (1 if self._weight.weighs else samples)
            noise.window_ended(of_mean, samples, counts=self.updated and not bad)
        overflows_before = self._overflows
        self._overflows = self.collaborators.overflows
        return Ended(self.updated, loss, lr, grad_norm, samples, requests, self._overflows > overflows_before, bad)

    def _observe_first(self, noise: NoiseScale) -> None:
        """Let the noise scale read the accumulators after the window's first micro-batch, if that counts."""
        sums = dict(self._runner.accumulators)
        weight = sums.pop("window.weight_sum", None)
        counts = sums.pop("window.counts", None)
        if sums and self._losses.samples and (counts is None or counts.asnumpy()[0]):
            divisor = float(self._rows if weight is None else weight.asnumpy())
            noise.first(
                [*sums.values()], divisor * self.collaborators.loss_scale * own_scale(self.optimizer), self._rows
            )

    def _loss_sums(self) -> list[float]:
        """Return the sums of the loss, to be summed in float32. The mean is a quotient, so the unit cancels out."""
        total, weights, samples = self._losses.state
        return [self._weight.in_units(total), self._weight.in_units(weights), samples]

    def clear(self) -> None:
        """Discard the window."""
        if self.micro_batches:
            self._runner.clear()
            self.collaborators.clear()
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
        """Return the accumulators, if they are in use, and the values that `load` needs."""
        with self._running():
            accumulators = self.accumulators(self.micro_batches)
        metadata = {"micro_batches": self.micro_batches, "loss": self._losses.state, "unit": self._weight.unit}
        return accumulators, {**metadata, "bad": self._losses.bad} if self._losses.bad else metadata

    def load(self, window: Mapping[str, Any], counters: Mapping[str, Any]) -> None:
        """Continue from a saved state; the accumulators have been loaded, in its unit."""
        if not window["micro_batches"]:
            self.clear()
        self.micro_batches = window["micro_batches"]
        self._losses.load(window["loss"], window.get("bad", ()))
        self._weight.unit = window["unit"]
        self._overflows = self.collaborators.overflows
        self.updates = counters["updates"]
        self.skipped = counters["skipped"]
        self.updated = counters["updated"]
        self.skipped_in_a_row = counters["skips"]

    def can_load(self, micro_batches: int) -> bool:
        """Return whether an open window with this number of micro-batches can be loaded; windows of 1 can't."""
        return not micro_batches or (self.size != 1 and self.saved_inside)

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
        """bool, whether an open window can be saved: not with several ranks, and not with a `CoupledLoss`."""
        return self.group is None and not self._coupled

    def check_saved(self, tail: str) -> None:
        """Raise an error if states would have to be saved inside windows that continue in the next epoch."""
        if tail == "carry" and not self.saved_inside:
            cannot_save = "a CoupledLoss" if self._coupled else "several processes"
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
        self._weight.begin()
        self.micro_batches = 0

    @contextmanager
    def _running(self) -> Iterator[None]:
        """Discard the window if one of its micro-batches fails."""
        try:
            yield
        except BaseException as error:  # also Ctrl-C
            self.was_discarded = True
            self._reset()
            self.collaborators.clear()
            for runner in self._runners.values():  # even the first micro-batch may have added a part
                runner.clear()
            advice = memory_advice(error, self._rows, self.size)
            if advice is not None:
                raise RuntimeError(advice) from error
            raise

    def _use_runner(self) -> None:
        """Use what runs the micro-batches of windows of this size, created when it is first needed."""
        # With several ranks, windows of 1 are summed as well.
        accumulates = self.size != 1 or self.group is not None or self.collaborators.sparse
        if accumulates not in self._runners:
            create = self._new_runner if accumulates else partial(_AtOnce, self.objective, self.collaborators)
            self._runners[accumulates] = create()
        self._runner = self._runners[accumulates]

    def _new_runner(self) -> Runner:
        name = unique_name("gradient_accumulation")
        forward = self.objective.forward
        if not isinstance(forward, LossOfBatch):
            window = new_window(name, self.collaborators, weighs_loss=self._weighs_loss)
            return _Accumulating(forward, window, wait=self._wait)
        loss_parameters = trained_by_loss(forward, self.optimizer.parameters)
        window = new_window(name, replace(self.collaborators, weighted=False))
        third_pass = _Accumulating(SumOfProducts(forward, loss_parameters), window, wait=self._wait)
        compiles = self.collaborators.compiles
        return Coupled(forward, third_pass, self.optimizer.parameters, loss_parameters, self.group, compiles)


def _size_text(size: int | None) -> str:
    return "complete batches" if size is None else str(size or "sizes that change")


class _Waiting:
    """Collected micro-batches of one shape, to be run in one call; copies, because loaders reuse their buffers."""

    def __init__(self, columns: tuple):
        self._layout = _layout(columns)
        self._stacks = [np.empty((TOGETHER, *column.shape), column.asnumpy().dtype) for column in columns]
        self.count = 0
        """int, the number of micro-batches."""
        self.result: Tensor | None = None
        """Optional[Tensor], the losses, when the micro-batches have been run."""

    def takes(self, columns: tuple) -> bool:
        """Return whether these columns have the shapes and types of the collected ones."""
        return _layout(columns) == self._layout

    def take(self, columns: tuple) -> _WaitingLoss:
        """Add a micro-batch; return its loss."""
        for stack, column in zip(self._stacks, columns):
            stack[self.count] = column.asnumpy()
        self.count += 1
        return _WaitingLoss(self, self.count - 1)

    @cached_property
    def losses(self) -> np.ndarray:
        """np.ndarray, the losses, read from the device once for all micro-batches."""
        if self.result is None:
            raise RuntimeError("For 'Loss', the micro-batch has not been run yet.")
        return self.result.asnumpy()

    def stacked(self) -> list[Tensor]:
        """Return each column as a Tensor for the maximum number of micro-batches; unused entries are not read."""
        return [Tensor.from_numpy(stack) for stack in self._stacks]


def _layout(columns: tuple) -> list[tuple]:
    return [(column.shape, column.dtype) for column in columns]


class _WaitingLoss(NamedTuple):
    """The loss of a collected micro-batch; read it after the window has ended."""

    waiting: _Waiting
    number: int

    def asnumpy(self) -> np.ndarray:
        """Return its value."""
        return self.waiting.losses[self.number]


class _Accumulating:
    """Runs windows with accumulators: the three Cells around one `Window`.

    On CPU, compiled micro-batches of one shape are collected and run in one call, at the latest when the window
    ends; but not if each is summed over the ranks, because other ranks may not be able to collect the same ones.

    Args:
        network (Cell): returns a micro-batch's loss from its columns.
        window (Window): the window.
        wait (bool): whether micro-batches may be collected.
    """

    def __init__(self, network: nn.Cell, window: Window, *, wait: bool):
        optimizer = window.collaborators.optimizer
        self._window = window
        sens = own_scale(optimizer)
        self._forward_backward, self._optim, self._clear = cells_around(window, network, sens)
        self._run_together = TrainTogether(part_of_larger_graph(window, network, sens), TOGETHER)
        in_step = window.sum_over_ranks is not None
        self._add_zeros = _AddZeros(window) if in_step else None
        # It saves graph calls, which are slow on CPU.
        self._wait = wait and not in_step and ms.get_context("device_target") == "CPU"
        self._waiting: _Waiting | None = None
        self._learning_rate = LearningRate(optimizer)

    def add(self, micro_batch: tuple, weight: Tensor | None) -> Any:
        """Add a micro-batch and return its loss, to be read after the window has ended."""
        columns = micro_batch if weight is None else (*micro_batch, weight)
        if self._waiting is not None and not self._waiting.takes(columns):
            self.run_waiting()
        if not (self._wait and _may_wait(columns, self._window.collaborators.compiles)):
            return self._forward_backward(*micro_batch, weight=weight)
        if self._waiting is None:
            self._waiting = _Waiting(columns)
        loss = self._waiting.take(columns)
        if self._waiting.count == TOGETHER:
            self.run_waiting()
        return loss

    def pass_over(self) -> None:
        """Skip a micro-batch of weight 0."""
        if self._add_zeros is not None:
            self._add_zeros()
        if self._window.skips is not None:
            self._window.skips.pass_over()

    def run_waiting(self) -> None:
        """Run the collected micro-batches, before anything outside the window changes the weights."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.result = self._run_together(Tensor(waiting.count, ms.int32), *waiting.stacked())

    def finish(self) -> None:
        """Run what has been collected of the window, which is about to end."""
        self.run_waiting()

    @property
    def accumulators(self) -> dict[str, ms.Parameter]:
        """The accumulators, by names that are the same in every process."""
        self.run_waiting()
        return {f"window.{name}": parameter for name, parameter in self._window.state.items()}

    def clear(self) -> None:
        """Discard the window."""
        self._waiting = None
        self._clear()

    def end(self, scalars: Tensor | None, weights: float | None) -> tuple:
        """Update and clear; return the learning rate used, whether the optimizer was called, and the norm.

        Args:
            scalars (Optional[Tensor]): numbers to sum over the ranks; their sums are also returned.
            weights (Optional[float]): the exact sum of the weights, if it is available.
        """
        lr = self._learning_rate()
        if weights is not None and weights != 1:  # the graph has the sum of the rounded weights
            ops.assign(self._window.weight_sum[0], Tensor(weights, ms.float32))
        divides = weights is None or weights != 1
        updated, norm, *sums = self._optim(scalars, divides)
        if not self._window.is_empty_when_closed:
            # After an update the norm was finite, so every element is finite.
            self._clear(bool(updated))
        return (lr, updated, norm, *sums)


def _may_wait(columns: tuple, compiles: bool) -> bool:
    """Return whether a micro-batch may be collected, which needs a copy, and a compiled loop."""
    stackable = all(column.dtype != ms.bfloat16 for column in columns)  # NumPy has no bfloat16
    return in_graphs(compiles) and stackable and TOGETHER * sum(column.nbytes for column in columns) <= _LIMIT


class TrainTogether(Compiled):
    """Run several micro-batches one after the other in one call, because a call costs as much as a small network.

    Args:
        forward_backward (TrainForwardBackward): the Cell that runs one micro-batch.
        maximum (int): the maximum number of micro-batches. Smaller numbers need no new compilation.

    Inputs:
        - **count** (Tensor) - the number of micro-batches.
        - **\\*columns** (tuple[Tensor]) - their columns, stacked; weights, if there are any, are the last column.

    Outputs:
        Tensor, their losses, padded with zeros to `maximum`.
    """

    def __init__(self, forward_backward: TrainForwardBackward, maximum: int):
        super().__init__(forward_backward.owner, forward_backward.compiles, forward_backward.loss_and_gradients.network)
        self.forward_backward = forward_backward
        self.one_hot = Tensor(np.eye(maximum), ms.bool_)
        window, forward = forward_backward.window, forward_backward.loss_and_gradients
        self.weighted = bool(window.weight_sum)
        self.touched = (*forward.network.get_parameters(), *window.grad_sum, *window.weight_sum, *forward.changing)
        if window.skips is not None:
            self.touched = (*self.touched, *window.skips.changed)

    def construct(self, count: Any, *columns: Any) -> Any:
        number = Tensor(0, ms.int32)
        count = ops.depend(count, self.touched)  # as in `Boundary.touch`: a loop behaves like a branch
        losses = ops.zeros(self.one_hot.shape[:1], ms.float32)
        while number < count:
            columns_of_one = [column[number] for column in columns]
            if self.weighted:
                loss = self.forward_backward(*columns_of_one[:-1], weight=columns_of_one[-1])
            else:
                loss = self.forward_backward(*columns_of_one)
            losses = ops.where(self.one_hot[number], ops.cast(loss, ms.float32), losses)  # in a product inf * 0 is NaN
            number = number + 1
        return losses


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

    def add(self, micro_batch: tuple, weight: Tensor | None) -> Tensor:
        """Run a micro-batch and update with it; a weight would cancel out."""
        del weight
        lr = self._learning_rate()
        loss, updated, norm = self._cell(*micro_batch)
        self._ended = (lr, updated, norm)
        return loss

    def pass_over(self) -> None:
        """Skip a micro-batch of weight 0. The mean over no rows does not exist; their sum is 0, and updates."""
        if self._update_with_zeros is not None:
            self._ended = (self._learning_rate(), *self._update_with_zeros())

    def run_waiting(self) -> None:
        """Do nothing: no micro-batch waits."""

    def finish(self) -> None:
        """Do nothing: no micro-batch waits."""

    def end(self, scalars: Any, weights: Any) -> tuple:
        """Do what `_Accumulating.end` does; if the micro-batch had weight 0, a mean has no update and no norm."""
        del scalars, weights
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
        loss, grads = self.loss_and_gradients(1.0, *inputs)
        scalars = ops.reshape(ops.cast(loss, ms.float32), (1,)) if self.scaled else None
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
        self._terms.append((loss, weight, number))
        self.samples += samples

    @property
    def bad(self) -> list[int]:
        """list[int], the numbers of the micro-batches whose loss is not finite."""
        self._carry()
        return self._bad

    @property
    def weight(self) -> float:
        """The sum of the weights so far, including those of losses that have not been read."""
        return self._sums[1] + sum(weight for _, weight, _ in self._terms)

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
