"""How are gradients summed over the ranks, and who keeps which of the sums?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms
from mindspore import ops

from . import _check, _tree
from ._parts import parts_of
from .parallel import Group, group_of

# Gradients are sent in as few pieces as there are of this many elements: 64 MiB.
_PIECE = 2**24


@ms.jit_class
class WholeSums:
    """Sum gradients, and with them whatever else is to be summed; every rank has all sums.

    Args:
        parameters (Sequence[Parameter]): have the gradients' shapes.
    """

    in_place = False
    """bool, whether what it returns are the accumulators themselves."""

    def __init__(self, parameters: Sequence[Any]):
        self.all_reduce = ops.AllReduce()
        self.pieces = pieces([parameter.size for parameter in parameters], _PIECE)

    def __call__(self, gradients: Any, others: Any = ()) -> Any:
        """Return the sums of the gradients, and of the other tensors; these go with the last piece."""
        summed: Any = ()
        for first, behind in self.pieces[:-1]:
            # One after the other: ranks must send them in one order.
            summed = summed + _sum(self.all_reduce, ops.depend(gradients[first:behind], summed))
        first = self.pieces[-1][0]
        last = _sum(self.all_reduce, ops.depend(gradients[first:] + others, summed))
        number = len(gradients) - first
        return summed + last[:number], last[number:]

    def norm(self, gradients: Any, after: Any) -> Any:
        """Return the global norm of what it has summed; there is nothing to send, before or after anything."""
        return _tree.global_norm(gradients)


@ms.jit_class
class PartSums:
    """Sum gradients, of which every rank keeps its parts; what else is to be summed every rank has.

    Args:
        parts (Sequence[Part]): this rank's, of each gradient.
        group (Group): the ranks.
    """

    in_place = False

    def __init__(self, parts: Sequence[Any], group: Group):
        self.parts, self.rank = tuple(parts), group.rank
        self.all_reduce = ops.AllReduce()
        # MindSpore's CPU has none: there all sums are made, and the others' thrown away.
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
            kept = (*kept, _tree.stretch(row, first, first + part.size))
            first += part.size
        return kept

    def norm(self, gradients: Any, after: Any) -> Any:
        """Return the global norm of all parts on all ranks. They are asked for it once they have sent `after`."""
        squares = ops.reshape(_tree.sum_of_squares(gradients), (1,))
        return ops.sqrt(self.all_reduce(ops.depend(squares, after))[0])


@ms.jit_class
class SumsAlready:
    """Sum what else there is to sum: the accumulators hold sums of gradients over the ranks.

    Args:
        sums (Union[WholeSums, PartSums]): has made them.
    """

    in_place = True

    def __init__(self, sums: WholeSums | PartSums):
        self.sums = sums

    def __call__(self, gradients: Any, others: Any) -> Any:
        """Return the gradients as they are, and the sums of the other tensors."""
        return gradients, _sum(self.sums.all_reduce, ops.depend(others, gradients))

    def norm(self, gradients: Any, after: Any) -> Any:
        """Return the global norm of the sums."""
        return self.sums.norm(gradients, after)


def _sum(all_reduce: Any, tensors: Any) -> Any:
    return _tree.unflattened(all_reduce(_tree.flattened(tensors)), tensors)


class Summing(NamedTuple):
    """When gradients are summed over the ranks, and what the accumulators hold."""

    of_micro_batch: Any
    """Sums a micro-batch's before they are added; None."""
    at_the_end: Any
    """Sums a window's; None in a process alone."""
    like: Any
    """The Parameters that have the accumulators' shapes."""


def summing(owner: str, optimizer: Any, group: Any, every_micro_batch: bool) -> Summing:
    """Return how it is done for an optimizer, over the argument `group`.

    An optimizer whose state is dealt out needs no more than its parts of the sums.
    """
    _check.instance(owner, "sync_every_micro_batch", every_micro_batch, bool, "a bool")
    group, like = group_of(owner, group), optimizer.parameters
    dealt_out = _check.is_dealt_out(optimizer)
    if dealt_out and group is None:
        _check.refuse(ValueError, owner, "group", "that of the ZeroOptimizer, which gathers what it updates", None)
    if group is None:
        return Summing(None, None, like)
    sums = PartSums(optimizer.parts, optimizer.group) if dealt_out else WholeSums(like)
    if not every_micro_batch:
        return Summing(None, sums, like)
    return Summing(sums, SumsAlready(sums), _check.inner_of(optimizer).parameters if dealt_out else like)


def pieces(sizes: Sequence[int], limit: int) -> tuple:
    """Return the first, and the one behind the last, of each piece's tensors: as many as stay within the limit."""
    found, first, held = [], 0, 0
    for number, size in enumerate(sizes):
        if held and held + size > limit:
            found.append((first, number))
            first, held = number, 0
        held += size
    return (*found, (first, len(sizes)))
