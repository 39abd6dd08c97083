"""How are Ctrl-C, SIGTERM and a closed terminal handled?

While MindSpore compiles a graph, and briefly in each run of one, it catches SIGINT and sends SIGTERM to its own
process, which ends Python without a message. So a single thread waits for these signals, and all other threads must
block them. A program blocks them first, before NumPy and MindSpore are imported and start threads.

An exception that is raised inside MindSpore's compiler, which calls Python, ends in dozens of lines and another error.
So the first signal interrupts the main thread between two calls of MindSpore, never inside one.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

HUNG_UP, INTERRUPTED, TERMINATED = 129, 130, 143
PAUSE = 0.05
"""float, seconds between two attempts to interrupt a main thread that is inside MindSpore."""
SAME = 1.0
"""float, seconds in which a repeated signal counts as one: shells, systems and launchers may send it twice."""
CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
WORDS = {INTERRUPTED: "interrupted", TERMINATED: "terminated", HUNG_UP: "the terminal was closed"}
if hasattr(signal, "SIGHUP"):
    CODES[signal.SIGHUP] = HUNG_UP


def heard() -> list[signal.Signals]:
    """Return the signals to handle; under `nohup` SIGHUP stays ignored."""
    return [number for number in CODES if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN]


def block_signals() -> None:
    """Block the handled signals in this thread, and in the threads that it starts later."""
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_BLOCK, list(CODES))


class Asked:
    """A first signal, which requests a stop; it decides whether a second one ends the program immediately.

    Args:
        number (int): the first signal.
    """

    def __init__(self, number: int):
        self.number = signal.Signals(number)
        self._at = time.monotonic()

    @property
    def code(self) -> int:
        """int, the exit code of this signal."""
        return CODES[self.number]

    def at_once(self, number: int) -> bool:
        """Return whether a signal received now ends the program immediately; a closed terminal (SIGHUP) never does."""
        repeated = number == self.number and time.monotonic() - self._at < SAME
        return not repeated and signal.Signals(number).name != "SIGHUP"


class Signals:
    """The signals of a program: the first raises KeyboardInterrupt in the main thread, the second ends the program."""

    def __init__(self) -> None:
        self._asked: Asked | None = None
        self._deferred = False
        self._over = self._raised = self._interrupts = False
        self._before: dict[int, object] = {}
        self._numbers: list[signal.Signals] = []

    @property
    def code(self) -> int:
        """int, the exit code of the signal; 0 if there was none."""
        return self._asked.code if self._asked else 0

    @property
    def words(self) -> str:
        """The text that the program prints at its end."""
        return WORDS.get(self.code, WORDS[INTERRUPTED])

    def raise_pending(self) -> None:
        """Raise KeyboardInterrupt if a signal has been received, once."""
        if self.pending() and not self._raised:
            self._raise()

    def pending(self) -> bool:
        """Return whether a signal has been received."""
        return self._asked is not None

    def __enter__(self) -> Signals:
        self._asked, self._over, self._raised, self._interrupts = None, False, False, False
        self._deferred = True  # `run` raises signals received so far at the place where it handles them
        # For threads that do not block signals, and systems that can't block them.
        numbers = self._numbers = heard()
        for number in numbers:
            self._before[number] = signal.signal(number, self._handle)
        if hasattr(signal, "pthread_sigmask"):
            # SIGURG is ignored where it has no handler, so it is safe for waking the main thread.
            self._before[signal.SIGURG] = signal.signal(signal.SIGURG, self._interrupt)
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
            for number in signal.sigpending().intersection(numbers):
                self._take(signal.sigwait([number]))
            self._thread = threading.Thread(target=self._wait, daemon=True)
            self._thread.start()
        self._deferred = False
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
        """Do not interrupt the block, which checks `pending` itself; a pending signal is raised at its end."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.pending():
            self._raise()

    def _wait(self) -> None:
        while True:
            number = self._next()
            if self._over:
                return
            self._interrupts |= number is not None and self._take(number)
            if self._interrupts:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)

    def _next(self) -> int | None:
        """Wait for a signal; while the main thread is to be interrupted only for a moment, and return None then."""
        if not self._interrupts:
            return signal.sigwait(self._numbers)
        time.sleep(PAUSE)
        received = signal.sigpending().intersection(self._numbers)
        return signal.sigwait(received) if received else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._take(number):
            return
        if not (_is_in_mindspore(frame) and hasattr(signal, "pthread_kill")):
            self._raise()
        self._interrupts = True
        signal.pthread_kill(self._thread.ident or 0, number)  # wakes the waiting thread; it counts as the same signal

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if _is_in_mindspore(frame):
            return  # the waiting thread tries again
        self._interrupts = False
        if not self._deferred:  # it may have begun since the signal
            self.raise_pending()  # once: `deferred` may have raised it already

    def _raise(self) -> NoReturn:
        self._raised = True
        raise KeyboardInterrupt

    def _take(self, number: int) -> bool:
        """Record a signal, and return whether to interrupt the main thread."""
        if self._asked is not None:
            if self._asked.at_once(number):
                os._exit(CODES[signal.Signals(number)])
            return False
        self._asked = Asked(number)
        return not self._deferred


def _is_in_mindspore(frame: FrameType | None) -> bool:
    """Return whether a frame is MindSpore's, or was called by it."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "mindspore":
            return True
        frame = frame.f_back
    return False


SIGNALS = Signals()
"""The signals of this process; a process has one such object."""
