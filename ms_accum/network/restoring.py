"""Restore a network after trial runs: its training flags, its Parameters, and what its Cells count in Python."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops
from mindspore.context import _context, ms_ctx_param

from .parameters import as_array, excluding

CELL_ATTRIBUTES = frozenset(vars(nn.Cell()))
"""frozenset[str], the attributes that every Cell has."""
_LIMIT = 2**26
# `set_context` prints a warning about this setting, and what it recommends instead can't be undone.
_SYNCHRONIZE = ms_ctx_param.pynative_synchronize


@contextmanager
def _restoring_flags(network: nn.Cell) -> Iterator[None]:
    """Restore the training flag of each Cell after the block: `set_train` sets all of them to one value."""
    phase = network.phase
    flags = [(cell, cell.training) for _, cell in network.cells_and_names()]
    try:
        yield
    finally:
        for cell, training in flags:
            cell.add_flags(training=training)
        network.phase = phase


def start_training(network: nn.Cell, whole: nn.Cell) -> None:
    """Set `whole`, which contains `network`, to training mode.

    If the network is already in training mode, the flags of its Cells stay, because a backbone may be frozen.
    """
    with _restoring_flags(network) if network.training else nullcontext():
        whole.set_train()


@contextmanager
def training_mode(network: nn.Cell, training: bool) -> Iterator[None]:
    """Set the network to training or evaluation mode inside the block."""
    with _restoring_flags(network):
        network.set_train(training)
        yield


def can_be_restored(network: nn.Cell, trained: Collection[Parameter]) -> bool:
    """Return whether the Parameters that a forward may change are small enough to be copied: at most 64 MiB."""
    return sum(parameter.nbytes for parameter in excluding(network.get_parameters(), trained)) <= _LIMIT


@contextmanager
def restoring(
    network: nn.Cell,
    trained: Collection[Parameter],
    *,
    training: bool,
    mode: int = ms.PYNATIVE_MODE,
    loss_fn: Any = None,
) -> Iterator[None]:
    """Run forward passes inside the block, by default in PyNative mode, and then restore what they change.

    Restored are the mode, the training flags of the Cells, the random generator, numbers that Cells count in Python,
    and Parameters that are not in `trained`, such as BatchNorm's running statistics; also those of a `loss_fn` that is
    not part of the network.
    """
    mode_before = ms.get_context("mode")
    generator = ms.get_rng_state()
    cells = [cell for cell in (network, loss_fn) if isinstance(cell, nn.Cell)]
    copies = [copied for cell in cells for copied in copies_of(cell, trained)]
    numbers = number_attributes(cells)
    ms.set_context(mode=mode)
    try:
        with training_mode(network, training):
            yield
    finally:
        try:
            restore(copies)
            for attributes in numbers:
                attributes.restore()
        finally:
            ms.set_rng_state(generator)
            ms.set_context(mode=mode_before)


@contextmanager
def synchronously() -> Iterator[None]:
    """Run each operator outside graphs to its end inside the block, so that an error is raised by the call.

    Otherwise a kernel that raises an error while later ones are launched may end the process with a segmentation fault.
    """
    context = _context()
    previous = context.get_param(_SYNCHRONIZE)
    context.set_param(_SYNCHRONIZE, True)
    try:
        yield
    finally:
        context.set_param(_SYNCHRONIZE, previous)


def copies_of(network: nn.Cell, trained: Collection[Parameter]) -> list[tuple[Parameter, np.ndarray]]:
    """Return the network's Parameters that are not in `trained`, which a forward may change, with copies of them."""
    return [(parameter, as_array(parameter).copy()) for parameter in excluding(network.get_parameters(), trained)]


def restore(copies: Iterable[tuple[Parameter, np.ndarray]]) -> None:
    """Set Parameters to these copies."""
    for parameter, values in copies:
        if not np.array_equal(as_array(parameter), values, equal_nan=True):
            ops.assign(parameter, Tensor(values).astype(parameter.dtype))


class Attributes:
    """The attributes of a Cell as they are now, and the contents of those that are lists or dicts.

    Args:
        cell (Cell): the Cell.
        types (Union[type, tuple[type]]): the types of the attributes.
    """

    def __init__(self, cell: nn.Cell, types: type | tuple[type, ...]):
        self._cell = cell
        self._types = types
        self._values = self._read()
        self._contents = [(value, copy.copy(value)) for value in self._values.values() if type(value) in (list, dict)]

    def _read(self) -> dict[str, Any]:
        attributes = {name: value for name, value in vars(self._cell).items() if name not in CELL_ATTRIBUTES}
        return {name: value for name, value in attributes.items() if isinstance(value, self._types)}

    def restore(self) -> None:
        """Set them to what they were; delete those that have been added."""
        attributes = vars(self._cell)
        for name in self._read().keys() - self._values.keys():
            del attributes[name]
        attributes.update(self._values)
        for container, contents in self._contents:
            container.clear()
            if isinstance(container, list):
                container.extend(contents)
            else:
                container.update(contents)


def number_attributes(cells: Iterable[nn.Cell]) -> list[Attributes]:
    """Return the attributes that are numbers, of Cells and the Cells in them.

    Other attributes are not restored: a Cell stores information about its compilation when it is called.
    """
    return [Attributes(cell, (int, float)) for outer in cells for _, cell in outer.cells_and_names()]
