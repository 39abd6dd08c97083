"""Lets "Stop" in a notebook end a run, and not the kernel."""

from __future__ import annotations

import builtins
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Callable

# Who clicks twice means one interrupt, the second of which may come when the run has ended.
_TOGETHER = 1.0
_last = [-_TOGETHER]  # when the last interrupt came


@contextmanager
def interruptible() -> Iterator[Callable[[], None]]:
    """Let "Stop" in a notebook raise KeyboardInterrupt inside the block, in IPython's main thread.

    MindSpore turns SIGINT into SIGTERM while a graph is compiled or run, which would end the kernel with all variables.
    A program's handler of SIGTERM is left, and Python outside IPython ends as it does.

    Yields:
        Callable, raises the KeyboardInterrupt that was lost: what Python raises while MindSpore compiles, it drops.
    """
    in_ipython = hasattr(builtins, "get_ipython") and threading.current_thread() is threading.main_thread()
    if not in_ipython or signal.getsignal(signal.SIGTERM) not in (signal.SIG_DFL, _end_unless_repeated):
        yield lambda: None
        return
    began = time.monotonic()

    def interrupt(number: int, frame: Any) -> None:
        _last[0] = time.monotonic()
        raise KeyboardInterrupt

    def raise_lost() -> None:
        if _last[0] >= began:
            raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield raise_lost
    finally:
        signal.signal(signal.SIGTERM, _end_unless_repeated if _last[0] >= began else signal.SIG_DFL)


def _end_unless_repeated(number: int, frame: Any) -> None:
    """End the process as SIGTERM does, unless it belongs to the interrupt of a run that has just ended."""
    if time.monotonic() - _last[0] > _TOGETHER:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
