"""Puts back what forwards have changed, so that a window that is not finished did not happen."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from mindspore import Parameter, nn

from . import private
from .held import reached
from .parameters import as_array, copies_of, excluding, is_equal, restore

# Larger Parameters are not copied before it is known that forwards change them; those of MindSpore's layers never are.
_LARGE = 2**20


class Undo:
    """Puts back what forwards have changed since the beginning of a window.

    Which Parameters of MindSpore's layers forwards change is known after the first window in each mode of the layers;
    mostly there are none. The user's own may change in any window, and are remembered in all.

    Args:
        network (Optional[Cell]): the network.
        trained (Iterable[Parameter]): its trained Parameters, which forwards do not change.
        counters (Iterable[Parameter]): more Parameters that they do change. Default: none.
    """

    def __init__(self, network: nn.Cell | None, trained: Iterable[Parameter], counters: Iterable[Parameter] = ()):
        found = [] if network is None else [each for _, each in reached(network)]
        self._layers = [each for each in found if isinstance(each, nn.Cell)]
        of_layers = _in_layers(self._layers)
        used = excluding((each for each in found if isinstance(each, Parameter)), trained)
        self._untrained = excluding(used, [each for each in of_layers if each.size > _LARGE])
        own = [each for each in excluding(self._untrained, of_layers) if each.size <= _LARGE]
        self._modes: list[bool] = []
        self._changing = [*counters, *own]
        self._is_known = False
        self._copies: list[tuple[Parameter, np.ndarray]] = []
        self._digests: list[tuple[Parameter, bytes]] = []

    def begin(self) -> None:
        """Remember what is there now."""
        modes = [cell.training for cell in self._layers]
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


def _in_layers(cells: Iterable[nn.Cell]) -> list[Parameter]:
    """Return the Parameters of MindSpore's own layers, such as frozen weights: to read large ones takes seconds."""
    of_mindspore = [cell for cell in cells if type(cell).__module__.startswith("mindspore.")]
    return [each for cell in of_mindspore for each in private.parameters_of(cell).values() if each is not None]


def _digest(parameter: Parameter) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(as_array(parameter)).view(np.uint8).data).digest()
