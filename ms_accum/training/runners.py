"""What runs the micro-batches of a driver's window: with accumulators, or at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Protocol

import mindspore as ms
from mindspore import Tensor, nn, ops

from ..engine.cells import TrainForwardBackward, TrainOptim, cells_around, part_of_larger_graph
from ..engine.config import WindowConfig
from ..engine.forward import Forward
from ..engine.loss_scale import own_scale
from ..engine.window import Window
from ..loss.objective import Objective
from ..network.branch import branch
from ..network.calls import call
from ..network.compiled import Compiled
from ..network.optimizers import LearningRate

_GOES_ON, _ENDS = Tensor(False), Tensor(True)
_OWNER = "GradientAccumulation"


class Runner(Protocol):
    """Runs the micro-batches of a window."""

    @property
    def accumulators(self) -> dict[str, ms.Parameter]: ...
    def add(self, micro_batch: tuple, weight: Tensor | None, last: bool) -> Any: ...
    def pass_over(self) -> None: ...
    def end(self, scalars: Callable[[], Tensor] | None) -> tuple: ...
    def clear(self) -> None: ...


class Accumulating:
    """Runs windows with accumulators: the three Cells around one `Window`.

    Where its end needs nothing from the host, the last micro-batch and the end are one graph, the same that runs the
    other micro-batches: on CPU a call costs as much as a small network.

    Args:
        network (Cell): returns a micro-batch's loss from its columns.
        window (Window): the window.
    """

    def __init__(self, network: nn.Cell, window: Window):
        config = window.config
        self._window = window
        sens = own_scale(config.optimizer)
        self._forward_backward, self._optim, self._clear = cells_around(window, network, sens)
        self._add_and_end: _AddAndEnd | None = None
        if config.group is None and config.dynamic is None:
            self._add_and_end = _AddAndEnd(part_of_larger_graph(window, network, sens), self._optim)
        self._ended: tuple | None = None
        self._add_zeros = None if window.sum_over_ranks is None else _AddZeros(window)
        self._learning_rate = LearningRate(config.optimizer)

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
        return (lr, updated, norm, *sums)


class _AddAndEnd(Compiled):
    """Add a micro-batch to a window, and end the window if it is the last.

    Args:
        forward_backward (TrainForwardBackward): the Cell that adds it.
        optim (TrainOptim): the Cell that ends the window.

    Inputs:
        - **last** (Tensor) - whether the window ends with it.
        - **weight** (Optional[Tensor]), **\\*inputs** (tuple[Tensor]) - those of `TrainForwardBackward`.

    Outputs:
        tuple[Tensor], the loss of the micro-batch; whether the parameters were updated, and the norm before clipping.
    """

    def __init__(self, forward_backward: TrainForwardBackward, optim: TrainOptim):
        window = forward_backward.window
        optimizer, network = window.config.optimizer, forward_backward.loss_and_gradients.network
        super().__init__(forward_backward.owner, forward_backward.compiles, network, optimizer)
        self.forward_backward, self.optim = forward_backward, optim
        self.window = window

    def construct(self, last: Any, weight: Any, *inputs: Any) -> Any:
        loss = call(self.forward_backward, inputs, weight=weight)
        updated, norm = Tensor(False), Tensor(0.0, ms.float32)
        if self.window.boundary.touch(last):
            updated, norm = self.optim()
        return loss, updated, norm


class _AddZeros(Compiled):
    """Add zeros to the sum over the ranks if this rank's micro-batch has weight 0: the other ranks wait for the sum."""

    def __init__(self, window: Window):
        super().__init__(_OWNER, window.config.compiles)
        self.window = window

    def construct(self) -> Any:
        return ops.depend(Tensor(True), self.window.add(self.window.zeros()))


class AtOnce:
    """Runs windows of one micro-batch, without accumulators.

    Args:
        objective (Objective): the loss.
        config (WindowConfig): what a window works with.
    """

    accumulators: dict[str, ms.Parameter] = {}
    _ended: tuple | None = None

    def __init__(self, objective: Objective, config: WindowConfig):
        self._cell = _UpdateAtOnce(objective.forward, config)
        self._update_with_zeros = None if config.weighted else _UpdateWithZeros(self._cell)
        self._learning_rate = LearningRate(config.optimizer)

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
        """Do what `Accumulating.end` does; if the micro-batch had weight 0, a mean has no update and no norm."""
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

    def __init__(self, network: nn.Cell, config: WindowConfig):
        super().__init__(_OWNER, config.compiles, network, config.optimizer)
        self.loss_and_gradients = Forward(network, config, own_scale(config.optimizer))
        self.window = Window(config, None)
        self.scaled = config.dynamic is not None
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
        super().__init__(_OWNER, at_once.compiles, at_once.window.config.optimizer)
        self.window = at_once.window
        self.scaled = at_once.scaled

    def construct(self) -> Any:
        scalars = ops.zeros((1,), ms.float32) if self.scaled else None
        return self.window.close_at_once(self.window.zeros(), None, scalars)[:2]
