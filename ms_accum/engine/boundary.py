"""The end of a window: what happens to its gradient, and in which order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..network import tree
from ..network.calls import call
from ..network.compiled import Compiled
from ..network.optimizers import runs_compiled
from .collaborators import Collaborators
from .loss_scale import own_scale
from .native_update import native_update


@ms.jit_class
class Boundary:
    """The end of a window. The order of its steps is defined only here:

    sum over the ranks → divide by the weights → unscale → all finite? → clip by the global norm → optimizer, or skip →
    change the loss scale → the average of the weights.

    A gradient that is not finite on one rank makes the sum not finite, so all ranks skip. Factors are scalars until the
    end, so gradients are read once for the norm and once for the update. The caller clears the accumulators, unless it
    `empties` them. An optimizer with a `loss_scale` divides by it itself; norm and clipping apply to the gradient after
    that.

    Args:
        collaborators (Collaborators): what the window works with.
        accumulated (bool): whether the gradients are accumulators, which may be multiplied in place.
        may_empty (bool): whether these may be emptied. Default: ``False``.
        touched (Sequence[Parameter]): more Parameters that a branch with the optimizer uses. Default: none.
    """

    def __init__(
        self,
        collaborators: Collaborators,
        *,
        accumulated: bool,
        may_empty: bool = False,
        touched: Sequence[Parameter] = (),
    ):
        optimizer = collaborators.optimizer
        self.optimizer = optimizer
        outside = not collaborators.compiles and runs_compiled(optimizer)
        self.update_outside = _UpdateOutside(collaborators.owner, optimizer) if outside else None
        self.parameters = collaborators.parameters
        self.clip_norm = collaborators.clip_norm
        self.scale = collaborators.scale
        self.constant = collaborators.scale * own_scale(optimizer)
        self.dynamic = collaborators.dynamic
        # Without accumulators a window has one micro-batch, whose weight is 0 or cancels out: nothing is left out.
        self.skips = collaborators.skips if accumulated else None
        self.sums = collaborators.summing.at_the_end
        in_place = accumulated and (self.sums is None or self.sums.in_place)
        self.multiply = tree.multiply_in_place if in_place else tree.multiply
        self.measures = collaborators.kernels if self.sums is None else self.sums
        self.narrow = any(parameter.dtype != ms.float32 for parameter in self.parameters)
        self.native = native_update(collaborators, empties=in_place and may_empty)
        self.empties = self.native is not None and self.native.empties
        """bool, whether the accumulators are zero after it."""
        self.ema = collaborators.ema if self.native is None else None
        rates = [rate for rate in getattr(optimizer, "lrs", ()) if isinstance(rate, Parameter)]  # a Cell ignores lists
        used = (*optimizer.get_parameters(), *rates, *collaborators.changed, *touched)
        self.touched = tuple({id(parameter): parameter for parameter in used}.values())

    def __call__(
        self, grad_sum: Any, weight_sum: Any = None, figures: Any = None, only: Any = None, notes: Any = None
    ) -> Any:
        """Return whether the optimizer was called, the norm before clipping, and the sum of `figures` over the ranks.

        `only` is the weight of the only micro-batch of a window, whose gradients are not multiplied by it. It cancels
        out, unless it is 0: then the norm is 0/0 and the window is skipped, as with a weight sum of 0.

        `notes`, with several ranks, are more numbers to sum, which are returned last. The first is the number of
        micro-batches: if no rank has any, nothing is updated, and nothing follows.
        """
        loss = None if figures is None else figures[0]
        counts = None if self.skips is None else self.skips.counts * 1.0
        if self.sums is not None:
            grad_sum, weight_sum, figures, counts, notes = self._summed(grad_sum, weight_sum, figures, notes)
            loss = None if loss is None else figures[0]
        scale = self.scale if self.dynamic is None else self.dynamic.value * 1.0
        norm = self.measures.norm(grad_sum, figures) / (self.constant if self.dynamic is None else scale)
        if weight_sum is not None:
            norm = norm / weight_sum
        elif counts is not None:
            only = counts[0]  # the micro-batches that were not left out: without any the norm is 0/0 as well
        if only is not None:
            norm = norm * (only / only)
        finite = ops.isfinite(norm)
        weight = only if weight_sum is None else weight_sum
        if notes is not None:
            finite = ops.logical_and(finite, notes[0] > 0)
            weight = notes[0] if weight is None else weight
        divisor = self._divisor(weight_sum, norm, scale)
        if self.native is None:
            updated = self._update(finite, grad_sum, divisor, norm)
        else:
            updated = self.native(finite, grad_sum, divisor)
        if self.dynamic is not None or self.ema is not None:
            updated = self._follow(updated, loss, weight, counts)
        return (updated, norm, figures) if notes is None else (updated, norm, figures, notes)

    def _update(self, finite: Any, grad_sum: Any, divisor: Any, norm: Any) -> Any:
        """Divide, and call the optimizer, or skip; return whether it was called."""
        gradients = grad_sum
        if divisor is not None:
            # Multiply by the reciprocal: dividing in place is 20 times slower on MindSpore's CPU.
            gradients = self.multiply(grad_sum, 1.0 / divisor)
        gradients = tree.cast_like(gradients, self.parameters)
        if self.narrow:
            # A gradient that is finite in float32 may not be finite in the parameters' type.
            finite = ops.logical_and(finite, ops.isfinite(self.measures.norm(gradients, norm)))
        return self._call_optimizer(self.touch(finite), gradients)

    def _call_optimizer(self, finite: Any, gradients: Any) -> Any:
        """Call the optimizer or skip. A separate method, because MindSpore's strict graphs lose a None after an if."""
        if finite:
            if self.update_outside is None:
                self.optimizer(gradients)
            else:
                call(self.update_outside, gradients)
        return finite

    def _follow(self, updated: Any, loss: Any, weight: Any, counts: Any) -> Any:
        """Do what follows a window, and return `updated`, because MindSpore warns about calls that return nothing."""
        if self.dynamic is not None:
            if weight is not None:  # 0/0 if all weights are 0: then the scale is not the cause
                loss = (weight if loss is None else loss) / weight
            self.dynamic.adjust(updated, loss, None if counts is None else counts[1])
        return updated if self.ema is None else self.ema.after_window(updated)

    def _summed(self, grad_sum: Any, weight_sum: Any, figures: Any, notes: Any) -> Any:
        """Sum over the ranks. All of them call it with the same arguments given, in a step and in a flush alike."""
        zero = Tensor(0.0, ms.float32)
        extra: Any = (zero if weight_sum is None else weight_sum, zero if figures is None else figures)
        extra = extra if notes is None else (*extra, notes)
        extra = extra if self.skips is None else (*extra, self.skips.sent())
        grad_sum, extra = self.sums(grad_sum, extra)
        counts = None
        if self.skips is not None:
            counts = self.skips.count_other_ranks(extra[-1])
            grad_sum = ops.depend(grad_sum, counts)  # without a use of its result MindSpore leaves the call out
        weights = None if weight_sum is None else extra[0]
        return grad_sum, weights, extra[1], counts, None if notes is None else extra[2]

    def touch(self, condition: Any) -> Any:
        """Return the condition of a branch that contains the optimizer, made dependent on the optimizer's Parameters.

        A branch keeps the storage that its Parameters had in its first run, unless they also occur outside the branch.
        Otherwise weights that `load_param_into_net` loads later would silently be neither read nor updated.
        """
        return ops.depend(condition, self.touched)

    def _divisor(self, weight_sum: Any, norm: Any, scale: Any) -> Any:
        """Return what divides, unscales and clips the gradients, but for the scale by which the optimizer divides."""
        divisor = weight_sum
        if self.clip_norm is not None:
            excess = ops.maximum(norm / self.clip_norm, Tensor(1.0, ms.float32))
            divisor = excess if divisor is None else excess * divisor
        if self.dynamic is not None or self.scale != 1.0:
            divisor = scale if divisor is None else scale * divisor
        return divisor


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
