"""Sets the training flags of a network's Cells, and restores them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from mindspore import nn


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


def training_again(network: nn.Cell) -> AbstractContextManager[None]:
    """Set a network that is not in training mode, such as after an evaluation, to it inside the block."""
    return nullcontext() if network.training else training_mode(network, True)


@contextmanager
def training_mode(network: nn.Cell, training: bool) -> Iterator[None]:
    """Set the network to training or evaluation mode inside the block."""
    with _restoring_flags(network):
        network.set_train(training)
        yield
