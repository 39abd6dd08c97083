"""The end of a window: what happens to its gradient, and in which order."""

from __future__ import annotations

from typing import Any, TypedDict

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..ranks.reduction import SumOverRanks
from .config import WindowConfig
from .loss_scale import own_scale
from .native_update import native_update
from .nonfinite import LeftOut
from .update import Cast, Finite, Multiply, Update


class End(TypedDict):
    """What is known of a window when it ends. Each stage gets it, and returns it changed.

    A dict, because a graph takes a NamedTuple for something to interpret; and so it takes a dict in which None is set.
    """

    gradients: Any
    """The sums of the gradients, until they are multiplied by 1 / `divisor`."""
    weight_sum: Any
    """What the sums are divided by; or None, if nothing divides them, as with those that follow."""
    counted: Any
    """Without a `weight_sum`: what must not be 0, or the mean is 0/0. It cancels out."""
    figures: Any
    """More numbers, to sum over the ranks."""
    loss: Any
    """The sum of the losses, if it is known: the first of the figures."""
    skip_counts: Any
    """The micro-batches that were not left out, and those left out although their loss was finite."""
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
        optimizer, sums = config.optimizer, config.summing.at_the_end
        self.config = config
        # Without accumulators a window has one micro-batch, whose weight is 0 or cancels out: nothing is left out.
        self.skips = config.skips if accumulated else None
        in_place = accumulated and (sums is None or sums.in_place)
        users, dynamic, ema = config.stages, config.dynamic, config.ema
        as_computed = not (accumulated or users or sums is not None)
        native = native_update(config, emptied, at_once=in_place and not users, as_computed=as_computed)
        measures = config.kernels if sums is None else sums
        narrow = any(parameter.dtype != ms.float32 for parameter in config.parameters)

        stages: list[Any] = []
        stages += [] if sums is None else [SumOverRanks(sums)]
        stages += [] if self.skips is None else [LeftOut(self.skips, on_ranks=sums is not None)]
        stages += [Divide()]
        stages += [Unscale(config.changing_scale, config.scale)] if config.scales else []
        stages += [Norm(measures, own_scale(optimizer))]
        stages += [] if config.clip_norm is None else [Clip(config.clip_norm)]
        stages += [Multiply(in_place)] if native is None or users else []
        stages += users
        stages += [Cast(config.parameters)] if native is None else []
        stages += [Finite(measures)] if narrow else []
        update = Update(config, emptied) if native is None else native
        stages += [update]
        stages += [] if dynamic is None else [dynamic]
        stages += [] if ema is None or native is not None else [ema]
        self.stages = tuple(stages)
        self.update = update
        self.find_touched()

    def __call__(self, grad_sum: Any, weight_sum: Any = None, figures: Any = None, only_weight: Any = None) -> Any:
        """Return whether the optimizer was called, the norm before clipping, and the sum of `figures` over the ranks.

        `only_weight` is the weight of the only micro-batch of a window, whose gradients are not multiplied by it. It
        cancels out, unless it is 0: then the norm is 0/0 and the window is skipped, as with a weight sum of 0.
        """
        loss = None if figures is None else figures[0]
        skip_counts = None if self.skips is None else self.skips.sent()
        end: End = {
            "gradients": grad_sum,
            "weight_sum": weight_sum,
            "counted": only_weight,
            "figures": figures,
            "loss": loss,
            "skip_counts": skip_counts,
            "divisor": None,
            "norm": None,
            "keep": None,
        }
        for stage in self.stages:
            end = stage(end)
        return end["keep"], end["norm"], end["figures"]

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

    def touch(self, condition: Any) -> Any:
        """Return the condition of a branch that contains the optimizer, made dependent on the optimizer's Parameters.

        A branch keeps the storage that its Parameters had in its first run, unless they also occur outside the branch.
        Otherwise weights that `load_param_into_net` loads later would silently be neither read nor updated.
        """
        return ops.depend(condition, self.touched)


@ms.jit_class
class Divide:
    """Lets the sum of the weights divide: like the next ones, it changes the `divisor` only."""

    def __call__(self, end: End) -> End:
        if end["weight_sum"] is not None:
            end["divisor"] = end["weight_sum"]
        return end


@ms.jit_class
class Unscale:
    """Lets the loss scale divide.

    Args:
        changing (Optional[Parameter]): a dynamic scale.
        constant (float): a constant one.
    """

    def __init__(self, changing: Parameter | None, constant: float):
        self.changing, self.constant = changing, constant

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
    """

    def __init__(self, measures: Any, own_scale: float):
        self.measures, self.own_scale = measures, own_scale

    def __call__(self, end: End) -> End:
        norm = self.measures.norm(end["gradients"], end["figures"]) / self.own_scale
        if end["divisor"] is not None:
            norm = norm / end["divisor"]
        if end["counted"] is not None:
            norm = norm * (end["counted"] / end["counted"])
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
