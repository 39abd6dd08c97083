"""A window that ends inside the graph of a user's step: it counts its micro-batches there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, ops

from .. import _check
from ..network import tree
from ..network.branch import branch
from ..network.compiled import Compiled
from ..network.state import state
from ..ranks.agreement import check_drift
from ..ranks.group import Group
from .config import WindowConfig
from .ema import check_not_applied
from .ends import Sizes, is_full
from .window import Window, new_window


class Outside(ops.constexpr(lambda: False, get_instance=False)):  # type: ignore[misc]
    """Notes calls outside graphs; a compiled call returns False and notes nothing."""

    called = False
    """bool, whether there was a call outside graphs."""

    def __call__(self) -> bool:
        """Note a call outside a graph."""
        self.called = True
        return True


@ms.jit_class
class RankStatus:
    """What ranks add to the sums of a window: their micro-batches, whether they flush, and requests to stop and save.

    A rank whose data are over flushes, and takes part in the windows of the others with zeros until all flush.

    Args:
        name (str): the first part of its Parameters' names.
        group (Group): the ranks.
    """

    def __init__(self, name: str, group: Group):
        self.ranks = group.size
        self.own = state(f"{name}.rank_status", np.zeros(3), ms.float32)
        """Parameter, whether this rank flushes, and its requests to stop and to save."""
        self.sums = state(f"{name}.rank_status_sums", np.zeros(4), ms.float32)
        """Parameter, the sums over the ranks: micro-batches, and what is in `own`."""
        self.parameters = (self.own, self.sums)
        self._sent = [0.0, 0.0, 0.0]  # the value of `own`

    def sent(self, micro_batches: Any) -> Any:
        """Return what this rank adds."""
        return ops.cat((ops.reshape(ops.cast(micro_batches, ms.float32), (1,)), self.own))

    def flushing(self, flushes: bool) -> None:
        """Set whether this rank flushes, on the host."""
        self._set([float(flushes), *self._sent[1:]])

    def request(self, requests: Sequence[float]) -> None:
        """Set this rank's requests to stop and to save, on the host; they are sent when the next window ends."""
        self._set([self._sent[0], *requests])

    def _set(self, own: list[float]) -> None:
        if own != self._sent:
            self._sent = own
            ops.assign(self.own, Tensor(own, ms.float32))

    def ended(self) -> bool:
        """Return whether any rank held micro-batches when the last sums were made."""
        return bool(self.sums.asnumpy()[0])

    def requests(self) -> list[float] | None:
        """Return the ranks' requests at the last window's end, once; None if only some of the ranks flushed."""
        _, flushing, *requests = self.sums.asnumpy().tolist()
        if flushing not in (0, self.ranks):
            return None
        ops.assign(self.sums, Tensor(np.zeros(4), ms.float32))
        return requests


@ms.jit_class
class _SizeBySteps:
    """Computes the size of a window from the number of updates before it, in a graph."""

    def __init__(self, steps: list[tuple[int, int]]):
        sizes = [0, *(size for _, size in steps)]
        self.firsts = Tensor([first for first, _ in steps], ms.float32)
        self.growth = Tensor([size - previous for previous, size in zip(sizes, sizes[1:])], ms.float32)

    def __call__(self, updates: Any) -> Any:
        reached = ops.cast(ops.cast(updates, ms.float32) >= self.firsts, ms.float32)
        return ops.cast(ops.sum(reached * self.growth), ms.int32)


@ms.jit_class
class GraphWindow:
    """A `Window` with counters in the graph, which end it when it is full.

    Args:
        name (str): the first part of its Parameters' names.
        config (WindowConfig): what the window works with.
        sizes (Sizes): the sizes of windows.
        size_argument (Argument): the class and the argument that set them, for error messages.
    """

    def __init__(self, name: str, config: WindowConfig, sizes: Sizes, size_argument: _check.Argument):
        self.config = config
        self._size_argument = size_argument
        self.group = config.group
        self.weighted = config.weighted
        self.parameters = config.parameters
        self.scale = config.scale if config.dynamic is None else config.dynamic.value
        """Union[float, Parameter], the loss scale."""
        self.rank_status = None if self.group is None else RankStatus(name, self.group)
        """Optional[RankStatus], what ranks send with the sums of a window; None for a single process."""
        touched = () if self.rank_status is None else self.rank_status.parameters
        # A window of 1 needs no accumulators in a single process with dense gradients.
        at_once = sizes.constant == 1 and self.group is None and not config.sparse
        self.sums = Window(config, None) if at_once else new_window(name, config, touched=touched)
        self.sizes = sizes
        self.next_size = None if sizes.constant else sizes.function or _SizeBySteps(sizes.steps)
        self.size = state(f"{name}.window", sizes.size_after(Tensor(0, ms.int32) if sizes.function else 0), ms.int32)
        """Parameter, the number of micro-batches in a full window."""
        self.micro_batches = state(f"{name}.micro_batches", 0, ms.int32)
        """Parameter, the number of micro-batches in the open window."""
        self.updates = state(f"{name}.updates", 0, ms.int32)
        """Parameter, the number of updates so far."""
        self.skipped = state(f"{name}.skipped", 0, ms.int32)
        """Parameter, the number of windows so far without an update."""
        self.updated = state(f"{name}.updated", False, ms.bool_)
        """Parameter, whether the last micro-batch ended a window and updated the parameters."""
        self.grad_norm = state(f"{name}.grad_norm", 0.0, ms.float32)
        """Parameter, the norm of the last window's gradient, before clipping."""
        self.outside = Outside()
        self.compiles = config.compiles
        """bool, whether calls outside of graphs are compiled."""
        self.through_branch = branch(self.compiles)
        self._end_compiled = _End(size_argument.owner, self)
        self._take_part_compiled = _TakePart(size_argument.owner, self)

    def add(self, gradients: Any, weight: Any = None, kept_factor: Any = None, sparse: bool = False) -> Any:
        """Add a micro-batch, and end the window if it is full; return whether the parameters were updated."""
        if not self.sums.has_sums:
            return self._closed_at_once(gradients, weight, kept_factor, None)
        updated = Tensor(False)
        if self.sums.boundary.touch(self._add(gradients, weight, kept_factor, None, sparse)):
            updated = self.end()
        ops.assign(self.updated, updated)
        return updated

    # For calls where the host can compute whether a micro-batch fills the window: graphs without a branch run faster.

    def add_inside(self, gradients: Any, weight: Any, kept_factor: Any) -> Any:
        """Add a micro-batch with which the window is not full; return False."""
        updated = ops.depend(Tensor(False), self._add(gradients, weight, kept_factor, None))
        ops.assign(self.updated, updated)
        return updated

    def add_last(self, gradients: Any, weight: Any, kept_factor: Any) -> Any:
        """Add the micro-batch with which the window is full, and end it; return whether the parameters were updated."""
        added = self._add(gradients, weight, kept_factor, None)
        return ops.depend(self.end(), added)  # without a use of its result MindSpore leaves the call out

    def add_with(self, scalars: Any, gradients: Any, weight: Any, kept_factor: Any, last: Any) -> Any:
        """Add a micro-batch, with scalars to sum over the ranks; end the window if it is full, or if `last` is true.

        Returns:
            tuple[Tensor], whether the window ended, and the scalars, summed if it ended.
        """
        if not self.sums.has_sums:
            return ops.depend(Tensor(True), self._closed_at_once(gradients, weight, kept_factor, scalars)), scalars
        updated = Tensor(False)
        ends = self._add(gradients, weight, kept_factor, last)
        if self.sums.boundary.touch(ends):
            updated, scalars = self.end_with(scalars)
        ops.assign(self.updated, updated)
        return ends, scalars

    # Two of each: on CPU, with ms.jit in PyNative mode, a branch whose result contained a tuple with a None ended in
    # SIGSEGV some windows later (MindSpore 2.10).

    def end(self) -> Any:
        """End the window and begin the next; return whether the parameters were updated."""
        updated = self._count(self.sums.close(None, self._sent()))
        self._begin_next()
        return updated

    def end_with(self, scalars: Any) -> Any:
        """End the window and begin the next; return whether the parameters were updated, and the summed scalars."""
        closed = self.sums.close(scalars, self._sent())
        updated = self._count(closed)
        self._begin_next()
        return updated, closed[2]

    def _closed_at_once(self, gradients: Any, weight: Any, kept_factor: Any, scalars: Any) -> Any:
        """End a window of one micro-batch, which has no accumulators."""
        gradients = gradients if kept_factor is None else tree.multiply_no_nan(gradients, kept_factor)
        weight = None if weight is None else ops.cast(weight, ms.float32)
        updated, norm = self.sums.close_at_once(gradients, weight, scalars)[:2]
        return self._count((updated, norm if self.through_branch is None else self.through_branch(norm)))

    def _sent(self) -> Any:
        return None if self.rank_status is None else self.rank_status.sent(self.micro_batches)

    def _begin_next(self) -> None:
        ops.assign(self.micro_batches, Tensor(0, ms.int32))
        if self.next_size is not None:
            ops.assign(self.size, ops.cast(self.next_size(self.updates), ms.int32))

    def _add(self, gradients: Any, weight: Any, kept_factor: Any, last: Any, sparse: bool = False) -> Any:
        """Add a micro-batch; return whether the window ends with it."""
        if self.sums.sum_over_ranks is not None:
            last = ops.zeros((), ms.float32) if last is None else ops.cast(last, ms.float32)
            return self._add_together(gradients, weight, kept_factor, 1.0, last)[1] > 0
        added = self.sums.add(gradients, weight, kept_factor=kept_factor, sparse=sparse)
        ops.assign_add(self.micro_batches, ops.depend(Tensor(1, ms.int32), added))
        full = is_full(self.micro_batches, self.size)
        return full if last is None else ops.logical_or(full, last)

    def _add_together(self, gradients: Any, weight: Any, kept_factor: Any, adds: float, last: Any) -> Any:
        """Add the sum over the ranks; return how many ranks add a micro-batch, and for how many it ends the window."""
        full = ops.cast(is_full(self.micro_batches + 1, self.size), ms.float32)
        own_counts = ops.stack((Tensor(adds, ms.float32), adds * full + last))
        counts = self.sums.add(gradients, weight, (own_counts,), kept_factor)[0]
        ops.assign_add(self.micro_batches, ops.cast(counts[0] > 0, ms.int32))
        return counts[0], counts[1]

    def _count(self, closed: Any) -> Any:
        """Count a window that has ended; return whether the parameters were updated."""
        updated, norm = closed[0], closed[1]
        skipped, last_updated = ops.logical_not(updated), updated
        if self.rank_status is not None:
            ended = closed[3][0] > 0  # with several ranks: whether any of them held micro-batches
            ops.assign(self.rank_status.sums, closed[3])
            norm, skipped = ops.where(ended, norm, self.grad_norm), ops.logical_and(ended, skipped)
            last_updated = ops.logical_or(updated, ops.logical_and(self.updated, ops.logical_not(ended)))
        ops.assign(self.grad_norm, norm)
        ops.assign(self.updated, last_updated)
        ops.assign_add(self.updates, ops.cast(updated, ms.int32))
        ops.assign_add(self.skipped, ops.cast(skipped, ms.int32))
        return updated

    def take_part(self, scalars: Any) -> Any:
        """Add zeros to the other ranks' micro-batch; return whether there was one, and whether it updated."""
        counted = self._add_together(self.sums.zeros(), None, None, 0.0, ops.zeros((), ms.float32))
        updated = Tensor(False)
        if self.sums.boundary.touch(counted[1] > 0):
            updated = self.end() if scalars is None else self.end_with(scalars)[0]
        return counted[0] > 0, updated

    def end_either(self, scalars: Any) -> Any:
        """End the window, with scalars or without; return whether the parameters were updated."""
        return self.end() if scalars is None else self.end_with(scalars)[0]

    # What follows is for the host.

    def fills_up(self) -> bool | None:
        """Return whether the window is full with one more micro-batch; None if only the graph can compute it."""
        if not self.sums.has_sums or self.sums.sum_over_ranks is not None:
            return None
        return is_full(int(self.micro_batches.asnumpy()) + 1, int(self.size.asnumpy()))

    def flush(self, scalars: Any = None) -> bool:
        """End an open window early; return whether the parameters were updated. `scalars` is what `add` would get.

        With several ranks, take part in the windows of the others until all flush.
        """
        if self.rank_status is None and not int(self.micro_batches.asnumpy()):
            return False
        check_not_applied("flush", self.config.ema)
        if self.rank_status is None:
            return self._end_now(scalars)
        self.rank_status.flushing(True)
        try:
            if self.sums.sum_over_ranks is not None:
                return self._flush_micro_batches(scalars)
            return self._flush_windows(self.rank_status, scalars)
        except RuntimeError as error:
            if "AllReduce" not in str(error):
                raise
            reason = "another rank did not take part. Call 'flush' on all ranks, the same number of times"
            raise RuntimeError(f"For 'flush', {reason}.") from error
        finally:
            self.rank_status.flushing(False)

    def _flush_windows(self, rank_status: RankStatus, scalars: Any) -> bool:
        """End windows together until no rank holds a micro-batch: first this rank's own, then those of the others."""
        any_updated = False
        while True:
            updated = self._end_now(scalars)
            if not rank_status.ended():
                return any_updated
            any_updated = any_updated or updated
            scalars = None if scalars is None else ops.zeros_like(scalars)

    def _flush_micro_batches(self, scalars: Any) -> bool:
        """Take part in the other ranks' micro-batches until no rank adds one, then end the open window together."""
        updates_before = int(self.updates.asnumpy())
        while self._take_part_now(scalars):
            if scalars is not None and not int(self.micro_batches.asnumpy()):  # a window has ended
                scalars = ops.zeros_like(scalars)
        self._end_now(scalars)
        return int(self.updates.asnumpy()) > updates_before

    def _end_now(self, scalars: Any) -> bool:
        """End the window in the way in which the step ends windows; return whether the parameters were updated."""
        return bool((self.end_either if self._runs_outside else self._end_compiled)(scalars))

    def _take_part_now(self, scalars: Any) -> bool:
        """Take part in the other ranks' micro-batch in the same way; return whether there was one."""
        return bool((self.take_part if self._runs_outside else self._take_part_compiled)(scalars)[0])

    @property
    def _runs_outside(self) -> bool:
        """bool, whether the step runs outside of graphs.

        In PyNative mode an optimizer of `mindspore.experimental` that has run outside a graph can't be compiled into
        one any more.
        """
        return self.outside.called and not self.compiles

    def clear(self) -> None:
        """Discard an open window."""
        if int(self.micro_batches.asnumpy()):
            ops.assign(self.micro_batches, ops.depend(Tensor(0, ms.int32), self.sums.clear()))

    def check_drift(self) -> None:
        """Raise an error if the trained weights, the learning rates or the window sizes of ranks are not equal."""
        if self.group is not None:
            owner, argument = self._size_argument
            size = {f"'{argument}'": int(self.size.asnumpy())}
            check_drift(owner, self.group, self.parameters, self.config.optimizer, size)

    def resize(self, size: int) -> None:
        """Change the size between windows."""
        owner, argument = self._size_argument
        micro_batches = int(self.micro_batches.asnumpy())
        if micro_batches:
            raise RuntimeError(
                f"For '{owner}', '{argument}' can't change inside a window, which holds "
                f"{_check.quantity(micro_batches, 'micro-batch')}. Call 'flush()' or 'clear()' first."
            )
        if self.next_size is not None:
            raise ValueError(f"For '{owner}', '{argument}' can't be set: it is defined by the update.")
        if self.group is None and (size > 1) != self.sums.has_sums:
            raise ValueError(f"For '{owner}', '{argument}' can't change from or to 1. Use a new {owner}.")
        ops.assign(self.size, Tensor(size, ms.int32))  # a compiled graph does not see set_data

    @property
    def settings(self) -> dict[str, Any]:
        """dict, the settings that must be equal in a resumed run."""
        return {
            "accumulate_step": int(self.size.asnumpy()) if self.sizes.constant else self.sizes.settings,
            "reduction": "mean" if self.config.weighted else "sum",
            **self.config.settings,
        }

    @property
    def state(self) -> dict[str, Any]:
        """dict, its Parameters by name; with several ranks without the sums, because they save between windows only."""
        parameters = {name: getattr(self, name) for name in ("size", "micro_batches", *_COUNTERS)}
        parameters |= self.config.state
        sums = self.sums.state
        if self.group is not None:
            sums = {name: parameter for name, parameter in sums.items() if name == "counts"}
        return {**parameters, **sums}


_COUNTERS = ("updates", "skipped", "updated", "grad_norm")


class _End(Compiled):
    """Ends a window outside the user's step. A Cell, because a graph of `ms.jit` does not see weights loaded later."""

    def __init__(self, owner: str, window: GraphWindow):
        super().__init__(owner, True, window.config.optimizer)
        self.window = window

    def construct(self, scalars: Any) -> Any:
        return self.window.end_either(scalars)


class _TakePart(Compiled):
    """Takes part in the other ranks' micro-batch outside the user's step."""

    def __init__(self, owner: str, window: GraphWindow):
        super().__init__(owner, True, window.config.optimizer)
        self.window = window

    def construct(self, scalars: Any) -> Any:
        return self.window.take_part(scalars)
