"""How is a network restored after a trial run?"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.context import _context, ms_ctx_param

from .parameters import as_array, without

_LIMIT = 2**26
_OF_EVERY_CELL = frozenset(vars(nn.Cell()))
# `set_context` prints a warning about this setting, and what it recommends instead can't be undone.
_SYNCHRONIZE = ms_ctx_param.pynative_synchronize


class TrainingMode:
    """The current training flag of each Cell, to restore after `set_train`, which sets all of them to one value."""

    def __init__(self, network: nn.Cell):
        self._network, self._phase = network, network.phase
        self._flags = [(cell, cell.training) for _, cell in network.cells_and_names()]

    def put_back(self) -> None:
        """Restore the flags."""
        for cell, training in self._flags:
            cell.add_flags(training=training)
        self._network.phase = self._phase


def start_training(network: nn.Cell, whole: nn.Cell) -> None:
    """Set `whole`, which contains `network`, to training mode.

    If the network is already in training mode, the flags of its Cells are kept, because a backbone may be frozen.
    """
    found = TrainingMode(network) if network.training else None
    whole.set_train()
    if found is not None:
        found.put_back()


@contextmanager
def training_mode(network: nn.Cell, mode: bool) -> Iterator[None]:
    """Set the network to training or evaluation mode inside the block."""
    found = TrainingMode(network)
    network.set_train(mode)
    try:
        yield
    finally:
        found.put_back()


def can_be_left_as_found(network: nn.Cell, trained: Collection[Parameter]) -> bool:
    """Return whether the Parameters that a forward may change are small enough to be copied: at most 64 MiB."""
    return sum(parameter.nbytes for parameter in without(network.get_parameters(), trained)) <= _LIMIT


@contextmanager
def left_as_found(
    network: nn.Cell,
    trained: Collection[Parameter],
    *,
    training: bool,
    within: int = ms.PYNATIVE_MODE,
    loss_fn: Any = None,
) -> Iterator[None]:
    """Run forward passes inside the block, by default in PyNative mode, and then restore what they change.

    Restored are the mode, the training flags of the Cells, the random generator, numbers that Cells count in Python,
    and Parameters that are not in `trained`, such as BatchNorm's running statistics; also those of a `loss_fn` that is
    not part of the network.
    """
    mode, generator = ms.get_context("mode"), ms.get_rng_state()
    cells = [cell for cell in (network, loss_fn) if isinstance(cell, nn.Cell)]
    kept = [copied for cell in cells for copied in copies_of(cell, trained)]
    numbers = numbers_of(cells)
    ms.set_context(mode=within)
    try:
        with training_mode(network, training):
            yield
    finally:
        try:
            put_back(kept)
            for each in numbers:
                each.put_back()
        finally:
            ms.set_rng_state(generator)
            ms.set_context(mode=mode)


@contextmanager
def synchronously() -> Iterator[None]:
    """Run each operator outside graphs to its end inside the block, so that an error is raised by the call.

    Otherwise a kernel that raises an error while later ones are launched may end the process with a segmentation fault.
    """
    context, name = _context(), _SYNCHRONIZE
    before = context.get_param(name)
    context.set_param(name, True)
    try:
        yield
    finally:
        context.set_param(name, before)


def copies_of(network: nn.Cell, trained: Collection[Parameter]) -> list[tuple[Parameter, np.ndarray]]:
    """Return the network's Parameters that are not in `trained`, which a forward may change, with copies of them."""
    return [(each, as_array(each).copy()) for each in without(network.get_parameters(), trained)]


def put_back(kept: Iterable[tuple[Parameter, np.ndarray]]) -> None:
    """Set Parameters to these copies."""
    for parameter, values in kept:
        if not np.array_equal(as_array(parameter), values, equal_nan=True):
            ops.assign(parameter, Tensor(values).astype(parameter.dtype))


class Attributes:
    """The attributes of a Cell as they are now, and the contents of those that are lists or dicts.

    Args:
        cell (Cell): the Cell.
        types (Union[type, tuple[type]]): the types of the attributes.
    """

    def __init__(self, cell: nn.Cell, types: Any):
        self._cell, self._types = cell, types
        self._values = self._now()
        self._contents = [(each, copy.copy(each)) for each in self._values.values() if type(each) in (list, dict)]

    def _now(self) -> dict[str, Any]:
        named = vars(self._cell).items()
        return {name: value for name, value in named if name not in _OF_EVERY_CELL and isinstance(value, self._types)}

    def put_back(self) -> None:
        """Set them to what they were; delete those that have been added."""
        attributes = vars(self._cell)
        for name in self._now().keys() - self._values.keys():
            del attributes[name]
        attributes.update(self._values)
        for content, before in self._contents:
            content.clear()
            content.extend(before) if isinstance(content, list) else content.update(before)


def numbers_of(cells: Iterable[nn.Cell]) -> list[Attributes]:
    """Return the attributes of Cells and the Cells in them that are numbers.

    Others are not for us to set back: a Cell that is called keeps notes about its compilation.
    """
    return [Attributes(cell, (int, float)) for outer in cells for _, cell in outer.cells_and_names()]
