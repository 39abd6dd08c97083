"""What does the window of a compiled step contain?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from ..network import tree
from ..network.accumulators import new_grad_sum, state
from ..numerics.nonfinite import SkipMicro
from ..numerics.sizes import Sizes
from ..ranks.group import Group
from .ends import is_full


class Outside(ops.constexpr(lambda: False, get_instance=False)):  # type: ignore[misc]
    """Notes calls outside graphs; a compiled call returns False and notes nothing."""

    called = False
    """bool, whether there was a call outside graphs."""

    def __call__(self) -> bool:
        """Note a call outside a graph."""
        self.called = True
        return True


@ms.jit_class
class GraphCounters:
    """The counters of an `Accumulator`, in the graph of a user's step.

    Args:
        name (str): the first part of its Parameters' names.
    """

    def __init__(self, name: str):
        self.updates = state(f"{name}.updates", 0, ms.int32)
        self.skipped = state(f"{name}.skipped", 0, ms.int32)
        self.updated = state(f"{name}.updated", False, ms.bool_)
        self.grad_norm = state(f"{name}.grad_norm", 0.0, ms.float32)

    def add(self, updated: Any, norm: Any, ended: Any = None) -> None:
        """Count a window that has ended; with several ranks `ended` says whether it was one."""
        skipped, now = ops.logical_not(updated), updated
        if ended is not None:
            norm, skipped = ops.where(ended, norm, self.grad_norm), ops.logical_and(ended, skipped)
            now = ops.logical_or(updated, ops.logical_and(self.updated, ops.logical_not(ended)))
        ops.assign(self.grad_norm, norm)
        ops.assign(self.updated, now)
        ops.assign_add(self.updates, ops.cast(updated, ms.int32))
        ops.assign_add(self.skipped, ops.cast(skipped, ms.int32))

    @property
    def state(self) -> dict[str, Any]:
        """dict, its Parameters by name."""
        return {name: getattr(self, name) for name in ("updates", "skipped", "updated", "grad_norm")}


@ms.jit_class
class Notes:
    """What ranks add to the sums of a window: their micro-batches, whether they flush, and requests to stop and save.

    A rank whose data are over flushes, and takes part in the windows of the others with zeros until all flush.

    Args:
        name (str): the first part of its Parameters' names.
        group (Group): the ranks.
    """

    def __init__(self, name: str, group: Group):
        self.ranks = group.size
        self.own = Parameter(Tensor(np.zeros(3), ms.float32), name=f"{name}.notes", requires_grad=False)
        """Parameter, whether this rank flushes, and its requests to stop and to save."""
        self.sums = Parameter(Tensor(np.zeros(4), ms.float32), name=f"{name}.notes_of_all", requires_grad=False)
        """Parameter, the sums over the ranks: micro-batches, and what is in `own`."""
        self.parameters = (self.own, self.sums)
        self._now = [0.0, 0.0, 0.0]

    def sent(self, micro_batches: Any) -> Any:
        """Return what this rank adds."""
        return ops.cat((ops.reshape(ops.cast(micro_batches, ms.float32), (1,)), self.own))

    def flushing(self, flushes: bool) -> None:
        """Set whether this rank flushes, on the host."""
        self._set([float(flushes), *self._now[1:]])

    def request(self, wishes: Sequence[float]) -> None:
        """Set this rank's requests to stop and to save, on the host; they are sent when the next window ends."""
        self._set([self._now[0], *wishes])

    def _set(self, own: list[float]) -> None:
        if own != self._now:
            self._now = own
            ops.assign(self.own, Tensor(own, ms.float32))

    def ended(self) -> bool:
        """Return whether any rank held micro-batches when the last sums were made."""
        return bool(self.sums.asnumpy()[0])

    def requests(self) -> list[float] | None:
        """Return all ranks' requests at the last window's end, once; None if only some ranks were in a flush."""
        _, flushing, *wishes = self.sums.asnumpy().tolist()
        if flushing not in (0, self.ranks):
            return None
        ops.assign(self.sums, Tensor(np.zeros(4), ms.float32))
        return wishes


@ms.jit_class
class _Steps:
    """Computes the size from the number of updates in a graph."""

    def __init__(self, steps: list[tuple[int, int]]):
        sizes = [0, *(size for _, size in steps)]
        self.firsts = Tensor([first for first, _ in steps], ms.float32)
        self.growth = Tensor([after - before for before, after in zip(sizes, sizes[1:])], ms.float32)

    def __call__(self, updates: Any) -> Any:
        reached = ops.cast(ops.cast(updates, ms.float32) >= self.firsts, ms.float32)
        return ops.cast(ops.sum(reached * self.growth), ms.int32)


@ms.jit_class
class GraphWindow:
    """The accumulators of an open window and its counters, in the graph of a user's step.

    Args:
        name (str): the first part of its Parameters' names.
        sizes (Sizes): the sizes of windows.
        like (Optional[Sequence]): Parameters with the accumulators' shapes. None: a window of 1 has none.
        sums (Optional[Callable]): sums gradients over the ranks before they are added.
        skips (Optional[SkipMicro]): leaves out micro-batches.
        weighs (bool): whether the weights are summed.
    """

    def __init__(
        self,
        name: str,
        sizes: Sizes,
        like: Sequence[Any] | None,
        *,
        sums: Any = None,
        skips: SkipMicro | None = None,
        weighs: bool = False,
    ):
        self.sums, self.skips = sums, skips
        self.grad_sum = None if like is None else new_grad_sum(name, like)
        self.weight_sum = None if like is None or not weighs else state(f"{name}.weight_sum", 0.0, ms.float32)
        self.size = state(f"{name}.window", sizes.of(Tensor(0, ms.int32) if sizes.function else 0), ms.int32)
        self.next_size = None if sizes.constant else sizes.function or _Steps(sizes.steps)
        self.micro_batches = state(f"{name}.micro_batches", 0, ms.int32)

    def add(self, grads: Any, weight: Any, last: Any = None) -> Any:
        """Add the gradients of a micro-batch; return whether the window ends with it: if it is full, or on `last`."""
        if self.sums is not None:
            last = ops.zeros((), ms.float32) if last is None else ops.cast(last, ms.float32)
            last = self._add_together(grads if weight is None else tree.multiply(grads, weight), 1.0, last)[1] > 0
        elif weight is None:
            tree.add(self.grad_sum, grads)
        else:
            tree.add_weighted(self.grad_sum, grads, weight)
        if self.weight_sum is not None:
            ops.assign_add(self.weight_sum, ops.cast(weight, ms.float32))
        if self.sums is None:
            ops.assign_add(self.micro_batches, 1)
            last = self.is_over() if last is None else ops.logical_or(self.is_over(), last)
        return last

    def take_part(self, nothing: Any) -> Any:
        """Add the other ranks' micro-batch, if there is one; return whether there is, and whether the window ends.

        `nothing` are zeros like a micro-batch's gradients.
        """
        adding, last = self._add_together(nothing, 0.0, ops.zeros((), ms.float32))
        return adding > 0, last > 0

    def _add_together(self, grads: Any, adds: float, last: Any) -> Any:
        """Add the sum over the ranks; return how many ranks add a micro-batch, and for how many it ends the window."""
        full = ops.cast(is_full(self.micro_batches + 1, self.size), ms.float32)
        grads, others = self.sums(grads, (ops.stack((Tensor(adds, ms.float32), adds * full + last)),))
        tree.add(self.grad_sum, grads)
        ops.assign_add(self.micro_batches, ops.cast(others[0][0] > 0, ms.int32))
        return others[0][0], others[0][1]

    def is_over(self) -> Any:
        """Return whether the window is full."""
        return is_full(self.micro_batches, self.size)

    def begin(self, updates: Any) -> None:
        """Begin the window after this number of updates."""
        self.clear()
        if self.next_size is not None:
            ops.assign(self.size, ops.cast(self.next_size(updates), ms.int32))

    def resize(self, window: int, *, alone: bool) -> None:
        """Change the size between windows; `alone`: in a single process, where windows of 1 have no accumulators."""
        held = int(self.micro_batches.asnumpy())
        if held:
            raise RuntimeError(
                f"For 'Accumulator', 'accumulate_step' can't change inside a window, which holds {held} micro-batches. "
                "Call 'flush()' or 'clear()' first."
            )
        if self.next_size is not None:
            raise ValueError("For 'Accumulator', 'accumulate_step' can't be set: it is defined by the update.")
        if alone and (window > 1) != (self.grad_sum is not None):
            raise ValueError("For 'Accumulator', 'accumulate_step' can't change from or to 1. Use a new Accumulator.")
        ops.assign(self.size, Tensor(window, ms.int32))  # a compiled graph does not see set_data

    def clear(self) -> None:
        """Discard the micro-batches."""
        tree.clear(self.grad_sum)
        if self.skips is not None:
            self.skips.clear()
        ops.assign(self.micro_batches, Tensor(0, ms.int32))
        if self.weight_sum is not None:
            ops.assign(self.weight_sum, Tensor(0.0, ms.float32))

    def sums_by(self, names: Sequence[str]) -> dict[str, Any]:
        """Return the sums by name; accumulators are named after their parameters."""
        if self.grad_sum is None:
            return {}
        held = {f"grad_sum.{name}": total for name, total in zip(names, self.grad_sum)}
        return held if self.weight_sum is None else {**held, "weight_sum": self.weight_sum}
