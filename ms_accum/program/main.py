"""How does a program run, and how does it end?"""

from __future__ import annotations

import logging
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Callable, Protocol

from .signals import INTERRUPTED, SIGNALS, block_signals
from .streams import MINDSPORE_LOG, lasting_streams

OK, TRAINING, USAGE, DATA, CHECKPOINT, DISK = 0, 1, 2, 3, 4, 5


class Failure(Exception):
    """The end of a program: one line for the user, and an exit code."""

    def __init__(self, message: object, code: int):
        # After the first line MindSpore's errors have a C++ call stack.
        super().__init__(str(message).strip().split("\n")[0] or type(message).__name__)
        self.code = code


@contextmanager
def exit_code(code: int, *kinds: type[Exception]) -> Iterator[None]:
    """Turn errors of these kinds inside the block into a `Failure` with this exit code."""
    try:
        yield
    except Failure:
        raise
    except kinds as error:
        raise Failure(error, code) from error


@contextmanager
def quiet() -> Iterator[None]:
    """Disable MindSpore's log inside the block, where our own error line is better."""
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Print each warning as one line, like errors: users do not need its place in the code."""
    kept = warnings.formatwarning
    warnings.formatwarning = lambda message, *place: f"warning: {' '.join(str(message).split())}\n"
    try:
        yield
    finally:
        warnings.formatwarning = kept


class ParsesFlags(Protocol):
    """Parses the flags of a program."""

    def parse(self, argv: Sequence[str]) -> Any:
        """Return the flags, including ``debug``, or raise a `Failure`."""

    def in_flags(self, message: str) -> str:
        """Return an error message about arguments of the library as one about the flags that set them."""


def begin(parser: ParsesFlags, version: str) -> None:
    """Reject wrong flags before MindSpore is imported, and block signals before it starts threads; then call `run`.

    On a terminal it prints a line first: the import takes seconds.
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
        if sys.stdout.isatty():  # elsewhere the output is read by programs, or is a rank's log
            print(f"{'ms_accum':16} {version}, starting MindSpore ...", flush=True)


def run(main: Callable[[Any], None], parser: ParsesFlags, argv: Sequence[str] | None = None) -> int:
    """Parse, run and return the exit code; errors are printed as one line, with --debug also as a traceback."""
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
            print(f"error: {SIGNALS.words}", file=sys.stderr)
            return SIGNALS.code or INTERRUPTED
    return OK
