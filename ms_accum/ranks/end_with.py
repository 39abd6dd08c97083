"""How does a child process end when its parent ends?"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from typing import Callable

_PR_SET_PDEATHSIG = 1


def end_with(parent: int) -> Callable[[], None] | None:
    """Return a function for the child process, after which it is killed when its parent ends; None if not on Linux.

    Call this before the fork, so that the child need not load a library.

    Args:
        parent (int): process id of the parent.
    """
    if sys.platform != "linux":
        return None
    prctl = ctypes.CDLL(None).prctl

    def ask() -> None:
        prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return ask
