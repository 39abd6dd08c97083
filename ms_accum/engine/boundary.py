"""The end of a window: what happens to its gradient, in which order, until the optimizer is called or not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypedDict

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..network import tree
from ..network.compiled import Compiled, call
from ..network.optimizers import runs_compiled
from ..ranks.reduction import SumOverRanks
from .config import WindowConfig
from .loss_scale import DynamicScale, LossScale, own_scale
from .native_update import native_update
from .nonfinite import LeftOut


class End(TypedDict):
    """What is known of a window when it ends. Each stage gets it, and returns it changed.

    A dict, because a graph takes a NamedTuple for something to interpret; and so it takes a dict in which None is set.
    """

    gradients: Any
    """The sums of the gradients, until they are multiplied by 1 / `divisor`."""
    weight: Any
    """What the window counts for, or None: what divides the sums, or what must not be 0, or the mean is 0/0."""
    losses: Any
    """More numbers, to sum over the ranks, or None: all are finite if the loss is."""
    skip_counts: Any
    """The micro-batches that were not left out, and those left out although their loss was finite, or None."""
    divisor: Any
    """What divides, unscales and clips the gradients, but for the scale by which the optimizer divides: a scalar, so
    that gradients are read once for the norm and once for the update."""
    norm: Any
    """The norm of the gradient, before clipping."""
    keep: Any
    """Whether the optimizer is called."""


@ms.jit_class
class Boundary:
    """The end of a window: a tuple of stages, whose order is defined only here. What is absent is not in it.

    A gradient that is not finite on one rank makes the sum not finite, so all ranks skip, unless its micro-batch was
    left out before. The caller counts. An optimizer with a `loss_scale` divides by it itself; norm and clipping apply
    to the gradient after that.

    Args:
        config (WindowConfig): what the window works with.
        accumulated (bool): whether the gradients are accumulators, which may be multiplied in place.
        emptied (tuple[Parameter]): a window's own accumulators, which are zero after it. Default: none.
    """

    def __init__(
        self,
        config: WindowConfig,
        *,
        accumulated: bool,
        emptied: tuple = (),
    ):
        optimizer, sums, scale, ema = config.optimizer, config.summing.at_the_end, config.scale, config.ema
        self.config = config
        # Without accumulators a window has one micro-batch, whose weight is 0 or cancels out: nothing is left out.
        self.skips = config.skips if accumulated else None
        divides = accumulated and config.divides
        in_place = accumulated and (sums is None or sums.in_place)
        as_computed = not (accumulated or config.stages or sums is not None)
        native = native_update(config, emptied, in_one_pass=in_place and not config.stages, as_computed=as_computed)
        measures = config.kernels if sums is None else sums
        narrow = any(parameter.dtype != ms.float32 for parameter in config.parameters)

        stages: list[Any] = []
        stages += [] if sums is None else [SumOverRanks(sums)]
        stages += [] if self.skips is None else [LeftOut(self.skips, on_ranks=sums is not None)]
        stages += [Divide()] if divides else []
        stages += [Unscale(scale)] if scale.is_used else []
        stages += [Norm(measures, own_scale(optimizer), divided=divides)]
        stages += [] if config.clip_norm is None else [Clip(config.clip_norm)]
        stages += [Multiply(in_place)] if native is None or config.stages else []
        stages += config.stages.values()
        stages += [Cast(config.parameters)] if native is None else []
        stages += [Finite(measures)] if narrow else []
        update = Update(config, emptied) if native is None else native
        stages += [update]
        stages += [] if scale.value is None else [scale]
        stages += [] if ema is None or native is not None else [ema]
        self.stages = tuple(stages)
        self.update = update
        self.find_touched()

    def __call__(self, gradients: tuple, weight: Tensor | None = None, losses: Tensor | None = None) -> Any:
        """Return whether the optimizer was called, the norm before clipping, and the sum of `losses` over the ranks.

        The weight is the sum that divides accumulators. That of the only micro-batch of a window, whose gradients are
        not multiplied by it, cancels out, unless it is 0: then the norm is 0/0 and the window is skipped, too.
        """
        end: End = {
            "gradients": gradients,
            "weight": weight,
            "losses": losses,
            "skip_counts": None if self.skips is None else self.skips.sent(),
            "divisor": None,
            "norm": None,
            "keep": None,
        }
        for stage in self.stages:
            end = stage(end)
        return end["keep"], end["norm"], end["losses"]

    def find_touched(self) -> None:
        """Find the Parameters that a branch with the optimizer uses, on the host, before a graph is compiled.

        The user may have replaced some since the last one was.
        """
        optimizer = self.config.optimizer
        rates = [rate for rate in getattr(optimizer, "lrs", ()) if isinstance(rate, Parameter)]  # a Cell ignores lists
        used = (*optimizer.get_parameters(), *rates, *self.config.changed)
        self.touched = tuple({id(parameter): parameter for parameter in used}.values())
        if isinstance(self.update, Update):
            self.update.touched = self.touched

    def touch(self, condition: Tensor) -> Tensor:
        """Return the condition of a branch that contains the optimizer, made dependent on the optimizer's Parameters.

        A branch keeps the storage that its Parameters had in its first run, unless they also occur outside the branch.
        Otherwise weights that `load_param_into_net` loads later would silently be neither read nor updated.
        """
        return ops.depend(condition, self.touched)


@ms.jit_class
class Divide:
    """Lets the sum of the weights divide: like the next ones, it changes the `divisor` only."""

    def __call__(self, end: End) -> End:
        end["divisor"] = end["weight"]
        return end


@ms.jit_class
class Unscale:
    """Lets the loss scale divide.

    Args:
        scale (Union[LossScale, DynamicScale]): the scale.
    """

    def __init__(self, scale: LossScale | DynamicScale):
        self.constant, self.changing = scale.constant, scale.value

    def __call__(self, end: End) -> End:
        scale, divisor = self.constant if self.changing is None else self.changing * 1.0, end["divisor"]
        end["divisor"] = scale if divisor is None else scale * divisor
        return end


@ms.jit_class
class Norm:
    """Measures the gradient, and decides whether it is finite.

    Args:
        measures (Any): measures gradients, on all ranks alike.
        own_scale (float): the scale by which the optimizer divides.
        divided (bool): whether the weight is in the divisor; else it cancels out, but 0 is 0/0.
    """

    def __init__(self, measures: Any, own_scale: float, *, divided: bool):
        self.measures, self.own_scale, self.divided = measures, own_scale, divided

    def __call__(self, end: End) -> End:
        norm = self.measures.norm(end["gradients"], end["losses"]) / self.own_scale
        if end["divisor"] is not None:
            norm = norm / end["divisor"]
        if end["weight"] is not None and not self.divided:
            norm = norm * (end["weight"] / end["weight"])
        end["norm"] = norm
        end["keep"] = ops.isfinite(norm)
        return end


@ms.jit_class
class Clip:
    """Lets the excess of the norm divide.

    Args:
        norm (float): the maximum.
    """

    def __init__(self, norm: float):
        self.norm = norm

    def __call__(self, end: End) -> End:
        excess, divisor = ops.maximum(end["norm"] / self.norm, Tensor(1.0, ms.float32)), end["divisor"]
        end["divisor"] = excess if divisor is None else excess * divisor
        return end


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

    def _update(self, keep: Tensor, gradients: tuple) -> Any:
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

    def __call__(self, *gradients: tuple) -> Any:
        if not runs_compiled(self.optimizer):  # it has a hook by now, which runs as Python
            return self.optimizer(gradients)
        return super().__call__(*gradients)

    def construct(self, *gradients: tuple) -> Any:
        return self.optimizer(gradients)
