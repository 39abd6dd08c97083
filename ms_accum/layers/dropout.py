"""Dropout whose masks are the same in a resumed run."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any, NamedTuple

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from .. import _check
from ..network.state import state
from .replaced import replace_layers

COUNTER = "dropout_counter"
"""str, the name of the Parameter that a `CountedDropout` adds to a network."""
# The constants of SplitMix64 (Steele, Lea and Flood 2014): the step, and two factors with the shifts before them.
_STEP = 0x9E3779B97F4A7C15
_LAST_SHIFT = 31
_ROUNDS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_KINDS = (nn.Dropout, mint.nn.Dropout)


class CountedDropout(nn.Cell):
    """Dropout whose masks are the same in a resumed run.

    The mask is a function of seed, layer, rank, a counter and the element's position. The counter is a Parameter that
    each forward pass in training increments. A training state contains it, so a resumed run draws the same masks as an
    uninterrupted one; the state of `nn.Dropout` is inside MindSpore's kernel and can't be saved.

    Elements are kept with probability ``1 - p`` and divided by it. In evaluation, or with ``p = 0``, the input is
    returned and nothing is counted. The random numbers are those of SplitMix64, with one generator per row; its second
    multiplication is by a random odd number per column.

    Do not `recompute` it: the second forward pass would draw another mask. With several ranks a state contains the
    counters of rank 0: a resumed run repeats all masks if all ranks have the same number of micro-batches.

    Args:
        p (float): the probability of dropping an element, 0 <= p < 1. Default: 0.5.
        seed (int): the seed of the masks, 0 <= seed < 2**63. Default: 0.
        layer (int): the number of the layer; layers with different numbers draw different masks. Default: 0.

    Inputs:
        - **x** (Tensor) - of any float type and static shape.

    Outputs:
        Tensor, of the type and shape of `x`.

    Raises:
        TypeError: If `p` is not a number, or `seed` or `layer` not an int.
        ValueError: If one of them is out of its range.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> import mindspore as ms
        >>> from mindspore import Tensor, ops
        >>> from ms_accum import CountedDropout
        >>>
        >>> dropout = CountedDropout(p=0.5, seed=1).set_train()
        >>> ones = ops.ones((2, 8), ms.float32)
        >>> first, second = dropout(ones), dropout(ones)
        >>> print(bool((first == second).all()))
        False
        >>> dropout.dropout_counter.set_data(Tensor(0, ms.int32))  # what a resumed run does
        Parameter (name=dropout_counter, shape=(), dtype=Int32, requires_grad=False)
        >>> print(bool((dropout(ones) == first).all()))
        True
    """

    def __init__(self, p: float = 0.5, *, seed: int = 0, layer: int = 0):
        super().__init__()
        owner = "CountedDropout"
        self.p = float(_number_below(1, owner, "p", p, (int, float)))
        self.seed = int(_number_below(2**63, owner, "seed", seed))
        self.layer = int(_number_below(2**31, owner, "layer", layer))
        self.mask_key = MaskKey(self.seed, self.layer, 0)
        self.dropout_counter = state(COUNTER, 0, ms.int32)
        self.scale = 1.0 / (1.0 - self.p)
        self.threshold = Tensor(np.uint64(min(round(self.p * 2**64), 2**64 - 1)))

    def construct(self, x: Any) -> Any:
        if not self.training or self.p == 0:
            return x
        count = self.dropout_counter + 1  # `assign_add` would return the Parameter, which changes if used twice
        count = ops.depend(count, ops.assign(self.dropout_counter, count))
        mask = ops.cast(numbers(self.mask_key, count, x.shape) >= self.threshold, x.dtype)
        return x * ops.stop_gradient(mask * self.scale)

    def offset_seeds_by_rank(self, rank: int) -> None:
        """Draw different masks on each rank; the counter can't contain the rank: all ranks load that of rank 0."""
        self.mask_key = self.mask_key._replace(rank=rank)

    def extend_repr(self) -> str:
        """Return the settings, for `repr`."""
        return f"p={self.p}, seed={self.seed}, layer={self.layer}"


class MaskKey(NamedTuple):
    """What random numbers depend on, in addition to the counter and the position."""

    seed: int
    layer: int
    rank: int


def replace_dropout(network: nn.Cell, seed: int | None = None) -> nn.Cell:
    """Replace each `nn.Dropout` and `mint.nn.Dropout` of a network by a `CountedDropout`, in place.

    Layers are numbered in the order of `network.cells_and_names()`, so another order of layers gives other masks. A
    layer that is used at two places remains one layer. Call this before you create the driver and load a training
    state. A saved model contains the counters: load a model that was trained with `nn.Dropout` before this call. Calls
    of `ops.dropout` and layers such as `nn.Dropout2d` are not replaced.

    Args:
        network (Cell): the network.
        seed (Optional[int]): the seed of the masks. Default: ``None``, MindSpore's global seed (`ms.set_seed`), or 0 if
            it is not set.

    Returns:
        Cell, the same network.

    Raises:
        TypeError: If `network` is not a Cell, or is itself a Dropout, or `seed` is not an int.
        ValueError: If `network` contains no Dropout, or `seed` is out of range.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from ms_accum import replace_dropout
        >>>
        >>> network = replace_dropout(nn.SequentialCell(nn.Dense(4, 8), nn.Dropout(p=0.2), nn.Dense(8, 2)), seed=1)
        >>> print(network[1])
        CountedDropout(p=0.2, seed=1, layer=0)
    """
    owner = "replace_dropout"
    _check.instance(owner, "network", network, nn.Cell, "a Cell")
    if isinstance(network, _KINDS):
        remedy = "Make a CountedDropout instead."
        _check.raise_invalid(
            TypeError, owner, "network", "one that contains Dropout layers", type(network).__name__, remedy
        )
    if seed is None:
        seed = ms.get_seed() or 0
    seed = int(_number_below(2**63, owner, "seed", seed))

    def counted(cell: Any, layer: int) -> CountedDropout:
        # nn.Dropout may have the probability of keeping instead.
        p = 1.0 - cell.keep_prob if cell.p is None else cell.p
        return CountedDropout(p, seed=seed, layer=layer)

    if not replace_layers(network, lambda cell: isinstance(cell, _KINDS), counted):
        rule = "one with nn.Dropout or mint.nn.Dropout layers that are not yet replaced"
        _check.raise_invalid(
            ValueError, owner, "network", rule, f"{type(network).__name__} without one", "Leave out this call."
        )
    return network


def numbers(mask_key: MaskKey, count: Any, shape: tuple) -> Any:
    """Return uniform uint64 numbers of this shape for a count; the upper bits are random, the lower ones less so.

    They are products of two random numbers, modulo 2**64. Shifts, and operators with a scalar, are slow on MindSpore's
    CPU: Dropout with a hash of each element (lowbias32) takes 2.5 times as long as `nn.Dropout`, this one 0.8 to 1
    times.
    """
    rows, columns = _starts(*mask_key, shape)
    step, bits, factor, last_bits = _constants()
    drawn = rows + ops.cast(count, ms.uint64) * step
    drawn = _folded(_folded(drawn, bits) * factor, last_bits) * columns
    return ops.reshape(drawn, shape)


def _folded(x: Any, shift: Any) -> Any:
    return ops.bitwise_xor(x, ops.bitwise_right_shift(x, shift))


@ops.constexpr
def _constants() -> tuple:
    """Return the constants as tensors: a graph can't contain an int above 2**63."""
    (shift, factor), (last_shift, _) = _ROUNDS
    return tuple(Tensor(np.uint64(value)) for value in (_STEP, shift, factor, last_shift))


@ops.constexpr
def _starts(seed: int, layer: int, rank: int, shape: tuple) -> tuple:
    """Return the start of each row's generator, as a column, and the number of each column, as a row."""
    cut = min(range(len(shape) + 1), key=lambda axis: math.prod(shape[:axis]) + math.prod(shape[axis:]))
    key = np.uint64(0)
    for part in (seed, layer, rank):
        key = _mixed(_numbered(key, np.uint64(part)))
    rows, columns = (
        _mixed(_numbered(_mixed(key + np.uint64(axis)), np.arange(1, count + 1, dtype=np.uint64)))
        for axis, count in enumerate((math.prod(shape[:cut]), math.prod(shape[cut:])))
    )
    return Tensor(rows[:, None]), Tensor(columns[None] | np.uint64(1))


def _numbered(start: Any, number: Any) -> Any:
    with np.errstate(over="ignore"):  # arithmetic modulo 2**64 is intended
        return start + number * np.uint64(_STEP)


def _mixed(x: Any) -> Any:
    """Return SplitMix64's mix of unsigned 64-bit numbers."""
    with np.errstate(over="ignore"):
        for shift, factor in _ROUNDS:
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return x ^ (x >> np.uint64(_LAST_SHIFT))


def _number_below(limit: int, owner: str, name: str, value: Any, kind: Any = Integral) -> Any:
    """Return a number >= 0 and below the limit, or raise an error."""
    rule = f"{'an int' if kind is Integral else 'a number'} >= 0 and < {limit}"
    if isinstance(value, bool) or not isinstance(value, kind):
        _check.raise_invalid(TypeError, owner, name, rule, f"{value!r} ({type(value).__name__})")
    if not 0 <= value < limit:
        _check.raise_invalid(ValueError, owner, name, rule, value)
    return value
