"""Gradients that are not finite: the policies, and what leaves out a micro-batch."""

from __future__ import annotations

from typing import Any

import mindspore as ms
from mindspore import Tensor, ops

from .. import _check
from ..network.parameters import unique_name, untrained

SKIP_WINDOW, SKIP_MICRO, RAISE = "skip_window", "skip_micro", "raise"
POLICIES = (SKIP_WINDOW, SKIP_MICRO, RAISE)


@ms.jit_class
class SkipMicro:
    """Leaves out micro-batches whose gradient or loss is not finite, with their weight.

    The accumulators never contain NaN, and the window is the exact mean of its other micro-batches. A window without
    other micro-batches is skipped.
    """

    def __init__(self) -> None:
        name = unique_name("skip_micro")
        self.counts = untrained(f"{name}.counts", [0.0, 0.0], ms.float32)
        """Parameter, in the open window: micro-batches not left out, and left out although their loss was finite."""
        self.left_out = untrained(f"{name}.left_out", 0, ms.int32)
        """Parameter, the number of micro-batches left out so far, on all ranks."""
        self.uncounted = untrained(f"{name}.uncounted", 0, ms.int32)
        """Parameter, those of this rank that the other ranks have not counted yet."""

    def __call__(
        self, kernels: Any, gradients: tuple, loss: Tensor | None = None, weight: Tensor | None = None
    ) -> tuple:
        """Decide whether a micro-batch is left out, in a graph.

        A micro-batch of weight 0 is not left out, because it does not count: its loss may be 0/0 for a good reason.

        Args:
            kernels (Union[Kernels, NativeKernels]): measure gradients.
            gradients (tuple[Tensor]): its gradients.
            loss (Optional[Tensor]): its loss. Default: ``None``, only the gradients are looked at.
            weight (Optional[Tensor]): its weight. Default: ``None``, it counts.

        Returns:
            tuple, 1.0, or 0.0 if the micro-batch does not count or is left out; and whether it is left out.
        """
        finite = kernels.all_finite(gradients)
        left_out = ops.logical_not(finite)
        overflows = ops.cast(left_out, ms.float32)
        if loss is not None:
            overflows = overflows * ops.cast(ops.isfinite(loss), ms.float32)
            left_out = ops.logical_not(ops.logical_and(finite, ops.isfinite(loss)))
        kept_factor = 1.0 - ops.cast(left_out, ms.float32)
        if weight is not None:
            counts = ops.cast(weight, ms.float32) != 0
            kept_factor = kept_factor * ops.cast(counts, ms.float32)
            overflows = overflows * ops.cast(counts, ms.float32)
            left_out = ops.logical_and(left_out, counts)
        ops.assign_add(self.counts, ops.stack((1.0 - ops.cast(left_out, ms.float32), overflows)))
        ops.assign_add(self.left_out, ops.cast(left_out, ms.int32))
        ops.assign_add(self.uncounted, ops.cast(left_out, ms.int32))
        return kept_factor, left_out

    def pass_over(self) -> None:
        """Count a micro-batch that is not run because it does not count, on the host."""
        ops.assign(self.counts, self.counts + Tensor([1.0, 0.0], ms.float32))

    settings = SKIP_MICRO
    """str, what must be equal in a resumed run, and on all ranks."""

    @property
    def state(self) -> dict[str, Any]:
        """dict, its Parameters in a training state, by name."""
        return {"left_out": self.left_out, "counts": self.counts}

    @property
    def changed(self) -> tuple:
        """tuple[Parameter], those that a micro-batch and the end of a window change."""
        return self.counts, self.left_out, self.uncounted

    def sent(self) -> Tensor:
        """Return what is summed over the ranks at the end of a window: `counts` and `uncounted`."""
        return ops.cat((self.counts, ops.reshape(ops.cast(self.uncounted, ms.float32), (1,))))

    def count_other_ranks(self, summed: Tensor) -> Tensor:
        """Count what the other ranks left out; `summed` is the sum of `sent`, which is returned."""
        of_other_ranks = ops.cast(summed[2], ms.int32) - self.uncounted
        added = ops.assign_add(self.left_out, of_other_ranks)
        return ops.depend(summed, ops.assign(self.uncounted, ops.depend(Tensor(0, ms.int32), added)))

    def clear(self) -> Tensor:
        """Begin a new window."""
        return ops.assign(self.counts, Tensor([0.0, 0.0], ms.float32))


@ms.jit_class
class LeftOut:
    """The stage of a window's end that knows how many micro-batches were not left out: without any it is skipped.

    Args:
        skips (SkipMicro): leaves them out.
        on_ranks (bool): whether the counts are those of several ranks.
    """

    def __init__(self, skips: SkipMicro, *, on_ranks: bool):
        self.skips, self.on_ranks = skips, on_ranks

    def __call__(self, end: Any) -> Any:
        if self.on_ranks:
            end["skip_counts"] = self.skips.count_other_ranks(end["skip_counts"])
            # Without a use of its result MindSpore leaves the call out.
            end["gradients"] = ops.depend(end["gradients"], end["skip_counts"])
        if end["weight"] is None:
            end["weight"] = end["skip_counts"][0]
        return end


def policy_of(owner: str, nonfinite: Any, *, in_graph: bool = False) -> str:
    """Return the policy of the user's argument, or raise an error if it is invalid. A graph can't use "raise"."""
    policy = _check.one_of(owner, "nonfinite", nonfinite, POLICIES)
    if in_graph and policy == RAISE:
        choices = f"'{SKIP_WINDOW}' or '{SKIP_MICRO}'"
        remedy = "A compiled step can't raise an error: read 'skipped' after the step, and raise it yourself."
        _check.raise_invalid(ValueError, owner, "nonfinite", choices, repr(nonfinite), remedy)
    return policy
