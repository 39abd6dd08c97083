"""What a program does from its start to its exit code: errors of one line, signals, the device, the processes."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import stat
import sys
import time
import traceback
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Callable

from ms_accum._check import LINE, first_words, one_line

_TOGETHER = 1.0
_HANGUP = getattr(signal, "SIGHUP", None)  # its terminal was closed; Windows has no such signal
SIGNALS = tuple(number for number in (signal.SIGINT, signal.SIGTERM, _HANGUP) if number is not None)


class FlagError(Exception):
    """Raised for wrong flags: exit code 2."""

    code = 2


class Interrupted(BaseException):  # what catches an Exception must not take it for its own
    """Raised when a signal has ended a run, whose state is saved: exit code 128 + number, so 129, 130 or 143."""

    def __init__(self, number: int, details: object):
        super().__init__(f"{signal.Signals(number).name}: {details}")
        self.code = 128 + number


def run(main: Callable[[Sequence[str]], None], argv: Sequence[str] | None = None) -> int:
    """Run a program and return its exit code: 0, 2 for wrong flags, 128 + number after a signal, 1 for other errors.

    An error is one line on stderr; `--debug` adds the traceback, and MindSpore's errors and warnings.
    """
    argv = sys.argv[1:] if argv is None else argv
    debug = "--debug" in argv
    if debug:
        os.environ["MS_ACCUM_DEBUG"] = "1"
    else:
        os.environ.setdefault("GLOG_v", "3")  # MindSpore's errors only; it reads this when it is imported
        name = f"ME.mindspore.log.{os.getpid()}"
        logging.getLogger(name).addFilter(lambda record: False)  # what it logs before it raises an error
    _prepare_output()
    with handled_by(signal.SIG_DFL), warnings.catch_warnings():  # signals end the process, also inside MindSpore
        warnings.showwarning = _show_warning  # type: ignore[assignment]
        try:
            main(argv)
            sys.stdout.flush()
        except (Exception, Interrupted) as error:
            if debug:
                traceback.print_exc()
            is_nameless = isinstance(error, OSError) and error.errno is not None and error.filename is None
            fault = _fault_of_stdout() if is_nameless else None
            _complain("error", f"stdout can't be written: {fault}" if fault else _message(error))
            return error.code if isinstance(error, (FlagError, Interrupted)) else 1
    return 0


def _message(error: BaseException) -> str:
    """Return an error as one line: MindSpore's errors have a C++ call stack after the first one."""
    if isinstance(error, ModuleNotFoundError):
        return f"the package '{error.name}' is missing. Run: pip install -r requirements.txt"
    if isinstance(error, OSError) and error.strerror and error.filename:
        return one_line(f"'{error.filename}': {error.strerror}", LINE)
    return one_line(first_words(str(error)), LINE) or type(error).__name__


def _show_warning(message: object, *where: object) -> None:
    _complain("warning", one_line(message, LINE))


def _complain(kind: str, line: str) -> None:
    """Print an error or a warning. A full disk below stderr changes neither the program's course nor its exit code."""
    try:
        print(f"{kind}: {line}", file=sys.stderr, flush=True)
    except OSError:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")


def _fault_of_stdout() -> str | None:
    """Return why nothing can be printed, such as a full disk, and print nothing more; None if stdout works."""
    try:
        print(flush=True)  # of a line that was written in part, nothing would be left to flush
    except OSError as error:
        silence()  # Python would fail again when it flushes stdout at its exit
        return error.strerror
    return None


def _prepare_output() -> None:
    """Let what a program prints not end it: a stdout that is closed, characters that a terminal does not have."""
    if sys.stdout is None:
        silence()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError):  # not a stream of Python's own
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def show(name: str, value: object) -> None:
    """Print a fact about the run as one line."""
    print(f"{name:16} {one_line(value, LINE)}", flush=True)


def silence() -> None:
    """Print nothing more: rank 0 prints for all."""
    sys.stdout = open(os.devnull, "w", encoding="utf-8")


def use_device(target: str) -> str:
    """Set MindSpore's device, unless `target` is "auto", and return it."""
    import mindspore as ms

    default = ms.get_context("device_target")
    if target not in ("auto", default):
        try:
            ms.set_device(target)
        except Exception as error:
            raise FlagError(f"argument --device_target: {target} is not available here, {default} is") from error
    return ms.get_context("device_target")


# Signals


@contextlib.contextmanager
def handled_by(handler: Any) -> Iterator[None]:
    """Set the handler of `SIGNALS` inside the block; what a shell or nohup tells this process to ignore, it ignores."""
    before = {number: old for number in SIGNALS if (old := signal.getsignal(number)) != signal.SIG_IGN}
    try:
        for number in before:
            signal.signal(number, handler)
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


def interrupt(number: int, frame: object) -> None:
    """Raise `Interrupted`: the handler for a block that cleans up, and does not call MindSpore."""
    raise Interrupted(number, "nothing is changed")


class Signals:
    """Remembers the first of `SIGNALS` inside a block, for `Checkpointer(stop=...)`; a second one ends the process.

    But for what comes within a second: closing a session, or a service, sends several kinds together.

    At the end of the block it raises `Interrupted`. Outside of it both end the process at once: before training there
    is nothing to save, and after it all is saved.
    """

    def __init__(self) -> None:
        self._number: int | None = None
        self._came = 0.0
        self._handled = handled_by(self._handle)

    def received(self) -> bool:
        """Return whether to stop."""
        return self._number is not None

    def __enter__(self) -> Signals:
        self._handled.__enter__()
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        from ms_accum import Stopped

        self._handled.__exit__(None, None, None)
        if isinstance(error, Stopped):  # without a signal: another rank received it
            raise Interrupted(self._number or signal.SIGTERM, f"{error}; --resume continues from there") from error
        # What it printed before the signal came fails, too.
        if isinstance(error, OSError) and _HANGUP is not None and self._number == _HANGUP:
            raise Interrupted(_HANGUP, "its terminal was closed; --resume continues") from error
        if error is None and self._number is not None:
            raise Interrupted(self._number, "the training is complete and saved; --resume evaluates it")

    def _handle(self, number: int, frame: object) -> None:
        if number == _HANGUP:
            _leave_terminal()
        if self._number is None:
            self._number, self._came = number, time.monotonic()
        elif number != _HANGUP and time.monotonic() - self._came > _TOGETHER:
            os._exit(128 + number)  # not for SIGHUP, which comes twice, from the system and from the shell


def _leave_terminal() -> None:
    """Let what is printed to a terminal that was closed go nowhere: an error would come before the state is saved."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # there is none
            if stat.S_ISCHR(os.fstat(descriptor).st_mode) and not os.isatty(descriptor):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
