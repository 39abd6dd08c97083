"""What runs a driver's windows: micro-batch by micro-batch, several in one graph, or without accumulators."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any, Callable, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, nn, ops

from ..engine.cells import Forward, TrainClear, TrainForwardBackward, TrainOptim
from ..engine.config import WindowConfig
from ..engine.loss_scale import own_scale
from ..engine.window import Window
from ..network.compiled import Compiled, branch, call, in_graphs
from ..network.held import held
from .shares import Inputs

_GOES_ON, _ENDS = Tensor(False), Tensor(True)
_log = logging.getLogger("ms_accum")
# A graph takes at most this number of micro-batches, and of bytes of their columns.
_MOST, _BYTES = 16, 16 * 2**20
_KINDS = 8
"""int, the shapes of micro-batches for which arrays are kept: data of many lengths would keep memory for each."""
_LARGEST = 24 * 2**20
"""int, the bytes of parameters up to which loops are faster than calls."""


class Added(NamedTuple):
    """What running micro-batches has returned."""

    losses: list[np.ndarray]
    """Of each the loss, or the loss and its terms."""
    ended: tuple | None
    """What `end` returns, if the window has ended with the last of them."""


class ByCalls:
    """Runs windows with accumulators, micro-batch by micro-batch: the three Cells around one `Window`.

    Where its end needs nothing from the host, the last micro-batch and the end are one graph, the same that runs the
    other micro-batches: on CPU a call costs as much as a small network.

    Args:
        network (Cell): returns a micro-batch's loss from its inputs.
        window (Window): the accumulators, and how a window ends.
    """

    def __init__(self, network: nn.Cell, window: Window):
        config, optimizer = window.config, window.config.optimizer
        self.window, self.network = window, network
        self._forward_backward = TrainForwardBackward(network, optimizer, window, own_scale(optimizer))
        self.optim, self._clear = TrainOptim(optimizer, window), TrainClear(window)
        self._add_and_end: AddAndEnd | None = None
        if config.ends_in_graph:
            self._add_and_end = AddAndEnd(self._forward_backward, self.optim)
        self._add_zeros = None if window.sum_over_ranks is None else _AddZeros(window)

    def add(self, inputs: Sequence[Inputs], *, ends: bool, stops: Callable[[], bool]) -> Added | None:
        """Run micro-batches; None if `stops` has asked to stop after one of them.

        Args:
            inputs (Sequence[tuple]): of each micro-batch the factor of its loss, and the inputs of the network.
            ends (bool): whether `end` follows, so that the end may be in the same graph.
            stops (Callable): is asked after each micro-batch.
        """
        losses, ended = [], None
        for number, (factor, columns) in enumerate(inputs, 1):
            weight = None if factor is None else _as_tensor(factor)
            if self._add_and_end is None:
                losses.append(self._forward_backward(*columns, weight=weight))
            else:
                last = ends and number == len(inputs)
                loss, *ended_here = self._add_and_end(_ENDS if last else _GOES_ON, weight, *columns)
                losses.append(loss)
                ended = (*ended_here, None) if last else None
            if number < len(inputs) and stops():
                return None
        return Added([loss.asnumpy() for loss in losses], ended)

    def pass_over(self, number: int) -> None:
        """Take part in this number of micro-batches of other ranks, which wait for the sum after each."""
        if self._add_zeros is not None:
            for _ in range(number):
                self._add_zeros()

    def end(self, losses: np.ndarray) -> tuple:
        """Update and clear; return whether the optimizer was called, the norm, and the sum of `losses` over ranks."""
        if self._add_and_end is not None:
            return (*self.optim(), None)
        return self.optim(Tensor(losses.astype(np.float32)))

    def clear(self) -> None:
        """Discard what has been added."""
        self._clear()


class AddAndEnd(Compiled):
    """Add a micro-batch to a window, and end the window if it is the last.

    Args:
        forward_backward (TrainForwardBackward): the Cell that adds a micro-batch.
        optim (TrainOptim): the Cell that ends the window.

    Inputs:
        - **last** (Tensor) - whether the window ends with it.
        - **weight** (Optional[Tensor]), **\\*inputs** (tuple[Tensor]) - those of `TrainForwardBackward`.

    Outputs:
        tuple[Tensor], the loss of the micro-batch; whether the parameters were updated, and the norm before clipping.
    """

    def __init__(self, forward_backward: TrainForwardBackward, optim: TrainOptim):
        window = forward_backward.window
        network, optimizer = forward_backward.loss_and_gradients.network, window.config.optimizer
        super().__init__(window.config.owner, window.config.compiles, network, optimizer)
        forward_backward.through_branch = None  # this graph has one
        self.forward_backward, self.optim, self.window = forward_backward, optim, window
        self.before_compiling = window.boundary.find_touched

    def construct(self, last: Any, weight: Any, *inputs: Any) -> Any:
        loss = call(self.forward_backward, inputs, weight=weight)
        updated, norm = Tensor(False), Tensor(0.0, ms.float32)
        if self.window.boundary.touch(last):
            updated, norm = self.optim()
        return loss, updated, norm


class _AddZeros(Compiled):
    """Add zeros to the sum over the ranks, if other ranks have more micro-batches: they wait for the sum."""

    def __init__(self, window: Window):
        super().__init__(window.config.owner, window.config.compiles)
        self.window = window

    def construct(self) -> Any:
        return ops.depend(Tensor(True), self.window.add(self.window.zeros()))


class ByLoops:
    """Runs windows of small networks, several micro-batches in one graph, whose call would cost as much as they do.

    Micro-batches of equal shapes are copied into arrays of a fixed size, which belong to the graph's inputs, so that
    windows of any size run in one graph: with a second one random layers would repeat their masks.

    Args:
        by_calls (ByCalls): has the Cells, and runs windows if MindSpore can't compile a loop over the network.
    """

    def __init__(self, by_calls: ByCalls):
        self._by_calls = by_calls
        self._loop: Loop | None = Loop(by_calls.window, by_calls.network, by_calls.optim)
        self._has_run = False
        self._arrays: dict[tuple, tuple] = {}
        self.window, self.pass_over = by_calls.window, by_calls.pass_over
        self.end, self.clear = by_calls.end, by_calls.clear

    def add(self, inputs: Sequence[Inputs], *, ends: bool, stops: Callable[[], bool]) -> Added | None:
        """Do what `ByCalls.add` does; `stops` is asked after each graph."""
        losses: list[np.ndarray] = []
        ended: tuple | None = None
        while self._loop is not None and len(losses) < len(inputs):
            if losses and stops():
                return None
            added = self._run(self._loop, inputs[len(losses) :], ends)
            losses, ended = [*losses, *added.losses], added.ended
        if self._loop is None:  # MindSpore could not compile it
            return self._by_calls.add(inputs, ends=ends, stops=stops)
        return Added(losses, ended)

    def _run(self, loop: Loop, inputs: Sequence[Inputs], ends: bool) -> Added:
        """Run the first micro-batches of these, as many as one graph takes."""
        kind = _kind(inputs[0])
        if kind not in self._arrays:
            if len(self._arrays) >= _KINDS:
                self._arrays.pop(next(iter(self._arrays)))
            self._arrays[kind] = _arrays(inputs[0])
        factors, arrays, tensors = self._arrays[kind]
        number = 0
        for factor, columns in inputs[: len(factors)]:
            if _kind((factor, columns)) != kind:
                break
            factors[number] = 0.0 if factor is None else factor
            for array, value in zip(arrays, _values(columns)):
                array[number] = value
            number += 1
        last = ends and number == len(inputs)
        shares, *stacks = tensors
        rest = iter(stacks)
        columns = tuple([next(rest) if isinstance(each, ms.Tensor) else each for each in inputs[0][1]])
        weights = None if inputs[0][0] is None else shares
        try:
            results = loop(_number(number), _ENDS if last else _GOES_ON, weights, *columns).asnumpy()
        except Exception as error:
            if self._has_run:
                raise
            _log.debug("For '%s', micro-batches are not run in a loop: %s", loop.owner, error)
            self._loop = None
            self._by_calls.clear()
            return Added([], None)
        self._has_run = True
        losses = results[:-2].reshape(len(factors), -1) if loop.has_terms else results[:-2]
        return Added(list(losses[:number]), (*results[-2:], None) if last else None)


def _kind(inputs: Inputs) -> tuple:
    """Return what micro-batches of one graph have in common."""
    factor, columns = inputs
    kinds = [(each.shape, each.dtype) if isinstance(each, ms.Tensor) else each for each in columns]
    return (factor is None, *kinds)


def _values(columns: tuple) -> list[np.ndarray]:
    return [each.asnumpy() for each in columns if isinstance(each, ms.Tensor)]


def _arrays(inputs: Inputs) -> tuple[np.ndarray, list[np.ndarray], list[Tensor]]:
    """Return arrays of factors and columns of as many micro-batches as a graph takes, and Tensors with their memory."""
    values = _values(inputs[1])
    size = max(1, min(_MOST, _BYTES // max(1, sum(value.nbytes for value in values))))
    factors, arrays = np.zeros(size, np.float32), [np.zeros((size, *value.shape), value.dtype) for value in values]
    return factors, arrays, [Tensor.from_numpy(array) for array in (factors, *arrays)]


@lru_cache(maxsize=1024)
def _as_tensor(factor: float) -> Tensor:
    return Tensor(factor, ms.float32)


@cache
def _number(number: int) -> Tensor:
    return Tensor(number, ms.int32)


class Loop(Compiled):
    r"""Add micro-batches to a window, and end the window if the last of them does.

    Inputs:
        - **number** (Tensor) - how many of them are run.
        - **last** (Tensor) - whether the window ends with them.
        - **factors** (Optional[Tensor]), **\*inputs** - a row for each, of what `AddAndEnd` takes.

    Outputs:
        Tensor, one vector, because each that is read costs time: a loss for each row, or a row of losses; whether the
        parameters were updated; and the norm before clipping.
    """

    def __init__(self, window: Window, network: nn.Cell, optim: TrainOptim):
        config, optimizer = window.config, window.config.optimizer
        super().__init__(config.owner, config.compiles, network, optimizer)
        self.forward_backward = TrainForwardBackward(network, optimizer, window, own_scale(optimizer))
        self.forward_backward.through_branch = None  # this graph has one
        self.optim, self.window = optim, window
        self.has_terms = self.forward_backward.loss_and_gradients.has_terms
        self.touched: tuple = ()
        self.before_compiling = self._find_touched

    def _find_touched(self) -> None:
        self.window.boundary.find_touched()
        network = self.forward_backward.loss_and_gradients.network
        used = (*self.window.boundary.touched, *(parameter for _, parameter in held(network)))
        # Not as a Cell's attribute: MindSpore would compare names, and a replaced Parameter may have that of another.
        object.__setattr__(self, "touched", tuple({id(parameter): parameter for parameter in used}.values()))

    def construct(self, number: Any, last: Any, factors: Any, *inputs: Any) -> Any:
        rows = inputs[0].shape[0]
        numbers = ops.arange(rows)
        losses = ops.zeros((rows,), ms.float32)
        if self.has_terms:
            numbers = ops.reshape(numbers, (rows, 1))
            losses = ops.zeros((rows, 1 + inputs[-2].shape[1]), ms.float32)
        # What a loop uses has to occur before it: see `Boundary.touch`.
        at = Tensor(0, ms.int32)
        number = ops.depend(number, self.touched)
        while at < number:
            columns: Any = ()
            for each in inputs:
                columns = (*columns, ops.gather(each, at, 0) if isinstance(each, Tensor) else each)
            weight = None if factors is None else ops.gather(factors, at, 0)
            loss = call(self.forward_backward, columns, weight=weight)
            losses = ops.where(numbers == at, ops.cast(loss, ms.float32), losses)
            at = at + 1
        updated, norm = Tensor(False), Tensor(0.0, ms.float32)
        if self.window.boundary.touch(last):
            updated, norm = self.optim()
        ended = ops.stack((ops.cast(updated, ms.float32), norm))
        return ops.cat((ops.reshape(losses, (-1,)), ended))


def loops(network: nn.Cell, config: WindowConfig, columns: Sequence[Tensor]) -> bool:
    """Return whether windows of a network are run in loops: where this has been measured, and was faster."""
    if not config.ends_in_graph or not in_graphs(config.compiles):
        return False
    parameters = sum(parameter.nbytes for parameter in config.parameters)
    is_bfloat16 = any(column.dtype == ms.bfloat16 for column in columns)
    return ms.get_context("device_target") == "CPU" and parameters <= _LARGEST and not is_bfloat16


class WithoutSums:
    """Runs windows of one micro-batch, without accumulators.

    Args:
        network (Cell): returns a micro-batch's loss from its inputs.
        config (WindowConfig): what a window works with.
    """

    def __init__(self, network: nn.Cell, config: WindowConfig):
        self._cell = _RunAndUpdate(network, config)

    def add(self, inputs: Sequence[Inputs], *, ends: bool, stops: Callable[[], bool]) -> Added:
        """Run the micro-batch and update with it; its factor would be 1."""
        del ends, stops
        ((_, columns),) = inputs
        loss, *ended = self._cell(*columns)
        return Added([loss.asnumpy()], (*ended, None))

    def pass_over(self, number: int) -> None:
        """Do nothing: there are no other ranks."""

    def clear(self) -> None:
        """Do nothing: the window has no sums."""


class _RunAndUpdate(Compiled):
    """Run one micro-batch and update with it.

    Args, Inputs and Outputs as for `TrainForwardBackward` and `TrainOptim`, without a weight, which would cancel out.
    """

    def __init__(self, network: nn.Cell, config: WindowConfig):
        super().__init__(config.owner, config.compiles, network, config.optimizer)
        self.loss_and_gradients = Forward(network, config, own_scale(config.optimizer))
        self.window = Window(config, None)
        self.before_compiling = self.window.boundary.find_touched
        self.scaled = config.scale.value is not None
        self.through_branch = branch(self.compiles)

    def construct(self, *inputs: Any) -> Any:
        loss, grads = call(self.loss_and_gradients, inputs)
        total = loss[0] if self.loss_and_gradients.has_terms else loss
        scalars = ops.reshape(ops.cast(total, ms.float32), (1,)) if self.scaled else None
        updated, norm = self.window.close_without_sums(grads, None, scalars)[:2]
        return loss, updated, norm if self.through_branch is None else self.through_branch(norm)
