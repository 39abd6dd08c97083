"""Puts back what forwards have changed, so that a window that is not finished did not happen."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from itertools import accumulate

import numpy as np
from mindspore import Parameter, nn

from . import private
from .held import reached
from .parameters import as_array, copies_of, excluding, is_equal, restore

# Larger Parameters are not copied before it is known that forwards change them; those of MindSpore's layers never are.
_LARGE = 2**20
_TOGETHER = 2**22
"""int, the elements of the user's own Parameters that are copied in all windows, the smallest first."""


class Undo:
    """Puts back what forwards have changed since the beginning of a window.

    Which Parameters of MindSpore's layers forwards change is known after the first window in each mode of the layers;
    mostly there are none. The user's own may change in any window, and small ones are remembered in all.

    Args:
        network (Cell): the network.
        trained (Iterable[Parameter]): its trained Parameters, which forwards do not change.
        runs_again (bool): whether forwards of a window may run again after `undo`, so that all of them are copied.
    """

    def __init__(self, network: nn.Cell, trained: Iterable[Parameter], *, runs_again: bool):
        found = [each for _, each in reached(network)]
        self._layers = [each for each in found if isinstance(each, nn.Cell)]
        of_layers = _in_layers(self._layers)
        used = excluding((each for each in found if isinstance(each, Parameter)), trained)
        self._untrained = excluding(used, [each for each in of_layers if each.size > _LARGE])
        self._large = [] if runs_again else [each for each in self._untrained if each.size > _LARGE]
        self._modes: list[bool] = []
        own = sorted(excluding(self._untrained, of_layers), key=lambda each: each.size)
        totals = accumulate(each.size for each in own)
        self._changing = [each for each, total in zip(own, totals) if each.size <= _LARGE and total <= _TOGETHER]
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
            remembered += excluding(self._untrained, [*self._changing, *self._large])
            self._digests = [(each, _digest(each)) for each in excluding(self._large, self._changing)]
        self._copies = copies_of(remembered)

    @property
    def is_sure(self) -> bool:
        """bool, whether `undo` puts back all that this window may change."""
        return not self._digests

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
