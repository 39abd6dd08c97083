"""How gradients are summed over the ranks, and which elements of a sum each rank stores."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from .. import _check
from ..network import tree
from ..network.optimizers import inner_of, is_sharded
from .group import Group

# Gradients are sent in pieces of at most this number of elements (64 MiB), unless one gradient is larger.
_PIECE = 2**24


class Part:
    """A rank's slice of the flattened parameter, padded with zeros so that all slices have the same size.

    Args:
        parameter (Parameter): the full parameter.
        rank (int): the rank that stores this slice.
        ranks (int): the number of ranks.
    """

    def __init__(self, parameter: Parameter, rank: int, ranks: int):
        self.shape = parameter.shape
        self.full_size = parameter.size
        self.ranks = ranks
        self.size = -(-self.full_size // ranks)
        self.start = min(self.full_size, rank * self.size)
        self.stop = min(self.full_size, self.start + self.size)
        self.padding = self.size - (self.stop - self.start)

    def extract(self, array: np.ndarray) -> np.ndarray:
        """Return this part of an array."""
        return np.pad(array.ravel()[self.start : self.stop], (0, self.padding))


def part_of(tensor: Tensor, part: Part) -> Tensor:
    """Return this part of a tensor, in a graph. A tensor that is already a part is returned unchanged."""
    if tensor.shape == (part.size,):
        return tensor
    return _padded(tree.columns(ops.reshape(tensor, (-1,)), part.start, part.stop), part.padding)


def parts_of(tensor: Tensor, part: Part) -> Tensor:
    """Return the parts of all ranks, one per row, in a graph."""
    padding = part.ranks * part.size - part.full_size
    return ops.reshape(_padded(ops.reshape(tensor, (-1,)), padding), (part.ranks, part.size))


def full_of(rows: Tensor, part: Part) -> Tensor:
    """Return the full tensor that consists of these parts, in a graph."""
    return ops.reshape(tree.columns(ops.reshape(rows, (-1,)), 0, part.full_size), part.shape)


def _padded(row: Tensor, padding: int) -> Tensor:
    return ops.cat((row, ops.zeros((padding,), row.dtype))) if padding else row


@ms.jit_class
class WholeSums:
    """All-reduce: sum gradients and other tensors over the ranks; every rank gets all sums.

    Args:
        parameters (Sequence[Parameter]): Parameters with the gradients' shapes.
        group (Group): the ranks.
        kernels (Union[Kernels, NativeKernels]): measure gradients.
    """

    in_place = False
    """bool, whether it returns the accumulators themselves."""

    def __init__(self, parameters: Sequence[Parameter], group: Group, kernels: Any):
        self.kernels = kernels
        self.all_reduce = group.collective(ops.AllReduce)
        self.pieces = pieces([parameter.size for parameter in parameters], _PIECE)

    def __call__(self, gradients: tuple, others: tuple = ()) -> Any:
        """Return the sums of the gradients and of the other tensors, which are sent with the last piece."""
        summed: Any = ()
        for start, stop in self.pieces[:-1]:
            # One after the other, because all ranks must send in the same order.
            summed = summed + _sum(self.all_reduce, ops.depend(gradients[start:stop], summed))
        start = self.pieces[-1][0]
        last = _sum(self.all_reduce, ops.depend(gradients[start:] + others, summed))
        number = len(gradients) - start
        return summed + last[:number], last[number:]

    def norm(self, gradients: tuple, after: Any) -> Tensor:
        """Return the global norm of the sums. Nothing is sent, so `after` is ignored."""
        return self.kernels.norm(gradients, after)


@ms.jit_class
class PartSums:
    """Reduce-scatter: sum gradients so that each rank gets its parts of the sums; other tensors are all-reduced.

    Args:
        parts (Sequence[Part]): this rank's part of each gradient.
        group (Group): the ranks.
        kernels (Union[Kernels, NativeKernels]): measure gradients.
    """

    in_place = False

    def __init__(self, parts: Sequence[Part], group: Group, kernels: Any):
        self.kernels = kernels
        self.parts = tuple(parts)
        self.rank = group.rank
        self.all_reduce = group.collective(ops.AllReduce)
        # MindSpore's CPU has no ReduceScatter: there all sums are computed, and parts of other ranks are discarded.
        self.reduce_scatter = None
        if ms.get_context("device_target") != "CPU":
            self.reduce_scatter = group.collective(ops.ReduceScatter)
        self.pieces = pieces([part.full_size for part in parts], _PIECE)

    def __call__(self, gradients: tuple, others: tuple = ()) -> Any:
        """Return this rank's parts of the gradients' sums, and the sums of the other tensors."""
        sums: Any = ()
        for start, stop in self.pieces:
            sums = sums + self._own_parts(ops.depend(gradients[start:stop], sums), self.parts[start:stop])
        return sums, _sum(self.all_reduce, ops.depend(others, sums)) if others else ()

    def _own_parts(self, gradients: tuple, parts: tuple) -> tuple:
        rows = ops.cat([parts_of(ops.cast(grad, ms.float32), part) for grad, part in zip(gradients, parts)], 1)
        row = self.all_reduce(rows)[self.rank] if self.reduce_scatter is None else self.reduce_scatter(rows)[0]
        sums: Any = ()
        start = 0
        for part in parts:
            sums = (*sums, tree.columns(row, start, start + part.size))
            start += part.size
        return sums

    def norm(self, gradients: tuple, after: Any) -> Tensor:
        """Return the global norm over the parts of all ranks; its communication follows that of `after`."""
        squares = ops.reshape(self.kernels.sum_of_squares(gradients), (1,))
        return ops.sqrt(self.all_reduce(ops.depend(squares, after))[0])


@ms.jit_class
class SumsAlready:
    """Sums only the other tensors: the accumulators already contain sums of gradients over the ranks.

    Args:
        sums (Union[WholeSums, PartSums]): the object that made these sums.
    """

    in_place = True

    def __init__(self, sums: WholeSums | PartSums):
        self.sums = sums

    def __call__(self, gradients: tuple, others: tuple) -> tuple:
        """Return the gradients unchanged, and the sums of the other tensors."""
        return gradients, _sum(self.sums.all_reduce, ops.depend(others, gradients))

    def norm(self, gradients: tuple, after: Any) -> Tensor:
        """Return the global norm of the sums."""
        return self.sums.norm(gradients, after)


@ms.jit_class
class SumOverRanks:
    """Sums a window over the ranks: the first stage of its end, see `engine.boundary.End`.

    All ranks call it with the same values given, in a step and in a flush alike.

    Args:
        sums (Union[WholeSums, PartSums, SumsAlready]): sums gradients and other tensors.
    """

    def __init__(self, sums: Any):
        self.sums = sums

    def __call__(self, end: Any) -> Any:
        weight, losses, counts = end["weight"], end["losses"], end["skip_counts"]
        others: Any = (
            Tensor(0.0, ms.float32) if weight is None else weight,
            Tensor([0.0], ms.float32) if losses is None else losses,
        )
        others = others if counts is None else (*others, counts)
        gradients, others = self.sums(end["gradients"], others)
        end["gradients"] = gradients
        end["losses"] = others[1]
        if weight is not None:
            end["weight"] = others[0]
        if counts is not None:
            end["skip_counts"] = others[2]
        return end


def _sum(all_reduce: Any, tensors: tuple) -> tuple:
    return tree.unflattened(all_reduce(tree.flattened(tensors)), tensors)


class Summing(NamedTuple):
    """When gradients are summed over the ranks, and the shapes of the accumulators."""

    of_micro_batch: Any
    """Sums the gradients of a micro-batch before they are added; None if they are summed once per window."""
    at_the_end: Any
    """Sums the gradients of a window; None in a single process."""
    like: Any
    """Parameters with the accumulators' shapes."""


def summing(owner: str, optimizer: Any, group: Any, every_micro_batch: bool, kernels: Any) -> Summing:
    """Return how gradients are summed over the ranks of a group, for this optimizer.

    A `ZeroOptimizer` needs only its parts of the sums.
    """
    _check.instance(owner, "sync_every_micro_batch", every_micro_batch, bool, "a bool")
    like = optimizer.parameters
    sharded = is_sharded(optimizer)
    if sharded and group != optimizer.group:
        rule = f"that of the ZeroOptimizer, {optimizer.group}, which gathers its updates"
        _check.raise_invalid(ValueError, owner, "group", rule, group)
    if group is None:
        return Summing(None, None, like)
    sums = PartSums(optimizer.parts, group, kernels) if sharded else WholeSums(like, group, kernels)
    if not every_micro_batch:
        return Summing(None, sums, like)
    return Summing(sums, SumsAlready(sums), inner_of(optimizer).parameters if sharded else like)


def pieces(sizes: Sequence[int], limit: int) -> tuple[tuple[int, int], ...]:
    """Split tensors into pieces within the limit; return each piece's first index and the index after its last."""
    stops = []
    total = 0
    for number, size in enumerate(sizes):
        if total and total + size > limit:
            stops.append(number)
            total = 0
        total += size
    return tuple(zip([0, *stops], [*stops, len(sizes)]))
