"""One window, compiled: how a micro-batch is added, how the window ends, how it is cleared, and what it holds.

The driver, the three Cells and the `Accumulator` are built around it. It does not decide where a window ends:
`training.windows` does, in `Model` the train step, in a user's graph the `Accumulator`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
from mindspore import Parameter, Tensor, ops

from ..network import tree
from ..network.parameters import untracked, untrained, zeros_like
from .boundary import Boundary
from .config import WindowConfig
from .nonfinite import SkipMicro


@ms.jit_class
class Window:
    """The accumulators of a window, what is added to them, and how the window ends.

    Args:
        config (WindowConfig): what the window works with.
        grad_sum (Optional[Sequence[Parameter]]): the accumulators. None: a window of one micro-batch, which has none.
        weight_sum (Optional[Parameter]): the sum of the weights. Default: ``None``.
        own (bool): whether the accumulators are its own, so that its end empties them. Default: ``False``: they are the
            user's, who does it.
    """

    def __init__(
        self,
        config: WindowConfig,
        grad_sum: Sequence[Parameter] | None,
        weight_sum: Parameter | None = None,
        *,
        own: bool = False,
    ):
        self.config = config
        self.kernels = config.kernels
        self.has_sums = grad_sum is not None
        self.grad_sum = tuple(grad_sum or ())
        self.weight_sum = untracked(weight_sum)
        self.divides = config.divides
        self.skips = config.skips if self.has_sums else None
        self.weight_in_loss = config.weight_in_loss
        """bool, whether a loss is multiplied by its weight, instead of the gradients."""
        self.takes_weights = bool(self.weight_sum) or config.shares
        """bool, whether micro-batches have weights."""
        self.sum_over_ranks = config.summing.of_micro_batch
        self.names = tuple(parameter.name for parameter in config.parameters)
        self.shapes = tuple(parameter.shape for parameter in config.parameters)
        self.own = own
        emptied = self.grad_sum if own else ()
        self.boundary = Boundary(config, accumulated=self.has_sums, emptied=emptied)

    def leave_out(self, gradients: tuple, weight: Tensor | None, loss: Tensor | None = None) -> tuple:
        """Decide whether a micro-batch is left out because it is not finite: what precedes `add`, with its results.

        Returns:
            tuple, its weight, 0 if it is left out; the same as a factor, None if none ever is; and whether it is left
            out, a Tensor, or False if none ever is.
        """
        if self.skips is None:
            return weight, None, False
        kept_factor, left_out = self.skips(self.kernels, gradients, loss, weight)
        return None if weight is None else weight * kept_factor, kept_factor, left_out

    def add(self, gradients: tuple, weight: Tensor | None = None, kept_factor: Tensor | None = None) -> tuple:
        """Add the gradients of a micro-batch, times the weight if there is one and the loss was not multiplied by it.

        Args:
            gradients (tuple[Tensor]): its gradients.
            weight (Optional[Tensor]): its weight. Default: ``None``, no weights.
            kept_factor (Optional[Tensor]): 0 if nothing is added, also for NaN, and the weight is 0; else 1. Default:
                ``None``, 1.

        Returns:
            tuple[Tensor], the accumulators. Let something depend on it: MindSpore leaves out a call without a used
            result.
        """
        if weight is not None and self.weight_sum:
            ops.assign_add(self.weight_sum[0], ops.cast(weight, ms.float32))
        kernels = self.kernels
        factor = kept_factor if weight is None or self.weight_in_loss else weight
        if self.sum_over_ranks is not None:
            if kept_factor is not None:
                gradients = tree.multiply_no_nan(gradients, factor)
            elif factor is not None:
                gradients = tree.multiply(gradients, factor)
            return kernels.add(self.grad_sum, self.sum_over_ranks(gradients)[0])
        if kept_factor is not None:
            return kernels.add_no_nan(self.grad_sum, gradients, factor)
        if factor is not None:
            return kernels.add_weighted(self.grad_sum, gradients, factor)
        return kernels.add(self.grad_sum, gradients)

    def close(self, losses: Tensor | None = None) -> tuple:
        """End the window: see `Boundary`. Afterwards it is empty if its accumulators are its own."""
        weight_sum = self.weight_sum[0] if self.weight_sum else None
        closed = self.boundary(self.grad_sum, weight_sum, losses)
        return ops.depend(closed, clear_scalars(self.weight_sum, self.skips)) if self.own else closed

    def close_without_sums(self, gradients: tuple, weight: Tensor | None = None, losses: Tensor | None = None) -> tuple:
        """End a window of one micro-batch, which has no accumulators. Its weight cancels out, unless it is 0."""
        return self.boundary(gradients, weight, losses)

    def clear(self) -> tuple:
        """Set the sums to zero; let something depend on what it returns."""
        return clear_sums(self.kernels, self.grad_sum, self.weight_sum, self.skips)

    def zeros(self) -> tuple:
        """Return zeros like the gradients of a micro-batch."""
        return tuple([ops.zeros(shape, ms.float32) for shape in self.shapes])

    @property
    def state(self) -> dict[str, Any]:
        """dict, the sums by owner and name; that of the weights is not there with every reduction."""
        sums: dict[str, Any] = {f"window.grad_sum.{name}": total for name, total in zip(self.names, self.grad_sum)}
        if self.weight_sum:
            sums["weights.sum"] = self.weight_sum[0]
        return sums


def clear_sums(kernels: Any, grad_sum: tuple, weight_sum: tuple, skips: SkipMicro | None) -> tuple:
    """Assign zeros: multiplying by zero would keep NaN.

    Returns:
        tuple[Tensor], what was assigned. Let something depend on it: otherwise MindSpore left out the assignments in a
        graph that had run before the accumulators were used.
    """
    return clear_scalars(weight_sum, skips), kernels.clear(grad_sum)


def clear_scalars(weight_sum: tuple, skips: SkipMicro | None) -> tuple:
    """Assign zeros to the sums that are not of gradients."""
    cleared: tuple = ()
    if skips is not None:
        cleared = (skips.clear(),)
    if weight_sum:
        cleared = (*cleared, ops.assign(weight_sum[0], Tensor(0.0, ms.float32)))
    return cleared


def new_window(name: str, config: WindowConfig) -> Window:
    """Return a window with new accumulators, whose names begin with `name`."""
    grad_sum = zeros_like(f"{name}.grad_sum", config.summing.like)
    weight_sum = untrained(f"{name}.weight_sum", 0.0, ms.float32) if config.divides else None
    return Window(config, grad_sum, weight_sum, own=True)
