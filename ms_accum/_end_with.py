"""Does a process end with the one that started it?"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Callable

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> Callable[[], None] | None:
    """Return what a child calls to be killed when its parent ends, however that does; None where there is no such call.

    Made before a fork, so that after it nothing is loaded.

    Args:
        parent (int): the process that starts the child.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return ask
