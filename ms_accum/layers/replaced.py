"""Replaces layers of a network, in place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable

from mindspore import nn


def replace_layers(network: nn.Cell, matches: Callable[[Any], bool], make: Callable[[Any, int], nn.Cell]) -> list[Any]:
    """Replace each layer for which `matches` is true by `make(layer, number)`, and return the new layers.

    A layer that is used at several places is replaced by one layer at these places. Its Parameters get the names that
    they would have if the network had been built with it, and it gets the training mode of the old layer.
    """
    old: list[nn.Cell] = []
    new: dict[int, nn.Cell] = {}
    for path, parent, name in list(_occurrences(network, "", set(), matches)):
        cell = parent._cells[name]
        if id(cell) not in new:
            old.append(cell)  # keeps the object alive, so that its id stays unique
            new[id(cell)] = make(cell, len(new)).set_train(cell.training)
            old_parameters = {id(parameter) for parameter in cell.get_parameters()}
            for parameter in new[id(cell)].get_parameters():
                if id(parameter) not in old_parameters:
                    parameter.name = f"{path}{name}.{parameter.name}"
        parent._cells[name] = new[id(cell)]  # with `setattr` MindSpore would add a prefix to the names of Parameters
        if isinstance(parent, nn.SequentialCell):
            parent.cell_list = list(parent._cells.values())
    forget_graphs(network)
    return list(new.values())


def forget_graphs(network: nn.Cell) -> None:
    """Make MindSpore compile the network again; otherwise it would run the graph of the old layers."""
    network.compile_cache.clear()


def _occurrences(
    cell: nn.Cell, path: str, visited: set[int], matches: Callable[[Any], bool]
) -> Iterator[tuple[str, nn.Cell, str]]:
    """Yield each matching layer: the path of its parent Cell, the parent, and the layer's name in it."""
    if id(cell) in visited:
        return
    visited.add(id(cell))
    for name, child in cell._cells.items():
        if child is not None and matches(child):
            yield path, cell, name
        elif child is not None:
            yield from _occurrences(child, f"{path}{name}.", visited, matches)
