"""Does an optimizer train?"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any

import mindspore as ms
import numpy as np

from .. import _check

# Models above this size in bytes are not checked. Several updates are checked, as the first rates may be too small.
_LIMIT = 2**26
_TIMES = 3
_TOO_SMALL = 1e-6  # relative to a weight: the precision of float32


class FirstUpdate:
    """Checks whether the first updates change a parameter; if not, updates would be counted but nothing trained.

    Args:
        owner (str): the name used in the warning.
        kind (str): the optimizer's class name.
        parameters (Sequence[Parameter]): the trained parameters.
    """

    def __init__(self, owner: str, kind: str, parameters: Sequence[Any]):
        self._owner, self._kind = owner, kind
        self._parameters = parameters if sum(each.nbytes for each in parameters) <= _LIMIT else ()
        self._left = _TIMES if self._parameters else 0
        self._before: list[int] = []
        self._size = self._largest = 0.0

    def begin(self) -> None:
        """Record the parameters' checksums before a window that may be the first with an update."""
        if not self._left:
            return
        arrays = [each.astype(ms.float32).asnumpy() for each in self._parameters]
        self._before = [zlib.crc32(array.tobytes()) for array in arrays]
        self._size = math.sqrt(sum(float(np.square(array, dtype=np.float64).sum()) for array in arrays))
        self._largest = max(float(np.abs(array).max(initial=0.0)) for array in arrays)

    def end(self, lr: float, norm: float) -> None:
        """Warn if an update with this rate and gradient norm should have changed a parameter but did not."""
        if not self._left or not self._before:
            return
        self._left -= 1
        after = (zlib.crc32(each.astype(ms.float32).asnumpy().tobytes()) for each in self._parameters)
        if any(now != before for now, before in zip(after, self._before)):
            self._left = 0
        elif lr * norm > _TOO_SMALL * self._size and lr > _TOO_SMALL * self._largest:
            self._left = 0
            _check.warn(
                f"For '{self._owner}', '{self._kind}' changed no parameter in an update with learning rate {lr:g} and "
                f"a gradient of norm {norm:g}. If this is not intended, MindSpore does not run it here: use another "
                "optimizer, or another mode."
            )
