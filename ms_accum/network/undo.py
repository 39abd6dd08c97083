"""What forwards change beside gradients: statistics of BatchNorm, counters of random layers."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
from mindspore import Parameter

from .parameters import as_array, copies_of, excluding, is_equal, restore

# Larger Parameters are not copied before it is known that forwards change them.
_LARGE = 2**20


class Undo:
    """Puts back what forwards have changed since the beginning of a window.

    Which Parameters forwards change is known after the first window; mostly there are none.

    Args:
        parameters (Iterable[Parameter]): those of the network.
        trained (Iterable[Parameter]): those of them that are trained, which forwards do not change.
        counters (Iterable[Parameter]): more Parameters that they do change. Default: none.
    """

    def __init__(
        self, parameters: Iterable[Parameter], trained: Iterable[Parameter], counters: Iterable[Parameter] = ()
    ):
        self._untrained = excluding(parameters, trained)
        self._changing = list(counters)
        self._is_known = False
        self._copies: list[tuple[Parameter, np.ndarray]] = []
        self._digests: list[tuple[Parameter, bytes]] = []

    def begin(self) -> None:
        """Remember what is there now."""
        remembered = [*self._changing]
        if not self._is_known:
            remembered += [each for each in self._untrained if each.size <= _LARGE]
            self._digests = [(each, _digest(each)) for each in self._untrained if each.size > _LARGE]
        self._copies = copies_of(remembered)

    def learn(self) -> None:
        """Note what the window has changed, which is all that is remembered from now on."""
        if not self._is_known:
            self._is_known = True
            found = [each for each, copy in self._copies[len(self._changing) :] if not is_equal(each, copy)]
            self._changing += found + [each for each, digest in self._digests if _digest(each) != digest]
            self._digests = []
        self._copies = []

    def undo(self) -> bool:
        """Put back what was remembered; return whether that is all that has changed."""
        restore(self._copies)
        return all(_digest(each) == digest for each, digest in self._digests)


def _digest(parameter: Parameter) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(as_array(parameter)).view(np.uint8).data).digest()
