"""Layers that behave in micro-batches as in one large batch, or the same in a resumed run.

A Dropout whose masks are the same in a resumed run; BatchNorm replaced or frozen.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from numbers import Integral
from typing import Any, Callable, NamedTuple, NoReturn

import mindspore as ms
import numpy as np
from mindspore import Tensor, mint, nn, ops

from . import _check
from .network.parameters import untrained
from .network.private import cells_of, forget_graphs


def replace_layers(network: nn.Cell, matches: Callable[[Any], bool], make: Callable[[Any, int], nn.Cell]) -> list[Any]:
    """Replace each layer for which `matches` is true by `make(layer, number)`, and return the new layers.

    A layer that is used at several places is replaced by one layer at these places. Its Parameters get the names that
    they would have if the network had been built with it, and it gets the training mode of the old layer.
    """
    old: list[nn.Cell] = []
    new: dict[int, nn.Cell] = {}
    for path, parent, name in list(_occurrences(network, "", set(), matches)):
        cell = cells_of(parent)[name]
        if id(cell) not in new:
            old.append(cell)  # keeps the object alive, so that its id stays unique
            new[id(cell)] = make(cell, len(new)).set_train(cell.training)
            old_parameters = {id(parameter) for parameter in cell.get_parameters()}
            for parameter in new[id(cell)].get_parameters():
                if id(parameter) not in old_parameters:
                    parameter.name = f"{path}{name}.{parameter.name}"
        cells_of(parent)[name] = new[id(cell)]  # with `setattr` MindSpore would add a prefix to the names of Parameters
        if isinstance(parent, nn.SequentialCell):
            parent.cell_list = list(cells_of(parent).values())
    forget_graphs(network)
    return list(new.values())


def _occurrences(
    cell: nn.Cell, path: str, visited: set[int], matches: Callable[[Any], bool]
) -> Iterator[tuple[str, nn.Cell, str]]:
    """Yield each matching layer: the path of its parent Cell, the parent, and the layer's name in it."""
    if id(cell) in visited:
        return
    visited.add(id(cell))
    for name, child in cells_of(cell).items():
        if child is not None and matches(child):
            yield path, cell, name
        elif child is not None:
            yield from _occurrences(child, f"{path}{name}.", visited, matches)


# Compared by name, because the classes of `mindspore.mint` and of `nn` have no common base.
_NAMES = {"BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "SyncBatchNorm"}
_BATCH_NORM = "BatchNorm layers of mindspore.nn"
_WITH_PARAMETERS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)  # a BatchNorm3d contains a BatchNorm2d


def warn_about_batch_norm(network: nn.Cell, *, training: bool = False) -> None:
    """Warn that BatchNorm normalizes micro-batches, so that accumulation does not equal the large batch.

    Args:
        network (Cell): the network.
        training (bool): whether it will be in training mode, in whatever mode it is now. Default: ``False``.
    """
    names = [name for name, cell in network.cells_and_names() if takes_statistics(cell, training=training)]
    if names:
        _check.warn(
            f"BatchNorm layers ({len(names)}, the first is '{names[0]}') normalize each micro-batch by its own "
            "statistics, so accumulation does not equal the large batch. With GroupNorm (batch_to_group_norm) it does.",
            UserWarning,
        )


def takes_statistics(cell: Any, *, training: bool = False) -> bool:
    """Return whether a Cell is a BatchNorm that uses the statistics of its input, now or in training mode.

    A frozen BatchNorm does not.
    """
    if hasattr(cell, "bn2d"):  # nn.BatchNorm3d, whose inner layer is checked instead
        return False
    if not _NAMES & {kind.__name__ for kind in type(cell).__mro__}:
        return False
    always = getattr(cell, "use_batch_statistics", None)
    return bool(training or cell.training) if always is None else bool(always)


# Layers that normalize a row in the same way in each batch


def batch_to_group_norm(network: nn.Cell, groups: int = 32) -> nn.Cell:
    """Replace the BatchNorm layers of a network by GroupNorm, in place, so that accumulation is exact.

    GroupNorm normalizes each row separately. The new layers keep the Parameters gamma and beta of the old ones, but
    have no running statistics: train the network again, or fine-tune it. A layer gets the largest number of groups, up
    to `groups`, that divides its number of channels. `nn.BatchNorm1d` gets one group, which is LayerNorm over all
    channels: with inputs of shape (N, C), groups of one channel would give zeros.

    Args:
        network (Cell): a network with `nn.BatchNorm1d`, `nn.BatchNorm2d`, `nn.BatchNorm3d` or `nn.SyncBatchNorm`.
        groups (int): the maximum number of groups. Default: 32.

    Returns:
        Cell, the same network.

    Raises:
        TypeError: If `network` is not a Cell, or is itself a BatchNorm, or `groups` is not an int.
        ValueError: If the network contains no BatchNorm, or a `nn.BatchNorm1d` with one channel, or `groups` is less
            than 1.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn
        >>> from ms_accum import batch_to_group_norm
        >>>
        >>> network = nn.SequentialCell(nn.Conv2d(3, 48, 3), nn.BatchNorm2d(48), nn.ReLU())
        >>> print(batch_to_group_norm(network)[1])
        GroupNorm(num_groups=24, num_channels=48)
    """
    owner = "batch_to_group_norm"
    largest = _check.positive_int(owner, "groups", groups)
    _check.instance(owner, "network", network, nn.Cell, "a Cell")
    if _is_batch_norm(network):
        _reject_layer(owner, network, "BatchNorm", "Make a GroupNorm instead.")
    for name, cell in network.cells_and_names():  # before any layer is replaced
        if isinstance(cell, nn.BatchNorm1d) and cell.num_features == 1:
            rule = "without a BatchNorm1d of one channel"
            remedy = "It would give zeros. Use freeze_batch_norm, or remove the layer."
            _check.raise_invalid(ValueError, owner, "network", rule, f"'{name}'", remedy)
    if not replace_layers(network, _is_batch_norm, lambda layer, number: _group_norm(layer, largest)):
        _raise_none(owner, network, _BATCH_NORM)
    return network


def _group_norm(layer: Any, largest: int) -> nn.Cell:
    inner = getattr(layer, "bn2d", layer)
    channels = inner.num_features
    groups = 1
    if not isinstance(layer, nn.BatchNorm1d):
        groups = max(number for number in range(1, min(largest, channels) + 1) if channels % number == 0)
    new = nn.GroupNorm(groups, channels, inner.eps)
    new.gamma = inner.gamma
    new.beta = inner.beta
    return new


def freeze_batch_norm(network: nn.Cell) -> nn.Cell:
    """Make the BatchNorm layers of a network use their running statistics also in training, in place.

    Accumulation is then exact. The statistics no longer change, but gamma and beta are still trained. This is meant for
    pretrained networks. Call it before you create the driver, the step or the `Accumulator`.

    Args:
        network (Cell): a network with `nn.BatchNorm1d`, `nn.BatchNorm2d`, `nn.BatchNorm3d` or `nn.SyncBatchNorm`.

    Returns:
        Cell, the same network.

    Raises:
        TypeError: If `network` is not a Cell.
        ValueError: If the network contains no BatchNorm.

    Supported Platforms:
        ``CPU`` (``Ascend`` and ``GPU`` not run here)

    Examples:
        >>> from mindspore import nn, ops
        >>> from ms_accum import freeze_batch_norm
        >>>
        >>> network = freeze_batch_norm(nn.SequentialCell(nn.BatchNorm2d(3))).set_train()
        >>> before = network[0].moving_mean.asnumpy().copy()
        >>> _ = network(ops.randn(2, 3, 4, 4))
        >>> print((network[0].moving_mean.asnumpy() == before).all())
        True
    """
    owner = "freeze_batch_norm"
    _check.instance(owner, "network", network, nn.Cell, "a Cell")
    layers = [cell for _, cell in network.cells_and_names() if isinstance(cell, _WITH_PARAMETERS)]
    if not layers:
        _raise_none(owner, network, _BATCH_NORM)
    for layer in layers:
        layer.use_batch_statistics = False
    forget_graphs(network)
    return network


def _is_batch_norm(cell: Any) -> bool:
    return isinstance(cell, (*_WITH_PARAMETERS, nn.BatchNorm3d))


def _reject_layer(owner: str, layer: nn.Cell, kind: str, remedy: str) -> NoReturn:
    """Raise the error about a layer that is no network: it can't be replaced in place."""
    rule = f"one that contains {kind} layers"
    _check.raise_invalid(TypeError, owner, "network", rule, type(layer).__name__, remedy)


def _raise_none(owner: str, network: nn.Cell, layers: str) -> NoReturn:
    value = f"{type(network).__name__} without one"
    _check.raise_invalid(ValueError, owner, "network", f"one with {layers}", value, "Leave out this call.")


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
        self.dropout_counter = untrained(COUNTER, 0, ms.int32)
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
        _reject_layer(owner, network, "Dropout", "Make a CountedDropout instead.")
    if seed is None:
        seed = ms.get_seed() or 0
    seed = int(_number_below(2**63, owner, "seed", seed))

    def counted(cell: Any, layer: int) -> CountedDropout:
        # nn.Dropout may have the probability of keeping instead.
        p = 1.0 - cell.keep_prob if cell.p is None else cell.p
        return CountedDropout(p, seed=seed, layer=layer)

    if not replace_layers(network, lambda cell: isinstance(cell, _KINDS), counted):
        _raise_none(owner, network, "nn.Dropout or mint.nn.Dropout layers that are not yet replaced")
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
