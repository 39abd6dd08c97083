"""Runs a program from its command line to its exit code: one-line errors, output, signals.

While MindSpore compiles a graph, and briefly in each run of one, it catches SIGINT and sends SIGTERM to its own
process, which ends Python without a message. So a single thread waits for signals, and all other threads must block
them. `begin` blocks them before NumPy and MindSpore are imported, which start threads.

An exception that is raised inside MindSpore's compiler, which calls Python, ends in dozens of lines and another error.
So the first signal interrupts the main thread between two calls of MindSpore, never inside one.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Callable, NoReturn, Protocol

from .. import _check

OK, TRAINING, USAGE, DATA, CHECKPOINT, DISK = 0, 1, 2, 3, 4, 5
HUNG_UP, INTERRUPTED, TERMINATED = 129, 130, 143
CODES = {signal.SIGINT: INTERRUPTED, signal.SIGTERM: TERMINATED}
if hasattr(signal, "SIGHUP"):  # not on Windows, where signals can't be blocked either
    CODES[signal.SIGHUP] = HUNG_UP
_CAN_BLOCK = hasattr(signal, "pthread_sigmask")
SIGNAL_MESSAGES = {INTERRUPTED: "interrupted", TERMINATED: "terminated", HUNG_UP: "the terminal was closed"}
RETRY_SECONDS = 0.05
"""float, seconds between two attempts to interrupt a main thread that is inside MindSpore."""
REPEAT_SECONDS = 1.0
"""float, seconds in which a repeated signal counts as one: shells, systems and launchers may send it twice."""
_CURSOR_UP = "\x1b[A"  # how tqdm moves up, by a write of its own


# Errors and exit codes


class Failure(Exception):
    """An error that ends a program: one line for the user, and an exit code."""

    def __init__(self, message: object, code: int):
        # MindSpore's errors contain a C++ call stack after the first line.
        text = message if isinstance(message, str) else _check.first_words(str(message))
        super().__init__(_check.one_line(text.strip(), _check.LINE) or type(message).__name__)
        self.code = code


@contextmanager
def exit_code(code: int, *kinds: type[Exception]) -> Iterator[None]:
    """Convert errors of these kinds inside the block to a `Failure` with this exit code."""
    try:
        yield
    except Failure:
        raise
    except kinds as error:
        raise Failure(error, code) from error


# A program's life


class ParsesFlags(Protocol):
    """Parses the flags of a program."""

    def parse(self, argv: Sequence[str]) -> Any:
        """Return the flags, including ``debug``, or raise a `Failure`."""

    def in_flags(self, message: str) -> str:
        """Return an error message about arguments of the library, with the names of the flags that set them."""


def begin(parser: ParsesFlags, version: str) -> None:
    """Check the flags before MindSpore is imported, and block signals before it starts threads. Call `run` afterwards.

    On a terminal it prints a line, because the import takes seconds.
    """
    block_signals()
    with lasting_streams():
        try:
            debug = parser.parse(sys.argv[1:]).debug
        except Failure as failure:
            print(f"error: {failure}", file=sys.stderr)
            sys.exit(failure.code)
        if not debug:
            MINDSPORE_LOG.divert()
        if sys.stdout.isatty():  # otherwise programs read the output, or it is the log of a rank
            print(f"{'ms_accum':16} {version}, starting MindSpore ...", flush=True)


def run(main: Callable[[Any], None], parser: ParsesFlags, argv: Sequence[str] | None = None) -> int:
    """Parse the flags, run, and return the exit code. Errors are printed as one line, with --debug with a traceback."""
    debug = False
    with lasting_streams(), plain_warnings(), SIGNALS:
        try:
            SIGNALS.raise_pending()
            arguments = parser.parse(sys.argv[1:] if argv is None else argv)
            debug = arguments.debug
            with exit_code(TRAINING, Exception):
                main(arguments)
        except Failure as failure:
            if debug:
                traceback.print_exception(type(failure), failure, failure.__traceback__)
            print(f"error: {parser.in_flags(str(failure))}", file=sys.stderr)
            return failure.code
        except KeyboardInterrupt:
            print(f"error: {SIGNAL_MESSAGES[SIGNALS.code or INTERRUPTED]}", file=sys.stderr)
            return SIGNALS.code or INTERRUPTED
    return OK


# Output


@contextmanager
def quiet() -> Iterator[None]:
    """Disable MindSpore's log inside the block, whose errors the program prints itself in one line."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def without_native_log() -> Iterator[None]:
    """Hold back what the block writes to stderr from C++, as MindSpore does before some errors; lost if it raises one.

    Otherwise it is written after the block.
    """
    with tempfile.TemporaryFile() as native_log:
        sys.stderr.flush()
        stderr = os.dup(2)
        os.dup2(native_log.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
        native_log.seek(0)
        os.write(2, native_log.read())


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each warning as one line, without its location in the code."""
    formatwarning = warnings.formatwarning
    warnings.formatwarning = lambda message, *location: (
        f"warning: {_check.one_line(' '.join(str(message).split()), _check.LINE)}\n"
    )
    try:
        yield
    finally:
        warnings.formatwarning = formatwarning


@contextmanager
def lasting_streams() -> Iterator[None]:
    """Keep stdout and stderr usable inside the block, even if their readers are gone."""
    open_streams()
    stdout, stderr = sys.stdout, sys.stderr
    streams = [_Stream(stdout), _Stream(stderr)]
    sys.stdout, sys.stderr = streams
    try:
        yield
    finally:
        for stream in streams:
            stream.flush()
        sys.stdout, sys.stderr = stdout, stderr


def open_streams() -> None:
    """Redirect closed streams to the null device; otherwise the next opened file would receive the output."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))


class _Stream:
    """A stream whose errors never end the program, and that shows control characters instead of obeying them.

    Errors are: closed, disconnected, disk full, or a character not encodable.

    Args:
        stream (TextIO): the stream to write to while it works.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    def write(self, text: str) -> int:
        """Write the text, or discard it if that fails."""
        redraws = text.startswith("\r")  # a progress bar redraws its line
        moves_up = text and not text.replace(_CURSOR_UP, "")
        shown = text if moves_up else "\r" * redraws + _check.visible(text[redraws:])
        try:
            self._stream.write(shown)
        except OSError:
            self._drop()
        return len(text)

    def flush(self) -> None:
        """Flush the buffer, or discard it if that fails."""
        try:
            self._stream.flush()
        except OSError:
            self._drop()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _drop(self) -> None:
        """Discard the buffer, which would fail again, and all later output."""
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())
        os.close(null)


class MindSporeLog:
    """MindSpore's log, including its warnings, in a file instead of on the terminal."""

    path: str | None = None
    """Optional[str], the file to write it to, set when the run has a folder."""

    def divert(self) -> None:
        """Divert the log before MindSpore is imported, unless the user has set its variables or a launcher logs it."""
        if "MS_ROLE" in os.environ or any(name.startswith("GLOG_") for name in os.environ):
            return
        from ..ranks.lifetime import scratch_folder

        try:
            folder = scratch_folder()
        except OSError:  # such as a full disk: then only critical messages are logged, on the terminal
            os.environ["GLOG_v"] = "4"
            return
        os.environ.update(GLOG_logtostderr="0", GLOG_stderrthreshold="4", GLOG_log_dir=folder)
        atexit.register(self._keep, folder, os.getpid())

    def _keep(self, folder: str, owner: int) -> None:
        """Write what was logged to `path`, if anything, before the temporary folder is removed."""
        if os.getpid() != owner:  # a child process that was forked
            return
        with contextlib.suppress(OSError):
            logged = "".join(path.read_text(errors="replace") for path in sorted(Path(folder).rglob("*.log.*")))
            if logged and self.path is not None:
                Path(self.path).unlink(missing_ok=True)  # not written into: it may be a link
                Path(self.path).write_text(logged, encoding="utf-8")


MINDSPORE_LOG = MindSporeLog()
"""The log of this process; a process has one such object."""


# Signals


def handled_signals() -> list[signal.Signals]:
    """Return the signals to handle; under `nohup` SIGHUP stays ignored."""
    return [number for number in CODES if number.name != "SIGHUP" or signal.getsignal(number) != signal.SIG_IGN]


def block_signals() -> None:
    """Block the handled signals in this thread, and in the threads that it starts later."""
    if _CAN_BLOCK:
        signal.pthread_sigmask(signal.SIG_BLOCK, list(CODES))


class StopRequest:
    """A first signal, which requests a stop; it decides whether a second one ends the program immediately.

    Args:
        number (int): the first signal.
    """

    def __init__(self, number: int):
        self.number = signal.Signals(number)
        self._time = time.monotonic()

    @property
    def code(self) -> int:
        """int, the exit code of this signal."""
        return CODES[self.number]

    def at_once(self, number: int) -> bool:
        """Return whether a signal received now ends the program immediately; a closed terminal (SIGHUP) never does."""
        repeated = number == self.number and time.monotonic() - self._time < REPEAT_SECONDS
        return not repeated and signal.Signals(number).name != "SIGHUP"


class Signals:
    """The signals of a program: the first raises KeyboardInterrupt in the main thread, the second ends the program."""

    def __init__(self) -> None:
        self._request: StopRequest | None = None
        self._deferred = False
        self._closing = False
        self._raised = False
        self._interrupting = False
        self._handlers: dict[int, object] = {}
        self._numbers: list[signal.Signals] = []

    @property
    def code(self) -> int:
        """int, the exit code of the signal; 0 if there was none."""
        return self._request.code if self._request else 0

    def failure(self, details: str) -> Failure:
        """Return the error of a run that a signal has ended; without one, another rank received it."""
        code = self.code or TERMINATED
        return Failure(f"{SIGNAL_MESSAGES[code]}{details}", code)

    def pending(self) -> bool:
        """Return whether a signal has been received."""
        return self._request is not None

    def raise_pending(self) -> None:
        """Raise KeyboardInterrupt if a signal has been received, once."""
        if self.pending() and not self._raised:
            self._raise()

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

    def __enter__(self) -> Signals:
        self._request = None
        self._closing = False
        self._raised = False
        self._interrupting = False
        self._deferred = True  # `run` raises signals received so far at the place where it handles them
        self._numbers = handled_signals()
        for number in self._numbers:  # for threads that do not block signals
            self._handlers[number] = signal.signal(number, self._handle)
        if _CAN_BLOCK:
            # SIGURG is ignored where it has no handler, so it is safe for waking the main thread.
            self._handlers[signal.SIGURG] = signal.signal(signal.SIGURG, self._interrupt)
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, self._numbers)
            for number in signal.sigpending().intersection(self._numbers):
                self._record(signal.sigwait([number]))
            self._thread = threading.Thread(target=self._wait, daemon=True)
            self._thread.start()
        self._deferred = False
        return self

    def __exit__(self, *error: object) -> None:
        if _CAN_BLOCK:
            self._closing = True
            signal.pthread_kill(self._thread.ident or 0, signal.SIGTERM)
            self._thread.join()
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for number, handler in self._handlers.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _wait(self) -> None:
        """Wait for signals, and interrupt the main thread again and again until it is outside of MindSpore."""
        while True:
            number = self._next()
            if self._closing:
                return
            if number is not None and self._record(number):
                self._interrupting = True
            if self._interrupting:
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGURG)

    def _next(self) -> int | None:
        """Wait for a signal; while the main thread is to be interrupted only for a moment, and return None then."""
        if not self._interrupting:
            return signal.sigwait(self._numbers)
        time.sleep(RETRY_SECONDS)
        received = signal.sigpending().intersection(self._numbers)
        return signal.sigwait(received) if received else None

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._record(number):
            return
        if not (_CAN_BLOCK and _is_in_mindspore(frame)):
            self._raise()
        self._interrupting = True
        signal.pthread_kill(self._thread.ident or 0, number)  # wakes the waiting thread; it counts as the same signal

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if _is_in_mindspore(frame):
            return  # the waiting thread tries again
        self._interrupting = False
        if not self._deferred:  # it may have begun since the signal
            self.raise_pending()  # once: `deferred` may have raised it already

    def _raise(self) -> NoReturn:
        self._raised = True
        raise KeyboardInterrupt

    def _record(self, number: int) -> bool:
        """Record a signal, and return whether to interrupt the main thread."""
        if self._request is None:
            self._request = StopRequest(number)
            return not self._deferred
        if self._request.at_once(number):
            os._exit(CODES[signal.Signals(number)])
        return False


def _is_in_mindspore(frame: FrameType | None) -> bool:
    """Return whether a frame is MindSpore's, or was called by it."""
    while frame is not None:
        if str(frame.f_globals.get("__name__")).partition(".")[0] == "mindspore":
            return True
        frame = frame.f_back
    return False


SIGNALS = Signals()
"""The signals of this process; a process has one such object."""
