"""How are gradients summed over the ranks, and which rank stores which sums?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import ops

from .. import _check
from ..network import checks, tree
from .parallel import Group, group_of
from .parts import parts_of

# Gradients are sent in pieces of at most this number of elements (64 MiB), unless one gradient is larger.
_PIECE = 2**24


@ms.jit_class
class WholeSums:
    """All-reduce: sum gradients and other tensors over the ranks; every rank gets all sums.

    Args:
        parameters (Sequence[Parameter]): Parameters with the gradients' shapes.
    """

    in_place = False
    """bool, whether it returns the accumulators themselves."""

    def __init__(self, parameters: Sequence[Any]):
        self.all_reduce = ops.AllReduce()
        self.pieces = pieces([parameter.size for parameter in parameters], _PIECE)

    def __call__(self, gradients: Any, others: Any = ()) -> Any:
        """Return the sums of the gradients and of the other tensors, which are sent with the last piece."""
        summed: Any = ()
        for first, behind in self.pieces[:-1]:
            # One after the other, because all ranks must send in the same order.
            summed = summed + _sum(self.all_reduce, ops.depend(gradients[first:behind], summed))
        first = self.pieces[-1][0]
        last = _sum(self.all_reduce, ops.depend(gradients[first:] + others, summed))
        number = len(gradients) - first
        return summed + last[:number], last[number:]

    def norm(self, gradients: Any, after: Any) -> Any:
        """Return the global norm of the sums. Nothing is sent, so `after` is ignored."""
        return tree.global_norm(gradients)


@ms.jit_class
class PartSums:
    """Reduce-scatter: sum gradients so that each rank gets its parts of the sums; other tensors are all-reduced.

    Args:
        parts (Sequence[Part]): this rank's part of each gradient.
        group (Group): the ranks.
    """

    in_place = False

    def __init__(self, parts: Sequence[Any], group: Group):
        self.parts, self.rank = tuple(parts), group.rank
        self.all_reduce = ops.AllReduce()
        # MindSpore's CPU has no ReduceScatter: there all sums are computed, and parts of other ranks are discarded.
        self.reduce_scatter = None if ms.get_context("device_target") == "CPU" else ops.ReduceScatter()
        self.pieces = pieces([part.whole for part in parts], _PIECE)

    def __call__(self, gradients: Any, others: Any = ()) -> Any:
        """Return this rank's parts of the gradients' sums, and the sums of the other tensors."""
        kept: Any = ()
        for first, behind in self.pieces:
            kept = kept + self._kept(ops.depend(gradients[first:behind], kept), self.parts[first:behind])
        return kept, _sum(self.all_reduce, ops.depend(others, kept)) if others else ()

    def _kept(self, gradients: Any, parts: Any) -> Any:
        rows = ops.cat([parts_of(ops.cast(each, ms.float32), part) for each, part in zip(gradients, parts)], 1)
        row = self.all_reduce(rows)[self.rank] if self.reduce_scatter is None else self.reduce_scatter(rows)[0]
        kept: Any = ()
        first = 0
        for part in parts:
            kept = (*kept, tree.stretch(row, first, first + part.size))
            first += part.size
        return kept

    def norm(self, gradients: Any, after: Any) -> Any:
        """Return the global norm over the parts of all ranks; its communication follows that of `after`."""
        squares = ops.reshape(tree.sum_of_squares(gradients), (1,))
        return ops.sqrt(self.all_reduce(ops.depend(squares, after))[0])


@ms.jit_class
class SumsAlready:
    """Sum only the other tensors: the accumulators already hold sums of gradients over the ranks.

    Args:
        sums (Union[WholeSums, PartSums]): the object that made these sums.
    """

    in_place = True

    def __init__(self, sums: WholeSums | PartSums):
        self.sums = sums

    def __call__(self, gradients: Any, others: Any) -> Any:
        """Return the gradients unchanged, and the sums of the other tensors."""
        return gradients, _sum(self.sums.all_reduce, ops.depend(others, gradients))

    def norm(self, gradients: Any, after: Any) -> Any:
        """Return the global norm of the sums."""
        return self.sums.norm(gradients, after)


def _sum(all_reduce: Any, tensors: Any) -> Any:
    return tree.unflattened(all_reduce(tree.flattened(tensors)), tensors)


class Summing(NamedTuple):
    """When gradients are summed over the ranks, and the shapes of the accumulators."""

    of_micro_batch: Any
    """Sums the gradients of a micro-batch before they are added; None if they are summed once per window."""
    at_the_end: Any
    """Sums the gradients of a window; None in a single process."""
    like: Any
    """Parameters with the accumulators' shapes."""


def summing(owner: str, optimizer: Any, group: Any, every_micro_batch: bool) -> Summing:
    """Return how gradients are summed over `group`, the user's argument, for this optimizer.

    A `ZeroOptimizer` needs only its parts of the sums.
    """
    _check.instance(owner, "sync_every_micro_batch", every_micro_batch, bool, "a bool")
    group, like = group_of(owner, group), optimizer.parameters
    sharded = checks.is_sharded(optimizer)
    if sharded and group is None:
        _check.refuse(ValueError, owner, "group", "that of the ZeroOptimizer, which gathers its updates", None)
    if group is None:
        return Summing(None, None, like)
    sums = PartSums(optimizer.parts, optimizer.group) if sharded else WholeSums(like)
    if not every_micro_batch:
        return Summing(None, sums, like)
    return Summing(sums, SumsAlready(sums), checks.inner_of(optimizer).parameters if sharded else like)


def pieces(sizes: Sequence[int], limit: int) -> tuple:
    """Split tensors into pieces within the limit; return each piece's first index and the index after its last."""
    found, first, held = [], 0, 0
    for number, size in enumerate(sizes):
        if held and held + size > limit:
            found.append((first, number))
            first, held = number, 0
        held += size
    return (*found, (first, len(sizes)))
