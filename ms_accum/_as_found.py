"""How is a network left as it was found?"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn, ops


class TrainingMode:
    """What each Cell's flag is now, to be put back: `set_train` makes all of them alike."""

    def __init__(self, network: nn.Cell):
        self._network, self._phase = network, network.phase
        self._flags = [(cell, cell.training) for _, cell in network.cells_and_names()]

    def put_back(self) -> None:
        """Make it so again."""
        for cell, training in self._flags:
            cell.add_flags(training=training)
        self._network.phase = self._phase


def start_training(network: nn.Cell, whole: nn.Cell) -> None:
    """Bring `whole`, of which `network` is a part, into training mode.

    A network that is in it already stays as its parts are: a backbone may be frozen.
    """
    found = TrainingMode(network) if network.training else None
    whole.set_train()
    if found is not None:
        found.put_back()


@contextmanager
def training_mode(network: nn.Cell, mode: bool) -> Iterator[None]:
    """Bring it into training mode, or out of it, inside the block."""
    found = TrainingMode(network)
    network.set_train(mode)
    try:
        yield
    finally:
        found.put_back()


def others_of(network: nn.Cell, trained: set[int]) -> list[Parameter]:
    """Return the Parameters that are not trained: a forward may change them."""
    return [parameter for parameter in network.get_parameters() if id(parameter) not in trained]


@contextmanager
def left_as_found(
    network: nn.Cell, trained: set[int], *, training: bool, within: int = ms.PYNATIVE_MODE
) -> Iterator[None]:
    """Run forwards inside the block, in PyNative mode unless another is asked for, and put back what they change.

    That is the mode, the cells' training flags, the generator, and Parameters that are not among `trained`, such as
    BatchNorm's running statistics.
    """
    mode, generator = ms.get_context("mode"), ms.get_rng_state()
    others = others_of(network, trained)
    kept = [(parameter, _values(parameter).copy()) for parameter in others]
    ms.set_context(mode=within)
    try:
        with training_mode(network, training):
            yield
    finally:
        try:
            _put_back(kept)
        finally:
            ms.set_rng_state(generator)
            ms.set_context(mode=mode)


def _put_back(kept: list[tuple[Parameter, np.ndarray]]) -> None:
    for parameter, values in kept:
        if not np.array_equal(_values(parameter), values, equal_nan=True):
            ops.assign(parameter, Tensor(values).astype(parameter.dtype))


def _values(parameter: Parameter) -> np.ndarray:
    # NumPy has no bfloat16; float32 holds it exactly.
    return (parameter.astype(ms.float32) if parameter.dtype == ms.bfloat16 else parameter).asnumpy()
