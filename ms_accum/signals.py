"""What becomes of Ctrl-C and SIGTERM?

While MindSpore compiles a graph, and for moments of each run of one, it holds SIGINT and makes it a SIGTERM to its
own process, on which Python dies without a word. So no thread takes these signals but one that waits for them. For
this they have to be blocked before NumPy and MindSpore are imported and start threads: a program does that first.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED, TERMINATED = 130, 143
CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
WORDS = {INTERRUPTED: "interrupted", TERMINATED: "terminated"}


class Signals:
    """The signals of a program: the first raises a KeyboardInterrupt in the main thread, the second ends it at once."""

    def __init__(self) -> None:
        self.code = 0
        """int, the exit code that a signal asks for; 0 before there was one."""
        self._deferred = False
        self._over = False
        self._before: dict[int, object] = {}

    @property
    def words(self) -> str:
        """What the program says of its end."""
        return WORDS.get(self.code, WORDS[INTERRUPTED])

    def pending(self) -> bool:
        """Return whether a signal asks to stop."""
        return self.code != 0

    def __enter__(self) -> Signals:
        self.code, self._over = 0, False
        # For threads that do not block them, and systems that can't.
        for number in CODES:
            self._before[number] = signal.signal(number, self._handle)
        if hasattr(signal, "pthread_sigmask"):
            # SIGURG is ignored where nobody handles it, so it can wake the main thread up.
            self._before[signal.SIGURG] = signal.signal(signal.SIGURG, self._interrupt)
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, CODES)
            self._thread = threading.Thread(target=self._wait, daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        if hasattr(signal, "pthread_sigmask"):
            self._over = True
            signal.pthread_kill(self._thread.ident or 0, signal.SIGTERM)
            self._thread.join()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    @contextmanager
    def deferred(self) -> Iterator[None]:
        """Let the block ask `pending` itself; if it did not, the signal comes at its end."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.pending():
            raise KeyboardInterrupt

    def _wait(self) -> None:
        while True:
            number = signal.sigwait(CODES)
            if self._over:
                return
            if self._take(number):
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._take(number):
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    def _take(self, number: int) -> bool:
        """Note a signal, and return whether the main thread is to be interrupted."""
        if self.code:
            os._exit(CODES[signal.Signals(number)])
        self.code = CODES[signal.Signals(number)]
        return not self._deferred


SIGNALS = Signals()
"""Those of this process, which has one set of them."""
