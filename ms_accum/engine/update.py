"""The stages of a window's end that give its gradient to the optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..network import tree
from ..network.calls import call
from ..network.compiled import Compiled
from ..network.optimizers import runs_compiled
from .config import WindowConfig


@ms.jit_class
class Multiply:
    """Divides, unscales and clips the gradients.

    Args:
        in_place (bool): whether they are accumulators, which may be changed.
    """

    def __init__(self, in_place: bool):
        self.multiply = tree.multiply_in_place if in_place else tree.multiply

    def __call__(self, end: Any) -> Any:
        gradients, divisor = end["gradients"], end["divisor"]
        if divisor is not None:
            # By the reciprocal: dividing in place is 20 times slower on MindSpore's CPU.
            gradients = self.multiply(gradients, 1.0 / divisor)
        end["gradients"] = gradients
        end["divisor"] = Tensor(1.0, ms.float32)
        return end


@ms.jit_class
class Cast:
    """Casts the gradients to the types of the parameters."""

    def __init__(self, parameters: Sequence[Parameter]):
        self.parameters = tuple(parameters)

    def __call__(self, end: Any) -> Any:
        end["gradients"] = tree.cast_like(end["gradients"], self.parameters)
        return end


@ms.jit_class
class Finite:
    """Skips gradients that are not finite in the type of the parameters.

    Args:
        measures (Any): measures gradients, on all ranks alike.
    """

    def __init__(self, measures: Any):
        self.measures = measures

    def __call__(self, end: Any) -> Any:
        norm, keep = end["norm"], end["keep"]
        finite = ops.isfinite(self.measures.norm(end["gradients"], norm))
        # What a stage of the user's skips is not called infinite: it would lower a loss scale, or end the run.
        kept_infinite = ops.logical_and(keep, ops.logical_not(finite))
        end["norm"] = ops.where(kept_infinite, ops.full_like(norm, float("inf")), norm)
        end["keep"] = ops.logical_and(keep, finite)
        return end


@ms.jit_class
class Update:
    """Calls the optimizer, or skips, and empties the accumulators.

    Args:
        config (WindowConfig): what the window works with.
        emptied (tuple[Parameter]): the accumulators to be zero after it.
    """

    def __init__(self, config: WindowConfig, emptied: tuple):
        optimizer = config.optimizer
        outside = not config.compiles and runs_compiled(optimizer)
        self.outside = _UpdateOutside(config.owner, optimizer) if outside else None
        self.optimizer = optimizer
        self.touched: tuple = ()
        """tuple[Parameter], what its branch uses; see `Boundary.touch`."""
        self.kernels, self.emptied = config.kernels, emptied

    def __call__(self, end: Any) -> Any:
        end["keep"] = self._update(ops.depend(end["keep"], self.touched), end["gradients"])
        return end

    def _update(self, keep: Any, gradients: Any) -> Any:
        """Update or skip. A separate method, because MindSpore's strict graphs lose a None after an if."""
        if keep:
            if self.outside is None:
                self.optimizer(gradients)
            else:
                call(self.outside, gradients)
            return ops.depend(keep, self._clear(True))
        return ops.depend(keep, self._clear(False))

    def _clear(self, finite: bool) -> Any:
        """Empty the accumulators, whose elements are finite after an update, as the norm is."""
        return self.kernels.clear(self.emptied, finite) if self.emptied else ()


class _UpdateOutside(Compiled):
    """Calls an optimizer outside graphs that MindSpore runs as a graph of its own (`ms.jit`).

    That graph keeps the storage of its first run, so it would not train weights that are loaded later.
    """

    def __init__(self, owner: str, optimizer: Any):
        super().__init__(owner, True, optimizer)
        self.optimizer = optimizer

    def __call__(self, *gradients: Any) -> Any:
        if not runs_compiled(self.optimizer):  # it has a hook by now, which runs as Python
            return self.optimizer(gradients)
        return super().__call__(*gradients)

    def construct(self, *gradients: Any) -> Any:
        return self.optimizer(gradients)
