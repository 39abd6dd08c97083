"""What happens to a gradient at the end of a window, and in which order?"""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from .. import _check
from ..network import checks, tree
from ..network.accumulators import loss_scale


@ms.jit_class
class Boundary:
    """The end of a window. The order of its steps is written here and nowhere else:

    sum over the ranks → divide by the weights → unscale → all finite? → clip by the global norm → optimizer, or skip.

    A gradient that is not finite on one rank makes the sum not finite, so all ranks skip. Factors are scalars until the
    end: gradients are read once for the norm and multiplied once. The caller clears the accumulators.

    Args:
        owner (str): the name used in error messages.
        optimizer (Optimizer): gets the window's gradient. An optimizer with a `loss_scale` divides by it
            itself; norm and clipping apply to the gradient after that.
        clip_norm (Optional[float]): bound of the global norm. ``None``: no clipping.
        multiply (Callable): multiplies gradients by a scalar; `multiply_in_place` if they are Parameters.
        sums (Union[WholeSums, PartSums, SumsAlready, None]): sums over the ranks. ``None``: a single process.
    """

    def __init__(
        self,
        owner: str,
        optimizer: Any,
        clip_norm: float | None = None,
        *,
        multiply: Any = tree.multiply,
        sums: Any = None,
    ):
        if clip_norm is not None:
            clip_norm = _check.positive_number(owner, "clip_norm", clip_norm)
        self.optimizer = checks.optimizer(owner, optimizer)
        self.parameters = tuple(optimizer.parameters)
        self.scale = loss_scale(optimizer)
        self.clip_norm = clip_norm
        self.sums = sums
        self.multiply = multiply if sums is None or sums.in_place else tree.multiply
        self.narrow = any(parameter.dtype != ms.float32 for parameter in self.parameters)
        rates = [rate for rate in getattr(optimizer, "lrs", ()) if isinstance(rate, Parameter)]  # a Cell ignores lists
        touched = {id(parameter): parameter for parameter in (*optimizer.get_parameters(), *rates)}
        self._touched = tuple(touched.values())

    def __call__(self, grad_sum: Any, weight_sum: Any = None, figures: Any = None, only: Any = None) -> Any:
        """Return whether the optimizer was called, the norm before clipping, and the figures' sum over the ranks.

        `only` is the weight of a window's only micro-batch, whose gradients are not multiplied by it. It cancels out,
        unless it is 0: then the norm is 0/0 and the window is skipped, as with a weight sum of 0.
        """
        if self.sums is not None:
            grad_sum, weight_sum, figures = self._summed(grad_sum, weight_sum, figures)
        norm = self._norm(grad_sum, figures) / self.scale
        if weight_sum is not None:
            norm = norm / weight_sum
        if only is not None:
            norm = norm * (only / only)
        gradients = self._gradients(grad_sum, weight_sum, norm)
        finite = ops.isfinite(norm)
        if self.narrow:
            # A gradient that is finite in float32 may not be finite in the parameters' type.
            finite = ops.logical_and(finite, ops.isfinite(self._norm(gradients, norm)))
        return self._update(finite, gradients), norm, figures

    def _update(self, finite: Any, gradients: Any) -> Any:
        """Call the optimizer or skip, in its own method, because MindSpore's strict graphs lose a None after an if."""
        updated = self.touch(finite)
        if updated:
            self.optimizer(gradients)
        return updated

    def _summed(self, grad_sum: Any, weight_sum: Any, figures: Any) -> Any:
        nothing = Tensor(0.0, ms.float32)
        others = (nothing if weight_sum is None else weight_sum, nothing if figures is None else figures)
        grad_sum, others = self.sums(grad_sum, others)
        return grad_sum, None if weight_sum is None else others[0], others[1]

    def _norm(self, gradients: Any, after: Any) -> Any:
        return tree.global_norm(gradients) if self.sums is None else self.sums.norm(gradients, after)

    def touch(self, condition: Any) -> Any:
        """Return the condition of a branch that contains the optimizer, made dependent on the optimizer's Parameters.

        A branch keeps the storage that its Parameters had at its first run, unless they also occur outside the branch.
        Weights that `load_param_into_net` loads later would silently be neither read nor updated.
        """
        return ops.depend(condition, self._touched)

    def _gradients(self, grad_sum: Any, weight_sum: Any, norm: Any) -> Any:
        # Multiply by the reciprocal: dividing in place is 20 times slower on MindSpore's CPU.
        gradients = grad_sum
        if self.clip_norm is not None:
            excess = ops.maximum(norm / self.clip_norm, Tensor(1.0, ms.float32))
            divisor = excess if weight_sum is None else excess * weight_sum
            gradients = self.multiply(grad_sum, 1.0 / divisor)
        elif weight_sum is not None:
            gradients = self.multiply(grad_sum, 1.0 / weight_sum)
        return tree.cast_like(gradients, self.parameters)
