"""What forwards change beside gradients: statistics of BatchNorm, counters of random layers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from mindspore import Parameter, nn

from .parameters import as_array, copies_of, excluding, is_equal, restore

# Larger Parameters are not copied before it is known that forwards change them; those of MindSpore's layers never are.
_LARGE = 2**20


class Undo:
    """Puts back what forwards have changed since the beginning of a window.

    Which Parameters forwards change is known after the first window in each mode of the layers; mostly there are none.

    Args:
        network (Optional[Cell]): the network.
        trained (Iterable[Parameter]): its trained Parameters, which forwards do not change.
        counters (Iterable[Parameter]): more Parameters that they do change. Default: none.
    """

    def __init__(self, network: nn.Cell | None, trained: Iterable[Parameter], counters: Iterable[Parameter] = ()):
        may_change = [] if network is None else excluding(network.get_parameters(), _large_in_layers(network))
        self._untrained = excluding(may_change, trained)
        self._cells = [] if network is None else [cell for _, cell in network.cells_and_names()]
        self._modes: list[bool] = []
        self._changing = list(counters)
        self._is_known = False
        self._copies: list[tuple[Parameter, np.ndarray]] = []
        self._digests: list[tuple[Parameter, bytes]] = []

    def begin(self) -> None:
        """Remember what is there now."""
        modes = [cell.training for cell in self._cells]
        self._is_known = self._is_known and modes == self._modes
        self._modes = modes
        remembered = [*self._changing]
        if not self._is_known:
            small = [each for each in self._untrained if each.size <= _LARGE]
            remembered += excluding(small, self._changing)
            large = [each for each in self._untrained if each.size > _LARGE]
            self._digests = [(each, _digest(each)) for each in excluding(large, self._changing)]
        self._copies = copies_of(remembered)

    def learn(self) -> None:
        """Note what the window has changed, which is all that is remembered from now on."""
        if not self._is_known:
            self._is_known = True
            found = [each for each, copy in self._copies if not is_equal(each, copy)]
            found += [each for each, digest in self._digests if _digest(each) != digest]
            self._changing += excluding(found, self._changing)
            self._digests = []
        self._copies = []

    def undo(self) -> bool:
        """Put back what was remembered; return whether that is all that has changed."""
        restore(self._copies)
        return all(_digest(each) == digest for each, digest in self._digests)


def _large_in_layers(network: nn.Cell) -> list[Parameter]:
    """Return the large Parameters of MindSpore's own layers, such as frozen weights: to read them takes seconds."""
    cells = [cell for _, cell in network.cells_and_names() if type(cell).__module__.startswith("mindspore.")]
    return [each for cell in cells for each in cell._params.values() if each is not None and each.size > _LARGE]


def _digest(parameter: Parameter) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(as_array(parameter)).view(np.uint8).data).digest()
